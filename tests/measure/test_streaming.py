"""What slows what: streaming, delegation and page faults beside products; time and room."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.measure import links, streaming, timing
from flexengine.schedule.tasks import Op
from flexengine.tier.machine import Machine
from tests.helpers.listening import listening
from tests.helpers.measuring import books

# Streaming beside computing.


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_streaming(families: Any, tmp_path: Path, kind: str) -> None:
    """Figures in their limits; and afterwards the engine gives the right tokens, with its ledgers as they were."""
    known = families("llama")
    with Engine(known.directory, policy=Policy(), device=kind, device_mem="50M", offload_dir=tmp_path) as engine:
        booked = books(engine.core.machine)
        times, reads = ((1.0, 1e-4), (64.0, 1e-3)), ((1.0, 1e12),)
        found = streaming.measure_streaming(engine.core.opened, engine.core.machine, times, reads)
        assert set(found) == {"device", "disk_read", "wake", "read"}
        assert found["read"] == 2  # no disk reads 1e12 bytes per second; this is the limit
        assert all(0 <= x <= 2 for x in found.values())
        assert books(engine.core.machine) == booked
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_delegation(families: Any, tmp_path: Path, family: str) -> None:
    """Every half of every layer is computed; and afterwards the engine gives the right tokens."""
    known = families(family)
    with Engine(known.directory, policy=Policy(), device="sim", device_mem="50M", offload_dir=tmp_path) as engine:
        booked, done = books(engine.core.machine), Counter[Op]()
        perform = streaming._Cell.perform

        def counted(cell: Any, task: Any) -> None:
            done[task.op] += 1
            perform(cell, task)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streaming._Cell, "perform", counted)
            found = streaming.measure_delegation(engine.core.opened, engine.core.machine)
        assert found is not None
        assert 0 <= found < 1
        halves = {done[op] for op in (Op.PROJECT, Op.SEND, Op.ATTEND, Op.FETCH, Op.FINISH)}
        assert len(halves) == 1
        assert halves.pop() >= 2 * len(engine.facts.layers)
        assert books(engine.core.machine) == booked
        results = engine.generate(known.rows, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [r.token_ids for r in results] == [tokens[:3] for tokens in known.expected]


def test_no_delegation_in_one_memory_or_without_room(families: Any, tmp_path: Path) -> None:
    known = families("llama")
    with Engine(known.directory, policy=Policy(), device="cpu", offload_dir=tmp_path) as engine:
        assert streaming.measure_delegation(engine.core.opened, engine.core.machine) is None
    with Engine(known.directory, policy=Policy(), device="sim", device_mem=100_000, offload_dir=tmp_path) as engine:
        assert streaming.measure_delegation(engine.core.opened, engine.core.machine) is None
        assert engine.core.machine.device.ledger.used == 0


def test_no_streaming_without_room_for_two_layers(families: Any, tmp_path: Path) -> None:
    known = families("llama")
    with Engine(known.directory, policy=Policy(), device="sim", device_mem=100_000, offload_dir=tmp_path) as engine:
        assert streaming.measure_streaming(engine.core.opened, engine.core.machine, ((1.0, 1.0),), ((1.0, 1e9),)) == {}
        assert engine.core.machine.device.ledger.used == 0


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
    monkeypatch.setattr(streaming, "PassTrial", lambda _s, _m, tokens: tokens)
    weights: Any = SimpleNamespace(machine=None, skeleton=None)
    found = streaming._compared(weights, ((1.0, 0.1), (16.0, 1.1), (64.0, 0.3)), 4, told=0.8)
    few, less, more = [16], [64] * 2, [64] * 5  # tokens of each gpu_batch
    assert asked == [*[(few, 1)] * 3, *[(less, 1), (less, 2)] * 3, *[(more, 1), (more, 2)] * 3]
    told = {"device": 0.55, "disk_read": 0.55, "wake": 0.2, "read": 1.25}  # of 0.3 / 0.6 and 0.6 / 1; 1 s of 0.8
    assert found == pytest.approx(told)


def test_what_hardly_overlaps_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that takes long to read the most gpu_batches are computed, once; noise in reading is no slowing."""
    asked = list[int]()

    def passes(_w: Any, trials: Any, _d: int, slots: int) -> streaming.Streamed:
        asked.append(len(trials))
        return streaming.Streamed(2.9 if slots == 2 else 3.0, 0.001 * len(trials), 2.7)

    monkeypatch.setattr(streaming, "_passes", passes)
    monkeypatch.setattr(streaming, "PassTrial", lambda _s, _m, tokens: tokens)
    weights: Any = SimpleNamespace(machine=None, skeleton=None)
    found = streaming._compared(weights, ((16.0, 0.001), (64.0, 0.001)), 4, told=3.0)
    assert asked == [1] * 3 + [32] * 6
    assert (found["device"], found["disk_read"], found["read"]) == (0.0, 0.0, 1.0)


def test_new_ram_is_written_to_alone_and_beside_products() -> None:
    """All rates are those of pages, RAM that was freed is not slower, and nothing computes afterwards."""
    before = set(threading.enumerate())
    found = links._touch(64 << 20)
    assert found.pop("freed") == 64 << 20
    assert all(1e6 < rate < 1e12 for rate in found.values())
    assert found["touch_freed"] >= found["touch"]
    assert found["touch_freed_busy"] >= found["touch_busy"]
    assert set(threading.enumerate()) <= before


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


def test_what_a_gpu_does_between_calls_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is queued at once, and takes its time when the thread waits for it."""
    clock, queued = [0.0], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def queue(seconds: float) -> None:
        queued[0] += seconds

    def wait() -> None:
        clock[0] += queued[0]
        queued[0] = 0.0

    gpu: Any = SimpleNamespace(gpu=True, synchronize=wait)
    assert timing.seconds_per_call(lambda _: queue(1.0), 100.0, gpu, lambda: queue(8.0)) == 1.0


def test_others_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs are reported only if they use cores that measuring needs."""
    clock, used = [0.0], [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "NOTICED", 0.5)
    monkeypatch.setattr(timing, "_others_seconds", lambda: used[0])
    monkeypatch.setattr(timing.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with listening() as heard:
        for cores, many in ((2.0, []), (2.4, []), (2.6, [2.6])):
            with timing.noticing() as noticed:
                clock[0] += 10
                used[0] += 10 * cores
            assert noticed == pytest.approx(many)
        assert [said[:36] for said in heard.messages] == [
            f"other programs kept {n} cores busy dur"[:36] for n in (2.4, 2.6)
        ]
        with timing.noticing():  # one tick of the processor's clock is not ten busy cores
            clock[0] += 0.001
            used[0] += 0.01
        assert len(heard) == 2


@pytest.mark.parametrize(
    ("busy", "calls", "remedies"),
    [
        ((0.0,), 1, []),
        ((1.0,), 1, ["measure again when"]),
        ((3.5, 0.0), 2, ["measured again now"]),
        ((3.5, 3.5), 2, ["measured again now", "measure again when"]),
    ],
)
def test_what_others_disturbed_is_measured_again_once(
    busy: tuple[float, ...], calls: int, remedies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """busy: cores that other programs use beside each call, of four, all of which measuring needs."""
    clock, used, count = [0.0], [100.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "_others_seconds", lambda: used[0])
    monkeypatch.setattr(timing, "NOTICED", 0.5)
    monkeypatch.setattr(timing.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def measure() -> int:
        clock[0] += 10
        used[0] += 10 * busy[count[0]]
        count[0] += 1
        return count[0]

    with listening() as heard:
        assert timing.undisturbed(measure) == calls == count[0]
    assert len(heard.messages) == len(remedies)
    assert all(remedy in said for remedy, said in zip(remedies, heard.messages, strict=True))


def test_room(at: Callable[..., Machine]) -> None:
    machine = at("sim", 1000 * 4096)
    taken = machine.device.allocate(200 * 4096, "weights")
    assert timing.room(machine, "device") == 400 * 4096
    machine.device.free(taken, "weights")
    shared = at("cpu", 1000 * 4096)
    assert timing.room(shared, "device", "host") == 250 * 4096
