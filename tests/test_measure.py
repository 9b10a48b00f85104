"""Measuring: rates against throttles, counts against brute force, modules and ledgers as they were, what is kept."""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.kernels import ReferenceKernels
from flexengine.measure import attention, delegation, kernels, links, model, overhead, store, streaming, timing
from flexengine.model.skeleton import Skeleton
from flexengine.plan.hardware import Hardware
from flexengine.schedule.program import Op
from flexengine.tier.machine import Links, Machine, make_machine

MB = 10**6
SLOW = Links(h2d=200 * MB, d2h=100 * MB, disk_read=50 * MB, disk_write=25 * MB)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures from a moment each, and little memory."""
    moments = [(links, "COPY_SECONDS"), (links, "SPILL_SECONDS"), (links, "READ_SECONDS"), (kernels, "SECONDS"),
               (kernels, "WINDOW"), (overhead, "SECONDS"), (model, "HEAD_SECONDS")]  # fmt: skip
    for module, name in moments:
        monkeypatch.setattr(module, name, 0.005)
    monkeypatch.setattr(model, "LAYER_SECONDS", 0.1)
    monkeypatch.setattr(streaming, "PASSES_SECONDS", 0.01)
    monkeypatch.setattr(delegation, "SECONDS", 0.01)
    monkeypatch.setattr(kernels, "SMALL", (128, 1 << 20))
    monkeypatch.setattr(kernels, "TURNS", 1)
    for name in ("COPIED", "SPILLED", "WRITTEN"):
        monkeypatch.setattr(links, name, 16 << 20)
    for name in ("COPIES", "READS"):
        monkeypatch.setattr(links, name, (64 << 10, 1 << 20, 4 << 20))


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Machines that are closed again, and leave nothing in their offload directory."""
    made: list[Machine] = []

    def make(kind: str, memory: int | None = None, rates: Links | None = None) -> Machine:
        made.append(make_machine(kind, memory, None, tmp_path / "offload", rates))
        return made[-1]

    yield make
    for machine in made:
        machine.close()
    assert not (tmp_path / "offload").exists()


def books(machine: Machine) -> list[tuple[int, int, dict[str, int]]]:
    ledgers = [machine.tier(tier).ledger for tier in ("device", "host", "disk")]
    return [(ledger.used, ledger.peak, dict(ledger.entries)) for ledger in ledgers]


# Links.


def test_throttled_links(at: Callable[..., Machine]) -> None:
    machine = at("sim", 50 * MB, SLOW)
    home = machine.device.allocate(5000, "something")
    machine.host.ledger.peak = 12345
    before = books(machine)
    found = links.measure_links(machine)
    assert books(machine) == before
    machine.device.free(home, "something")
    assert set(found.links) == {"h2d", "d2h", "disk_read", "disk_write"}
    for lane, table in (*found.links.items(), ("disk_read", found.checkpoint_read)):
        throttle: float = getattr(SLOW, lane)
        assert all(rate <= throttle * 1.001 for _, rate in table), lane
        assert table[-1][1] >= throttle * 0.75, lane
        assert [x for x, _ in table] == sorted({x for x, _ in table})


def test_a_slow_link_is_not_measured_for_long(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that would take longer than the patience is left out."""
    monkeypatch.setattr(links, "PATIENCE", 0.1)
    found = links.measure_links(at("sim", None, Links(disk_write=5 * MB)))
    assert [x for x, _ in found.links["disk_write"]] == [64 << 10, 256 << 10]


@pytest.mark.parametrize("memory", [40_000, 400_000, 2_000_000])
def test_little_memory(at: Callable[..., Machine], memory: int) -> None:
    """Transfers and kernels are as small as the device, and what cannot be measured there is not known."""
    machine = at("sim", memory)
    found = store.measure_machine(machine, torch.float32, (), lambda _: None)
    assert max(x for x, _ in found.links["h2d"]) <= memory / 2
    assert all(figure > 0 for _, figure in (*found.products["float32"], *found.decode_attention))
    assert machine.device.ledger.peak == 0


def test_shared_memory_has_no_way_back(at: Callable[..., Machine]) -> None:
    assert set(links.measure_links(at("cpu", 100 * MB)).links) == {"h2d", "disk_read", "disk_write"}


def test_the_checkpoint_itself_is_read(
    at: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stretch within the files, walked in order; what is too small is not read at all."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    paths[0].write_bytes(bytes(300_001))
    paths[1].write_bytes(bytes(200_000))
    machine = at("cpu", 100 * MB)
    monkeypatch.setattr(links, "LEAST_CHECKPOINT", 500_000)
    with links.readable(machine, paths) as files:
        assert files == {paths[0]: 300_000, paths[1]: 200_000}
        found = [next(stream) for stream in [links.stretches(machine, files, 100_000)] for _ in range(6)]
        assert [(home.place.path, home.start) for home in found] == [
            (paths[0], 0), (paths[0], 100_000), (paths[0], 200_000), (paths[1], 0), (paths[1], 100_000), (paths[0], 0),
        ]  # fmt: skip
    monkeypatch.setattr(links, "LEAST_CHECKPOINT", 500_001)
    with links.readable(machine, paths) as files:
        assert not set(files) & set(paths)
        assert list(files.values()) == [16 << 20]


# Kernels.


class Counting(ReferenceKernels):
    """Counts what the reference kernels are asked for, pair by pair and page by page."""

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self.read: list[int] = []

    def attend_prompt(self, q: Any, k: Any, v: Any, *args: Any) -> Any:
        seen = sum(1 for query in range(q.shape[1]) for key in range(k.shape[1]) if key <= query)
        self.pairs.append(q.shape[0] * q.shape[2] * seen * q.shape[3])
        return super().attend_prompt(q, k, v, *args)

    def decode(self, q: Any, pool: Any, tables: Any, lengths: Any, *args: Any) -> Any:
        self.read.append(sum(int(n) * 2 * pool.shape[2] * pool.shape[4] * pool.element_size() for n in lengths))
        assert int(lengths.max()) <= tables.shape[1] * pool.shape[3]
        return q


def test_counts(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """With every call taking a second, rates are the counts."""

    def second(call: Callable[[int], object], *_: Any) -> float:
        call(0)
        return 1.0

    monkeypatch.setattr(kernels, "seconds_per_call", second)
    machine, counting = at("cpu", 100 * MB), Counting()
    prompts = kernels._prompts(machine, counting, torch.float32)
    assert [rate for _, rate in prompts] == [4 * n for n in counting.pairs]  # a multiply-add for q @ k, one for @ v
    decode = kernels._decode(machine, "device", counting, torch.float32, kernels.LENGTHS)
    assert [rate for _, rate in decode] == counting.read
    products = kernels._products(machine, torch.float32)
    assert set(products) == {"float32", "float16", "bfloat16"}
    assert products["bfloat16"] == tuple((m, 2.0 * m * 128 * 128) for m in kernels.ROWS)
    assert set(kernels._products(machine, torch.bfloat16)) == {"bfloat16"}
    assert machine.device.ledger.used == 0


def ends(c: float, d: float, a: float, b: float) -> float:
    """When work of c and transfers of d seconds end that slow each other a and b times while both are there."""
    if c * a <= d * b:
        return c * a + (d - c * a / b)
    return d * b + (c - d * b / a)


def test_crosstalk(at: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    machine = at("cpu", 100 * MB)
    for _ in range(20):
        a, b = rng.uniform(1, 1.6), rng.uniform(1, 1.6)
        monkeypatch.setattr(kernels, "_slowdowns", lambda *_, a=a, b=b: (a, b))
        found = kernels.measure_crosstalk(machine)
        on_read, on_device = found["disk_read"]["device"], found["device"]["disk_read"]
        c, d = rng.uniform(0.1, 2), rng.uniform(0.1, 2)
        assert max(d + on_read * c, c + on_device * d) == pytest.approx(ends(c, d, a, b))
    monkeypatch.setattr(kernels, "_slowdowns", lambda *_: (0.9, 3.0))
    assert kernels.measure_crosstalk(machine)["device"]["h2d"] == 0


@pytest.mark.parametrize(("kind", "memory"), [("cpu", None), ("sim", 50 * MB)])
def test_a_whole_machine(at: Callable[..., Machine], kind: str, memory: int | None) -> None:
    """Every figure positive, and the same after a way through JSON."""
    machine = at(kind, memory)
    before, said = books(machine), list[str]()
    found = store.with_capacity(store.measure_machine(machine, torch.float32, (), said.append), machine)
    assert books(machine) == before
    assert said
    assert found.measured
    assert found.kind == kind
    assert found.capacity == machine.capacity
    assert Hardware.from_json(json.loads(json.dumps(found.to_json())), "found") == found
    tables = [*found.links.values(), *found.products.values(), found.checkpoint_read, found.decode_attention]
    assert all(y > 0 for table in (*tables, found.prompt_attention) for _, y in table)
    positive = ("elementwise", "cell_seconds", "task_seconds", "sweep_seconds", "sequence_seconds")
    assert all(getattr(found, name) > 0 for name in positive)
    assert (found.host_attention > 0) == (kind == "sim")
    assert set(found.crosstalk) == {"disk_read", "h2d", "device"}


# One model.


def held_by(skeleton: Skeleton) -> list[tuple[int, bool]]:
    groups = (*skeleton.layers, skeleton.others)
    tensors = [slot.holder[slot.name] for group in groups for slot in group.values()]
    return [(id(tensor), tensor.is_meta) for tensor in tensors]


@pytest.mark.parametrize("family", ["llama", "opt-350m", "qwen3-moe", "gpt-oss", "bloom"])
def test_model(families: Any, tmp_path: Path, family: str) -> None:
    """All its layers and its head; and afterwards the engine gives the right tokens, with fresh weights."""
    known = families(family)
    with Engine(known.directory, Policy(), device="cpu", offload_dir=tmp_path) as engine:
        before, booked = held_by(engine.skeleton), books(engine.machine)
        buffers = [id(b) for b in engine.skeleton.model.buffers()]
        held, facts = engine._opened.held, engine.facts
        layers, heads = model.measure_model(engine.skeleton, facts, held, engine.machine, 64)
        assert held_by(engine.skeleton) == before
        assert all(meta for _, meta in before)
        assert [id(b) for b in engine.skeleton.model.buffers()] == buffers
        assert books(engine.machine) == booked
        assert set(layers) == {facts.signature(j) for j in range(4)}
        assert len(layers) == (2 if family == "qwen3-moe" else 1)
        for table in layers.values():
            sizes = [x for x, _ in table]
            assert {1, 64} <= set(sizes) <= {n for n in model.TOKENS if n <= 64}
            assert sizes == sorted(sizes)
            assert all(seconds > 0 for _, seconds in table)
        assert list(heads) == [facts.head_signature]
        assert [x for x, _ in heads[facts.head_signature]] == list(model.ROWS)
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


def test_random_weights(families: Any, tmp_path: Path) -> None:
    """Every parameter has the checkpoint's shape and varied values, and no two layers share memory that is cached."""
    known = families("llama")
    with Engine(known.directory, Policy(), device="cpu", offload_dir=tmp_path) as engine, torch.no_grad():
        skeleton, names = engine.skeleton, [engine.facts.signature(j) for j in range(4)]
        with model.random_weights(skeleton, names, engine._opened.held, engine.machine) as bound:
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
            assert [layer for layer, _ in model.Trial(skeleton, engine.machine, 5).walk(3)] == [-1, 0, 1, 2]
            assert [layer for layer, _ in model.Trial(skeleton, engine.machine, 5).walk(9)] == [-1, 0, 1, 2, 3]


def test_medians_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each signature's layers in all passes; the very first layer is left out."""
    times = iter([[(-1, 7.0), (0, 99.0), (1, 2.0), (2, 3.0)], [(-1, 5.0), (0, 4.0), (1, 6.0), (2, 8.0)]])
    monkeypatch.setattr(model.Trial, "walk", lambda self, count: next(times))
    monkeypatch.setattr(model, "PASSES", 2)
    skeleton: Any = None
    machine: Any = None
    found = model.time_layers(skeleton, ["a", "a", "b"], machine, (1,), 100.0)
    assert found == {1: {"a": 4.0, "b": 5.5, model.START: 6.0}}


def test_sizes_are_left_out_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """But never those without which the others would be guesses; and rates are in the order of their tokens."""
    clock, asked = [0.0], list[int]()

    def walk(trial: model.Trial, _: int) -> Iterator[tuple[int, float]]:
        asked.append(trial.tokens)
        for layer, seconds in ((-1, 0.5), (0, trial.tokens * 0.01), (1, trial.tokens * 0.01)):
            clock[0] += seconds if layer > 0 else 0.0
            yield layer, seconds

    monkeypatch.setattr(model.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(model.Trial, "walk", walk)
    monkeypatch.setattr(model, "PASSES", 1)
    monkeypatch.setattr(model, "random_weights", lambda *_: nullcontext(2))
    skeleton: Any = None
    machine: Any = None
    for seconds, known in ((0.1, [1, 64]), (2.0, [1, 4, 16, 20, 40, 64]), (100.0, sorted(model.TOKENS))):
        monkeypatch.setattr(model, "LAYER_SECONDS", seconds)
        layers, start = model._layers(skeleton, ["a", "a"], {}, machine, model.TOKENS)
        assert layers["a"] == tuple((float(x), x * 0.01) for x in known)
        assert start == 0.5
    assert asked[:2] == [64, 1]


def test_a_single_cold_pass_is_better_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.Trial, "walk", lambda trial, _: iter([(-1, 0.5), (0, 9.0)]))
    monkeypatch.setattr(model, "PASSES", 1)
    skeleton: Any = None
    machine: Any = None
    assert model.time_layers(skeleton, ["a"], machine, (1,), 0.0) == {1: {model.START: 0.5, "a": 9.0}}


def test_no_room_for_a_layer(families: Any, tmp_path: Path) -> None:
    """Then nothing is known of the layers, and a part stands for the whole head."""
    known = families("llama")
    with Engine(known.directory, Policy(), device="sim", device_mem=100_000, offload_dir=tmp_path) as engine:
        facts, held = engine.facts, engine._opened.held
        layers, heads = model.measure_model(engine.skeleton, facts, held, engine.machine)
        assert layers == {}
        assert len(heads[facts.head_signature]) == len(model.ROWS)
        assert engine.machine.device.ledger.peak == 0


# Streaming beside computing.


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_streaming(families: Any, tmp_path: Path, kind: str) -> None:
    """Figures in their limits; and afterwards the engine gives the right tokens, with its ledgers as they were."""
    known = families("llama")
    with Engine(known.directory, Policy(), device=kind, device_mem="50M", offload_dir=tmp_path) as engine:
        booked = books(engine.machine)
        found = streaming.measure_streaming(engine._opened, engine.machine, ((1.0, 1e-4), (64.0, 1e-3)))
        assert set(found) == {"device", "disk_read", "wake"}
        assert all(0 <= x <= 2 for x in found.values())
        assert books(engine.machine) == booked
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_delegation(families: Any, tmp_path: Path, family: str) -> None:
    """Every half of every layer is computed; and afterwards the engine gives the right tokens."""
    known = families(family)
    with Engine(known.directory, Policy(), device="sim", device_mem="50M", offload_dir=tmp_path) as engine:
        booked, done = books(engine.machine), Counter[Op]()
        perform = delegation._Cell.perform

        def counted(cell: Any, task: Any) -> None:
            done[task.op] += 1
            perform(cell, task)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delegation._Cell, "perform", counted)
            found = delegation.measure_delegation(engine._opened, engine.machine)
        assert found is not None
        assert 0 <= found < 1
        halves = {done[op] for op in (Op.PROJECT, Op.SEND, Op.ATTEND, Op.FETCH, Op.FINISH)}
        assert len(halves) == 1
        assert halves.pop() >= 2 * len(engine.facts.layers)
        assert books(engine.machine) == booked
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


def test_no_delegation_in_one_memory_or_without_room(families: Any, tmp_path: Path) -> None:
    known = families("llama")
    with Engine(known.directory, Policy(), device="cpu", offload_dir=tmp_path) as engine:
        assert delegation.measure_delegation(engine._opened, engine.machine) is None
    with Engine(known.directory, Policy(), device="sim", device_mem=100_000, offload_dir=tmp_path) as engine:
        assert delegation.measure_delegation(engine._opened, engine.machine) is None
        assert engine.machine.device.ledger.used == 0


def test_no_streaming_without_room_for_two_layers(families: Any, tmp_path: Path) -> None:
    known = families("llama")
    with Engine(known.directory, Policy(), device="sim", device_mem=100_000, offload_dir=tmp_path) as engine:
        assert streaming.measure_streaming(engine._opened, engine.machine, ((1.0, 1.0),)) == {}
        assert engine.machine.device.ledger.used == 0


def test_what_overlaps_is_compared_with_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that is read in 1 s and that gpu_batches of 0.3 s each compute in 0.6 s or 1.5 s: together they take
    1.3 s and 2.1 s."""
    asked = list[tuple[list[int], int]]()

    def passes(_w: Any, trials: Any, _d: int, slots: int) -> streaming.Streamed:
        asked.append((trials, slots))
        device = {1: 1.3, 2: 0.75, 5: 1.75}[len(trials)]
        together = {2: 1.3, 5: 2.1}.get(len(trials), 0.0)
        return streaming.Streamed(together if slots == 2 else device + 1.0, device, 1.0)

    monkeypatch.setattr(streaming, "_passes", passes)
    monkeypatch.setattr(streaming, "Trial", lambda _s, _m, tokens: tokens)
    weights: Any = SimpleNamespace(machine=None, skeleton=None)
    found = streaming._compared(weights, ((1.0, 0.1), (16.0, 1.1), (64.0, 0.3)), 4)
    few, less, more = [16], [64] * 2, [64] * 5  # tokens of each gpu_batch
    assert asked == [*[(few, 1)] * 3, *[(less, 1), (less, 2)] * 3, *[(more, 1), (more, 2)] * 3]
    assert found == pytest.approx({"device": 0.55, "disk_read": 0.55, "wake": 0.2})  # of 0.3 / 0.6 and 0.6 / 1


def test_what_hardly_overlaps_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that takes long to read the most gpu_batches are computed, once; noise in reading is no slowing."""
    asked = list[int]()

    def passes(_w: Any, trials: Any, _d: int, slots: int) -> streaming.Streamed:
        asked.append(len(trials))
        return streaming.Streamed(2.9 if slots == 2 else 3.0, 0.001 * len(trials), 2.7)

    monkeypatch.setattr(streaming, "_passes", passes)
    monkeypatch.setattr(streaming, "Trial", lambda _s, _m, tokens: tokens)
    weights: Any = SimpleNamespace(machine=None, skeleton=None)
    found = streaming._compared(weights, ((16.0, 0.001), (64.0, 0.001)), 4)
    assert asked == [1] * 3 + [32] * 6
    assert (found["device"], found["disk_read"]) == (0.0, 0.0)


def test_new_ram_is_written_to_alone_and_beside_products() -> None:
    """Both rates are those of pages, and nothing computes afterwards."""
    before = threading.active_count()
    alone, busy = links._touch(64 << 20)
    assert 1e6 < busy < 1e12
    assert 1e6 < alone < 1e12
    assert threading.active_count() == before


def test_products_that_fail_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory for a product")

    monkeypatch.setattr(torch, "mm", fails)
    with pytest.raises(RuntimeError, match="no memory for a product"):
        links._touch(64 << 20)


# Time and room.


def test_seconds_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is not counted, unless it alone is too long."""
    clock, costs = [0.0], [9.0, 1.0, 5.0, 2.0, 3.0, 4.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(i: int) -> None:
        clock[0] += costs[i]

    assert timing.seconds_per_call(call, 20.0) == 2.5  # of 1, 5, 2, 3
    assert timing.seconds_per_call(call, 4.0) == 9.0


def test_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if what they take is not to spare."""
    said, clock, used = list[str](), [0.0], [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "_others_seconds", lambda: used[0])
    monkeypatch.setattr(timing.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for cores in (2.0, 2.5):
        with timing.noticing(said.append):
            clock[0] += 10
            used[0] += 10 * cores
    assert len(said) == 1
    assert "2.5 cores" in said[0]
    with timing.noticing(said.append):  # one tick of the processor's clock is not ten busy cores
        clock[0] += 0.001
        used[0] += 0.01
    assert len(said) == 1


def test_room(at: Callable[..., Machine]) -> None:
    machine = at("sim", 1000 * 4096)
    taken = machine.device.allocate(200 * 4096, "weights")
    assert timing.room(machine, "device") == 400 * 4096
    machine.device.free(taken, "weights")
    shared = at("cpu", 1000 * 4096)
    assert timing.room(shared, "device", "host") == 250 * 4096


# What is kept.


def hardware(**fields: Any) -> Hardware:
    table = ((1.0, 2.0), (8.0, 4.0))
    lanes = {"disk_read": table, "disk_write": table, "h2d": table}
    return Hardware("a machine", "cpu", None, None, None, lanes, table, {"float32": table}, table, table,
                    **{"elementwise": 5.0, "measured": True, **fields})  # fmt: skip


def test_kept() -> None:
    one = hardware(layers={"a": ((1.0, 0.5),)}, crosstalk={"h2d": {"device": 0.25}})
    assert store.cached("0" * 32) is None
    store.keep("0" * 32, one)
    assert store.cached("0" * 32) == one
    file = store._file("0" * 32)
    assert file.stat().st_mode & 0o777 == 0o600
    store.keep("0" * 32, hardware())
    assert store.cached("0" * 32) == hardware()
    assert [path.name for path in file.parent.glob("0*")] == [file.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '{"name": 1, "kind": "cpu"}', "[" * 100_000])
def test_a_broken_file_is_as_none(text: str) -> None:
    store.keep("1" * 32, hardware())
    store._file("1" * 32).write_text(text)
    assert store.cached("1" * 32) is None
    values = hardware().to_json()
    for name in values:
        for wrong in ("x", [[]], {"a": 1}, -1, None):
            store._file("1" * 32).write_text(json.dumps({**values, name: wrong}))
            store.cached("1" * 32)  # whatever it says, it does not fail


def test_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file"))
    assert f"{tmp_path / 'file' / 'hardware'}" in store.keep("2" * 32, hardware())
    assert store.cached("2" * 32) is None


def test_fingerprint(at: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the same machine, and another for each thing that matters."""
    machine = at("sim", 50 * MB, SLOW)
    first = store.fingerprint(machine, tmp_path)
    assert store.fingerprint(at("sim", 40 * MB, SLOW), tmp_path / "not" / "yet") == first
    others = [store.fingerprint(at("sim", 50 * MB, replace(SLOW, **{lane: 7 * MB})), tmp_path)
              for lane in ("h2d", "d2h", "disk_read", "disk_write")]  # fmt: skip
    others += [store.fingerprint(at("sim"), tmp_path), store.fingerprint(at("cpu"), tmp_path)]
    changes: list[tuple[Any, str, Any]] = [
        (store, "__version__", "9"), (torch, "__version__", "9"), (store, "version", lambda _: "9"),
        (store, "_cpu", lambda: "model name : another"), (store, "numerics", lambda _: "mkl"),
        (store.os, "sched_getaffinity", lambda _: set(range(99))), (torch, "get_num_threads", lambda: 99),
        (store, "_device_of", lambda _: 99), (store, "machine_name", lambda _: "a GPU"),
    ]  # fmt: skip
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            others.append(store.fingerprint(machine, tmp_path))
    assert len({first, *others}) == 1 + len(others)
    keys = {store.key_of(machine, tmp_path, dtype, ()) for dtype in (torch.float32, torch.bfloat16)}
    assert len({first, *keys}) == 3
    assert store.fingerprint(machine, tmp_path) == first


def test_corrected(families: Any, tmp_path: Path) -> None:
    with Engine(families("llama").directory, Policy(), device="cpu", offload_dir=tmp_path) as engine:
        facts = engine.facts
    own, head = facts.signature(0), facts.head_signature
    one = hardware(layers={own: ((1.0, 0.5),), "other": ((1.0, 0.5),)}, heads={head: ((1.0, 0.25),)})
    two = store.corrected(one, {"disk_read": 2.0, "device": 3.0, "d2h": 4.0}, facts)
    assert two.links == {**one.links, "disk_read": ((1.0, 1.0), (8.0, 2.0))}
    assert two.checkpoint_read == ((1.0, 1.0), (8.0, 2.0))
    assert two.layers == {own: ((1.0, 1.5),), "other": ((1.0, 0.5),)}
    assert two.heads == {head: ((1.0, 0.75),)}
    assert two.corrected == {"disk_read": 2.0, own: 3.0, head: 3.0}
    same = {"links": one.links, "checkpoint_read": one.checkpoint_read, "layers": one.layers, "heads": one.heads}
    assert replace(two, corrected={}, **same) == one
    assert Hardware.from_json(json.loads(json.dumps(two.to_json())), "") == two
    assert store.corrected(one, {"h2d": 100.0}, facts).links["h2d"] == ((1.0, 0.4), (8.0, 0.8))
    assert store.corrected(one, {"h2d": 0.01}, facts).links["h2d"] == ((1.0, 10.0), (8.0, 20.0))
    assert store.corrected(one, {}, facts) == one
    # Two jobs at the same time, which both find the same, have found it once; the later one's is what holds.
    assert store.corrected(two, {"disk_read": 2.0, "device": 3.0}, facts, planned=one) == two
    later = store.corrected(two, {"disk_read": 4.0}, facts, planned=one)
    assert later.checkpoint_read == ((1.0, 0.5), (8.0, 1.0))
    # What has been measured anew since the job was planned stays, for the job says nothing of it.
    anew = replace(two, links={**two.links, "disk_read": ((1.0, 5.0), (8.0, 5.0))},
                   layers={**two.layers, own: ((1.0, 0.9),)}, corrected={head: 3.0})  # fmt: skip
    found = store.corrected(anew, {"disk_read": 1.3, "device": 2.0}, facts, planned=two)
    assert (found.links["disk_read"], found.layers[own]) == (anew.links["disk_read"], anew.layers[own])
    assert found.heads[head] == ((1.0, 1.25),)
    assert found.corrected == {head: 5.0}
    back = store.corrected(two, {"disk_read": 0.5, "device": 1 / 3}, facts)
    assert back.checkpoint_read == one.checkpoint_read
    assert back.layers[own][0][1] == pytest.approx(0.5)
    for _ in range(20):  # whatever is wrong there, no link's rate mends it
        two = store.corrected(two, {"disk_read": 1.5, "h2d": 0.5}, facts)
    assert [y for _, y in two.checkpoint_read] == pytest.approx([0.4, 0.8])
    assert [y for _, y in two.links["h2d"]] == pytest.approx([10.0, 20.0])


@pytest.mark.slow
def test_obtain(families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured once, each model once, and what is free is asked for every time."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    measured = list[str]()
    monkeypatch.setattr(store, "noticing", lambda _: nullcontext())
    monkeypatch.setattr(store, "measure_machine", lambda *_: measured.append("machine") or hardware())

    def ask(family: str, measure: bool, memory: int) -> Hardware | None:
        known = families(family)
        with Engine(known.directory, Policy(), device="cpu", device_mem=memory, offload_dir=tmp_path) as engine:
            return store.obtain(engine.machine, tmp_path, engine._opened, measure, measured.append)

    assert ask("llama", False, 50 * MB) is None
    first = ask("llama", True, 50 * MB)
    assert first is not None
    assert measured == ["machine", "measuring the model's layers", "measuring the model's attention"]
    assert (first.device_bytes, first.host_bytes) == (50 * MB, None)
    second = ask("llama", False, 60 * MB)
    assert second is not None
    assert replace(second, disk_bytes=None) == replace(first, device_bytes=60 * MB, disk_bytes=None)
    without = ask("qwen3", False, 50 * MB)
    assert without is not None
    assert without.layers == first.layers
    both = ask("qwen3", True, 50 * MB)
    assert both is not None
    assert len(both.layers) == 2
    assert first.layers.items() <= both.layers.items()
    assert measured[3:] == ["measuring the model's layers", "measuring the model's attention"]


def test_attention_with_a_soft_cap_is_measured_apart(families: Any) -> None:
    """A tanh for every score takes time, so that rates of the same shape without one do not hold."""
    with Engine(families("gemma2").directory, Policy(), device="cpu") as engine:
        cap = engine.skeleton.config.attn_logit_softcapping
        assert engine.facts.softcap == cap == 50.0
        key = engine.facts.attention_signature(None)
        assert key == replace(engine.facts, softcap=None).attention_signature(None) + ", soft cap"
        assert attention.Trial(engine.facts, engine.machine, engine.dtype)._event(1, None).softcap == cap


@pytest.mark.slow
@pytest.mark.parametrize(("device_mem", "tables"), [
    (None, {"call", "decode", "prompt", "host"}), (400_000, {"call", "prompt"}), (2048, set()),
])  # fmt: skip
def test_attention_in_little_memory(families: Any, tmp_path: Path, device_mem: int | None, tables: set[str]) -> None:
    """What has no room is left out, and nothing is measured again for it; the ledgers stay as they were."""
    known = families("llama")
    with Engine(known.directory, Policy(), device="sim", device_mem=device_mem, offload_dir=tmp_path) as engine:
        before = books(engine.machine)
        found = attention.measure_attention(engine._opened, engine.machine)
        assert books(engine.machine) == before
        assert set(found) == {engine.facts.attention_signature(None)}
        assert set(found[engine.facts.attention_signature(None)]) == tables
        for table in found[engine.facts.attention_signature(None)].values():
            assert all(value > 0 for _, value in table)


def test_seconds_that_fall_are_pooled() -> None:
    assert timing.without_falls([1.0, 2.0, 5.0]) == [1.0, 2.0, 5.0]
    assert timing.without_falls([1.0, 4.0, 2.0, 5.0]) == [1.0, 3.0, 3.0, 5.0]
