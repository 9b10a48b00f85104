"""Chains of engine cores, each with a range of layers: tokens of the whole model, bytes of its parts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexengine import Policy, SamplingParams
from flexengine.engine.core import Core
from flexengine.engine.options import EngineOptions
from flexengine.engine.planner import Planner
from flexengine.engine.stages import JobResources
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.lossy import Lossy
from flexengine.plan.workload import Workload
from flexengine.runtime.execute import Shortage
from flexengine.schedule.tasks import Op, Task
from flexengine.worker.hidden import Ports
from flexengine.worker.worker import Worker
from tests.e2e.test_accounting import FP32, HEAD, HIDDEN, LAYER
from tests.e2e.test_samples import drawn
from tests.helpers.chained import Chain, RamPort, chained
from tests.helpers.families import LENGTHS, NEW, prompts_of, reference

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
D, H, K, MIX = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3)
TWO, UNEVEN, THREE = (0, 2, 4), (0, 3, 4), (0, 1, 3, 4)
POLICIES = {
    "device": Policy(8, 1),
    "in pieces": Policy(2, 3, prefill_tokens=11, schedule="diagonal"),
    "host": Policy(2, 4, weights=H, cache=H, activations=H, schedule="zigzag"),
    "disk": Policy(3, 2, weights=K, cache=K, activations=K, prefill_tokens=20, slots=1),
    "delegated": Policy(3, 2, weights=H, cache=H, delegate="host", prefill_tokens=20, slots=3),
    "everywhere": Policy(2, 3, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=20),
}
TIERS = ("device", "host", "disk")


def tokens(chain: Chain, rows: Any, params: SamplingParams = GREEDY) -> list[Any]:
    results = chain.generate(rows, params)
    assert [r.error for r in results] == [None] * len(results)
    return [[s.token_ids for s in r.samples] if r.samples else r.token_ids for r in results]


def workload() -> Workload:
    return Workload.of((n, NEW) for n in LENGTHS)


# Each policy with one family and one chain, and each family with a policy that uses all tiers.
@pytest.mark.slow
@pytest.mark.parametrize(("family", "cuts", "name"), [
    *(("llama", (TWO, UNEVEN, THREE)[i % 3], name) for i, name in enumerate(POLICIES)),
    ("llama-tied", TWO, "everywhere"), ("llama-tied", THREE, "disk"), ("gemma3", THREE, "everywhere"),
    ("gemma3", UNEVEN, "delegated"), ("gpt-oss", TWO, "host"), ("qwen3-moe", TWO, "everywhere"),
    ("qwen3-moe", THREE, "delegated"), ("opt-350m", TWO, "everywhere"), ("bloom", TWO, "everywhere"),
])  # fmt: skip
def test_tokens_are_those_of_transformers(families: Any, family: str, cuts: Any, name: str) -> None:
    known = families(family)
    with chained(known.directory, cuts, POLICIES[name], device="sim") as chain:
        assert tokens(chain, known.rows) == known.expected
        for core, layout in zip(chain.cores, chain.layouts(workload()), strict=True):
            assert {t: core.machine.tier(t).ledger.peak for t in TIERS} == {t: layout.total(t) for t in TIERS}


@pytest.mark.slow
def test_on_a_cpu(families: Any) -> None:
    known = families("gemma3")
    with chained(known.directory, THREE, POLICIES["everywhere"], device="cpu") as chain:
        assert tokens(chain, known.rows) == known.expected


@pytest.mark.slow
def test_stages_place_their_weights_each_in_its_own_way(families: Any) -> None:
    """The driver forms the same gpu_batches for all; weights and slots are a stage's own."""
    known = families("llama")
    policies = [replace(POLICIES["host"], weights=split, slots=slots) for split, slots in ((D, 2), (H, 3), (K, 1))]
    with chained(known.directory, THREE, policies, device="sim") as chain:
        assert tokens(chain, known.rows) == known.expected
        assert tokens(chain, known.rows[:3]) == known.expected[:3]  # weights that stay serve the next job


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["host", "everywhere", "delegated"])
def test_samples_share_pages_in_every_stage(families: Any, family: str, name: str) -> None:
    known, prompts = families(family), prompts_of(601, (37, 48, 5))
    policy = replace(POLICIES[name], gpu_batch_size=4, num_gpu_batches=3)
    params = SamplingParams(max_tokens=20, n=4, temperature=1.3, seed=5, ignore_eos=True)
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    with chained(known.directory, TWO, policy, device="sim") as chain:
        assert tokens(chain, rows, params) == list(drawn(known.model, prompts, params))


@pytest.mark.slow
def test_pools_differ_where_windows_do(families: Any) -> None:
    """Every second layer of the Gemma has a window: stages of one layer have one pool each, of another size."""
    known, prompts = families("gemma3"), prompts_of(601, (70, 50, 90))
    with chained(known.directory, (0, 1, 2, 4), Policy(3, 1), device="sim") as chain:
        found = chain.layouts(Workload.of((len(p), NEW) for p in prompts))
        assert [[group.window for group in layout.groups] for layout in found] == [[9], [None], [9, None]]
        assert found[0].pools["device"][0].pages < found[1].pools["device"][0].pages
        assert tokens(chain, [{"prompt_token_ids": p} for p in prompts]) == reference(known.model, prompts)


@pytest.mark.slow
def test_encoded_weights(families: Any) -> None:
    """Codes are made of single matrices, so that parts of a model have the codes of the whole."""
    known, lossy, found = families("llama-tied"), Lossy(weights="int8", cache="int8"), []
    for cuts in ((0, 4), TWO, THREE):
        with chained(known.directory, cuts, POLICIES["host"], device="sim", lossy=lossy) as chain:
            found.append(tokens(chain, known.rows))
    assert found == [found[0]] * 3


# Bytes.


@pytest.mark.parametrize("tied", [False, True])
def test_each_weight_is_booked_once(families: Any, tied: bool) -> None:
    """Norms behind the last layer are small and belong to every stage. A tied table belongs to first and last one."""
    known = families("llama-tied" if tied else "llama")
    with chained(known.directory, THREE, Policy(8, 1), device="sim") as chain:
        layouts = chain.layouts(workload())
        for layout, layers, edges in zip(layouts, (1, 2, 1), (1, 0, 1), strict=True):
            assert layout.stored_bytes["device"] == FP32 * (layers * LAYER + edges * HEAD + HIDDEN)
        assert [layout.head_rows > 0 for layout in layouts] == [False, False, True]
        entering, buffer = (-(-FP32 * HIDDEN * n // 4096) * 4096 for n in (sum(LENGTHS), 2048))  # prefill_tokens
        booked = [layout.account["host"].get("entering hidden states", 0) for layout in layouts]
        assert booked == [0, entering, entering]
        assert [layout.account["device"]["port buffers"] for layout in layouts] == [2 * n * buffer for n in (1, 2, 1)]


@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (2, 4)])
def test_a_policy_for_a_stage_fits_its_memory(families: Any, layers: Any) -> None:
    """Two megabytes hold no stage's weights beside the KV cache of more than a few sequences."""
    options = EngineOptions(model=families("llama").directory, device="sim", device_mem="2M", host_mem="100M")
    core = Core(options, layers=layers)
    try:
        planner = Planner(core.machine, core.opened)
        layout = planner.choose(Workload({(20, 10): 50})).layout
        assert layout.total("device") <= 2_000_000
        assert layout.homes.keys() == core.skeleton.wanted.keys()
    finally:
        core.close()


def test_bytes_read_are_those_of_the_stage(families: Any) -> None:
    """From disk, once per sweep: the first stage reads its layers and rows of the embedding, the others their layers,
    the last one the head, too."""
    known = families("llama")
    with chained(known.directory, THREE, Policy(8, 1, weights=K), device="sim") as chain:
        assert tokens(chain, known.rows) == known.expected
        first = [t for prompt in known.prompts for t in prompt]
        sweeps = [first, *([answer[i] for answer in known.expected] for i in range(NEW - 1))]
        rows = sum(len(set(ids)) for ids in sweeps)
        moved = [core.traffic() for core in chain.cores]
        assert [m["h2d"] for m in moved] == [FP32 * NEW * n for n in (LAYER, 2 * LAYER, LAYER + HEAD)]
        assert [m["disk_read"] - m["h2d"] for m in moved] == [FP32 * HIDDEN * rows, 0, 0]


def test_every_stage_gives_its_memory_back(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the second stage, the same cores run the next job."""
    known, perform = families("llama"), Worker.perform

    def failing(worker: Worker, task: Task) -> None:
        if worker.skeleton.enters and task.cell.sweep == 2 and task.op is Op.ENTER:
            raise OutOfMemory("device", "activations", 4096, 10, 20)
        perform(worker, task)

    with chained(known.directory, TWO, POLICIES["in pieces"], device="sim") as chain:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "perform", failing)
            with pytest.raises(Shortage):
                chain.generate(known.rows, GREEDY)
        for core in chain.cores:
            core.drop_weights()
            assert [core.machine.tier(t).ledger.used for t in TIERS] == [0, 0, 0]
        assert tokens(chain, known.rows) == known.expected


# What is refused.


def stage_of(core: Core, policy: Policy, ports: Ports) -> Any:
    planner = Planner(core.machine, core.opened, policy=policy)
    return core.stage(planner.watch(workload(), planner.layout(workload())), ports=ports)


@pytest.mark.parametrize(("layers", "ports", "needs"), [
    ((0, 2), Ports(), "need port 'after', but no port is given"),
    ((2, 4), Ports(after=RamPort()), "need port 'before', but port 'after' is given"),
    ((1, 2), Ports(RamPort()), "need port 'before' and port 'after', but port 'before' is given"),
    ((0, 4), Ports(RamPort(), RamPort()), "need no port, but port 'before' and port 'after' is given"),
])  # fmt: skip
def test_ports_must_fit_the_layers(families: Any, layers: Any, ports: Ports, needs: str) -> None:
    core = Core(EngineOptions(model=families("llama").directory, device="cpu"), layers=layers)
    try:
        with pytest.raises(InvalidInput, match=f"layers {layers[0]} to {layers[1] - 1} of 4 {needs}"):
            stage_of(core, Policy(8, 1), ports)
        with torch.no_grad():
            assert core.machine.device.ledger.used == 0
    finally:
        core.close()


@pytest.mark.parametrize("ranges", [[(0, 2)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(2, 4), (0, 2)], [(1, 4)]])
def test_stages_must_hold_every_layer_once(families: Any, ranges: Any) -> None:
    cores = [Core(EngineOptions(model=families("llama").directory, device="cpu"), layers=layers) for layers in ranges]
    stages = []
    try:
        for core, (first, end) in zip(cores, ranges, strict=True):
            ports = Ports(RamPort() if first else None, RamPort() if end < 4 else None)
            stages.append(stage_of(core, Policy(8, 1), ports))
        with pytest.raises(InvalidInput, match="must hold each layer of one model once"):
            JobResources(stages[0], stages[1:])
    finally:
        for stage in stages:
            stage.worker.close()
        for core in cores:
            core.close()


@pytest.mark.parametrize("change", [
    {"gpu_batch_size": 4}, {"num_gpu_batches": 2}, {"prefill_tokens": 100}, {"schedule": "row"}, {"cache": (0, 0, 1)},
])  # fmt: skip
def test_stages_must_form_the_same_gpu_batches(families: Any, change: Any) -> None:
    policies = [Policy(8, 1), replace(Policy(8, 1), **change)]
    with (
        chained(families("llama").directory, TWO, policies, device="sim") as chain,
        pytest.raises(InvalidInput, match=f"policies have {next(iter(change))} .*must have the same"),
    ):
        chain.generate(families("llama").rows, GREEDY)
