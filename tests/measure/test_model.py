"""Seconds of a model's layers, and attention that is measured apart."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.kernels import load
from flexengine.kernels.cpu import NativeKernels
from flexengine.measure import attention, fused, machine, model
from flexengine.model.skeleton import Skeleton
from flexengine.plan.facts import ModelFacts
from flexengine.plan.sizes import ALIGN, workspace
from flexengine.plan.workload import Workload
from tests.helpers.measuring import books, hardware
from tests.helpers.plans import opt

# One model.


def held_by(skeleton: Skeleton) -> list[tuple[int, bool]]:
    groups = (*skeleton.layers, skeleton.others)
    tensors = [slot.holder[slot.name] for group in groups for slot in group.values()]
    return [(id(tensor), tensor.is_meta) for tensor in tensors]


@pytest.mark.parametrize("family", ["llama", "opt-350m", "qwen3-moe", "gpt-oss", "bloom"])
def test_model(families: Any, tmp_path: Path, family: str) -> None:
    """All its layers and its head; and afterwards the engine gives the right tokens, with fresh weights."""
    known = families(family)
    with Engine(known.directory, policy=Policy(), device="cpu", offload_dir=tmp_path) as engine:
        before, booked = held_by(engine.core.skeleton), books(engine.core.machine)
        buffers = [id(b) for b in engine.core.skeleton.model.buffers()]
        held, facts = engine.core.opened.held, engine.facts
        found = model.measure_model(engine.core.skeleton, facts, held, engine.core.machine, 64)
        layers, resident, heads = (found[name] for name in ("layers", "resident", "heads"))
        assert held_by(engine.core.skeleton) == before
        assert all(meta for _, meta in before)
        assert [id(b) for b in engine.core.skeleton.model.buffers()] == buffers
        assert books(engine.core.machine) == booked
        assert set(layers) == set(resident) == {facts.signature(j) for j in range(4)}
        assert len(layers) == (2 if family == "qwen3-moe" else 1)
        for table in (*layers.values(), *resident.values()):
            sizes = [x for x, _ in table]
            assert {1, 64} <= set(sizes) <= {n for n in model.TOKENS if n <= 64}
            assert sizes == sorted(sizes)
            assert all(seconds > 0 for _, seconds in table)
        assert list(heads) == [facts.head_signature]
        assert [x for x, _ in heads[facts.head_signature]] == list(model.ROWS)
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


@pytest.mark.parametrize(("dtype", "reordered"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_weights_have_the_order_that_a_job_gives_them(
    families: Any, tmp_path: Path, family: str, dtype: str, reordered: bool
) -> None:
    """Kernels reorder weights that stay in memory, and read them faster. So layers are measured in both orders, and
    layers in one call in that of the job; torch, which multiplies 16-bit activations, has no other order."""
    known, seen = families(family), list[list[Any]]()
    options: Any = {"dtype": dtype, "device": "cpu", "offload_dir": tmp_path}
    with Engine(known.directory, policy=Policy(), **options) as engine:
        skeleton, machine_ = engine.core.skeleton, engine.core.machine
        layer = [param for param in skeleton.layers[-1].values() if param.matrix]

        def orders() -> list[Any]:
            return [getattr(param.module, "packed", False) or False for param in layer]

        def note(bound: int) -> None:
            seen.append(orders())

        found = model.measure_model(skeleton, engine.facts, engine.core.opened.held, machine_, 64, also=note)
        assert set(found["resident"]) == (set(found["layers"]) if reordered else set())
        assert not any(orders())
        engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert seen == [orders()]
        assert any(orders()) == reordered


@pytest.mark.parametrize(("family", "whole"), [("llama", True), ("qwen3-moe", False)])
def test_layers_in_one_call(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, whole: bool
) -> None:
    """Kernels compute whole layers in one call, faster than modules compute them with no attention at all; of mixtures,
    all but the experts. Both are measured with the same random weights."""
    known = families(family)
    monkeypatch.setattr(fused, "random_weights", None)
    with Engine(known.directory, policy=Policy(), device="cpu", offload_dir=tmp_path) as engine:
        opened = engine.core.opened
        before, booked = held_by(opened.skeleton), books(engine.core.machine)
        names = {opened.facts.signature(j) for j in range(4)}
        tables = machine.measure_layers(opened, engine.core.machine, quick=True)
        assert (held_by(opened.skeleton), books(engine.core.machine)) == (before, booked)
        assert set(tables["layers"]) == names
        assert set(tables["fused"]) == {opened.facts.fused_signature(name) for name in names}
        for key, table in tables["fused"].items():
            assert [x for x, _ in table] == sorted(fused.SEQUENCES)
            alone = dict(tables["layers"][key.partition(" with ")[0]])
            assert 0 < dict(table)[1] < (alone[1] if whole else inf)
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


@pytest.mark.parametrize("lossy", [{"cache": "int8"}, {"cache": "int4"}, {"sparse_attention": 0.5}])
def test_caches_of_layers_in_one_call(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lossy: dict[str, Any]
) -> None:
    """`ModelFacts.joins` says what calls for several layers do."""
    directory = families("llama").directory
    with Engine(directory, policy=Policy(), lossy=Lossy(**lossy), device="cpu", offload_dir=tmp_path) as engine:
        joins = engine.facts.joins
        monkeypatch.setattr(ModelFacts, "joins", True)
        monkeypatch.setattr(fused, "SEQUENCES", (2,))
        monkeypatch.setattr(fused, "PASSES", 1)
        assert bool(fused.measure_fused(engine.core.opened, engine.core.machine)) == joins


def test_another_cache_is_measured_alone(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are known for one format of the KV cache are measured in calls for several with each other one."""
    with Engine(families("llama").directory, policy=Policy(), device="cpu") as engine:
        opened: Any = SimpleNamespace(facts=engine.facts)
    asked = list[str]()
    for name in ("measure_layers", "measure_attention"):
        monkeypatch.setattr(machine, name, lambda *_, name=name, **__: asked.append(name) or {"layers": {"a": 1}})
    monkeypatch.setattr(machine, "measure_fused", lambda *_: asked.append("measure_fused") or {})
    facts, table = engine.facts, ((1.0, 1e-3),)
    name, heads, attended = facts.signature(0), {facts.head_signature: table}, {facts.attention_signature(): {}}
    known = hardware(layers={name: table}, heads=heads, attention=attended)
    for tables in ({}, {facts.fused_signature(name): table}, {f"{name} with other": table}):
        machine.quick_model(replace(known, fused=tables), None, opened)  # type: ignore[arg-type]
    assert asked == ["measure_fused"]
    machine.quick_model(hardware(), None, opened)  # type: ignore[arg-type]
    assert asked == ["measure_fused", "measure_layers", "measure_attention"]


def test_random_weights(families: Any, tmp_path: Path) -> None:
    """Every parameter has the checkpoint's shape and varied values, and no two layers share memory that is cached."""
    known = families("llama")
    with Engine(known.directory, policy=Policy(), device="cpu", offload_dir=tmp_path) as engine, torch.no_grad():
        skeleton, names = engine.core.skeleton, [engine.facts.signature(j) for j in range(4)]
        with model.random_weights(skeleton, names, engine.core.opened.held, engine.core.machine) as bound:
            assert bound == 4
            places = set()
            for group in (*skeleton.layers, skeleton.others):
                for name, slot in group.items():
                    tensor = slot.holder[slot.name]
                    assert tensor.shape == known.model.get_parameter(name).shape
                    assert tensor.isfinite().all()
                    assert tensor.unique().numel() > 1
                    places.add(tensor.data_ptr())
            assert len(places) == sum(map(len, (*skeleton.layers, skeleton.others)))
            trials = [model.PassTrial(skeleton, engine.core.machine, 5) for _ in range(2)]
            assert [layer for layer, _ in trials[0].walk(3)] == [-1, 0, 1, 2]
            assert [layer for layer, _ in trials[1].walk(9)] == [-1, 0, 1, 2, 3]


def test_medians_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each signature's layers in all passes; the very first layer is left out."""
    times = iter([[(-1, 7.0), (0, 99.0), (1, 2.0), (2, 3.0)], [(-1, 5.0), (0, 4.0), (1, 6.0), (2, 8.0)]])
    monkeypatch.setattr(model.PassTrial, "walk", lambda self, count: next(times))
    monkeypatch.setattr(model, "PASSES", 2)
    skeleton: Any = None
    machine: Any = None
    found = model.time_layers(skeleton, ["a", "a", "b"], machine, (1,), 100.0)
    assert found == {1: {"a": 4.0, "b": 5.5, model.START: 6.0}}


def test_sizes_are_left_out_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that others are derived from are always measured; rates are in the order of their tokens."""
    clock, asked = [0.0], list[int]()

    def walk(trial: model.PassTrial, _: int) -> Iterator[tuple[int, float]]:
        asked.append(trial.tokens)
        for layer, seconds in ((-1, 0.5), (0, trial.tokens * 0.01), (1, trial.tokens * 0.01)):
            clock[0] += seconds if layer > 0 else 0.0
            yield layer, seconds

    monkeypatch.setattr(model.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(model.PassTrial, "walk", walk)
    monkeypatch.setattr(model, "PASSES", 1)
    monkeypatch.setattr(model, "random_weights", lambda *_: nullcontext(2))
    monkeypatch.setattr(model, "unnoticed", nullcontext)
    monkeypatch.setattr(model, "working_memory", lambda *_: nullcontext())
    monkeypatch.setattr(model, "fitting", lambda facts, machine, numbers: numbers)
    monkeypatch.setattr(model, "release", lambda _: None)
    monkeypatch.setattr(model, "reorders", lambda *_: False)
    monkeypatch.setattr(model, "_head", lambda *args: args[-2])
    facts: Any = SimpleNamespace(layers=[0, 0], signature=lambda j: "a", output=1, head_signature="head")
    skeleton: Any = SimpleNamespace(model=None)
    machine: Any = None
    for seconds, known in ((0.1, [1, 64]), (2.0, [1, 4, 16, 20, 40, 64]), (100.0, sorted(model.TOKENS))):
        monkeypatch.setattr(model, "LAYER_SECONDS", seconds)
        layers, _, heads = model.measure_model(skeleton, facts, {}, machine).values()
        assert layers["a"] == tuple((float(x), x * 0.01) for x in known)
        assert heads == {"head": 0.5}
    assert asked[:2] == [64, 1]


def test_a_single_cold_pass_is_better_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.PassTrial, "walk", lambda trial, _: iter([(-1, 0.5), (0, 9.0)]))
    monkeypatch.setattr(model, "PASSES", 1)
    skeleton: Any = None
    machine: Any = None
    assert model.time_layers(skeleton, ["a"], machine, (1,), 0.0) == {1: {model.START: 0.5, "a": 9.0}}


def test_no_room_for_a_layer(families: Any, tmp_path: Path) -> None:
    """Without room for a layer, no rates of layers are measured, and the head is measured by a part."""
    known = families("llama")
    with Engine(known.directory, policy=Policy(), device="sim", device_mem=100_000, offload_dir=tmp_path) as engine:
        facts, held = engine.facts, engine.core.opened.held
        layers, _, heads = model.measure_model(engine.core.skeleton, facts, held, engine.core.machine).values()
        assert layers == {}
        assert len(heads[facts.head_signature]) == len(model.ROWS)
        assert engine.core.machine.device.ledger.peak == 0


def test_activations_of_measured_layers_fit(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those numbers of tokens are measured whose activations fit beside the weights; they are reserved."""
    with Engine(families("llama").directory, policy=Policy(), device="cpu", device_mem=2_400_000) as engine:
        machine, facts, booked = engine.core.machine, engine.facts, list[int]()
        ledger = machine.device.ledger

        def spied(*args: Any) -> dict[int, dict[str, float]]:
            assert args[3] == [64, 1, 256, 16, 8]  # not 512
            booked.append(ledger.used)
            return {}

        monkeypatch.setattr(model, "QUICK", ((64, 1, 256, 16, 512, 8), 0.1, 0.01))
        monkeypatch.setattr(model, "time_layers", spied)
        monkeypatch.setattr(
            model, "fitting", lambda *args, real=model.fitting: booked.append(ledger.used) or real(*args)
        )
        model.measure_model(engine.core.skeleton, facts, engine.core.opened.held, machine, quick=True)
        weights, *passes = booked
        for both in passes:  # with weights in each order
            assert 256 * 4 * facts.width * facts.itemsize < both - weights <= ledger.capacity - weights
        assert len(passes) == 2
        assert ledger.used == 0


def test_attention_with_a_soft_cap_is_measured_apart(families: Any) -> None:
    """A tanh for every score takes time, so that rates of the same shape without one do not hold."""
    with Engine(families("gemma2").directory, policy=Policy(), device="cpu") as engine:
        cap = engine.core.skeleton.config.attn_logit_softcapping
        assert engine.facts.softcap == cap == 50.0
        key = engine.facts.attention_signature(None)
        assert key == replace(engine.facts, softcap=None).attention_signature(None) + ", soft cap"
        trial = attention.AttentionTrial(engine.facts, engine.core.machine, engine.core.dtype)
        assert trial._event(1, None).softcap == cap


def test_rounded_attention_of_prompts_is_measured_apart(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class whose products are rounded has rates of its own, and they are measured with calls that round."""
    seen = list[bool]()
    real = NativeKernels.attend_prompts
    monkeypatch.setattr(NativeKernels, "attend_prompts",
                        lambda *args: seen.append(args[2].rounded) or real(*args))  # fmt: skip
    for bf16 in (True, False):
        monkeypatch.setattr(load(), "bf16", bf16)
        for lossy in (Lossy(), Lossy(compute="int8")):
            with Engine(families("llama").directory, policy=Policy(), device="cpu", lossy=lossy) as engine:
                facts, asked = engine.facts, bf16 and bool(lossy)
                assert facts.rounded == asked
                assert facts.attention_signature().endswith(", rounded") == asked
                trial = attention.AttentionTrial(facts, engine.core.machine, engine.core.dtype)
                with trial.call(1, 0, 9, None) as call:
                    call(0)
                assert seen.pop() == asked


@pytest.mark.slow
@pytest.mark.parametrize(("device_mem", "tables"), [
    (None, {"call", "decode", "prompt", "host"}), (400_000, {"call", "prompt", "host"}), (2048, set()),
])  # fmt: skip
def test_attention_in_little_memory(families: Any, tmp_path: Path, device_mem: int | None, tables: set[str]) -> None:
    """Sizes without room are left out, and not measured again; the ledgers are unchanged."""
    known = families("llama")
    with Engine(known.directory, policy=Policy(), device="sim", device_mem=device_mem, offload_dir=tmp_path) as engine:
        before = books(engine.core.machine)
        found = attention.measure_attention(engine.core.opened, engine.core.machine)
        assert books(engine.core.machine) == before
        assert set(found) == {engine.facts.attention_signature(None)}
        assert set(found[engine.facts.attention_signature(None)]) == tables
        for table in found[engine.facts.attention_signature(None)].values():
            assert all(value > 0 for _, value in table)


def test_memory_for_wide_hidden_states() -> None:
    """An embedding, four residual streams, an output of attention, and what a token keeps beside."""
    facts = replace(opt(2, 256, 4, 1024), streams=4, held=512)
    moment = workspace(facts, Policy(64, 1, prefill_tokens=64), Workload({(64, 1): 1}))
    rows = (1 + 64) * ((256 + 4 * 256 + 256) * facts.itemsize + 512)
    assert 0 <= model._working(facts, [1, 64]) - moment - rows < ALIGN
