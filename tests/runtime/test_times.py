"""Times of CUDA streams, on a virtual clock; the trace."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.simulate import simulate
from flexengine.errors import InvalidInput
from flexengine.places import DIRECT, STAGED
from flexengine.runtime.execute import Executor, TaskFailed
from flexengine.runtime.lane import Stream
from flexengine.runtime.trace import Trace
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task
from tests.helpers import pretend_gpu
from tests.helpers.toy import uniform

# Times of CUDA streams, on a virtual clock.
SECONDS = {Op.LOAD_WEIGHT: 0.006, Op.COMPUTE: 0.003, Op.LOAD_CACHE: 0.0015, Op.STORE_CACHE: 0.0007}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu.pretend(monkeypatch)


def queued(task: Task) -> None:
    """Queue work on the GPU and return at once."""
    pretend_gpu.queue(SECONDS[task.op])


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_busy_is_what_the_gpu_did_not_how_long_queueing_took(pretended: None, tmp_path: Path, slots: int) -> None:
    """Lane by lane, and when each task began and ended in the trace: against the program on a virtual clock."""

    def program() -> Program:
        return Program([("host",)] * 5, 4, slots, STAGED)

    batches = uniform(3, "host")
    trace = Trace(tmp_path / "trace.json")
    with Executor(queued, "stream", trace.add) as executor:
        walked, run, forecast = program(), program(), 0.0
        for number in range(3):
            tasks = list(walked.sweep(number, batches, False))
            forecast = simulate(tasks, lambda task: SECONDS[task.op])
            before = dict(executor.times.busy)
            executor.run(run.sweep(number, batches, False))
            spent = {lane: seconds - before.get(lane, 0.0) for lane, seconds in executor.times.busy.items()}
            assert spent == pytest.approx(forecast.busy)
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for task, began, end in trace.spans:
        assert end - began == pytest.approx(SECONDS[task.op])
        by_lane.setdefault(task.lane, []).append((began, end))
    for spans in by_lane.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(spans)))


def test_a_load_ahead_counts_when_the_gpu_has_done_it(pretended: None) -> None:
    with Executor(queued, "stream") as executor:
        program = Program([("host",)] * 3, 2, 2, DIRECT)
        executor.run(program.sweep(0, uniform(1), False))
        assert executor.times.busy["h2d"] == pytest.approx(3 * 0.006)
        lane: Any = executor.lanes["h2d"]
        lane._stream.reached = lane._stream.now  # the GPU comes no further for now
        tasks = list(Program([("host",)] * 3, 2, 2, DIRECT).sweep(1, uniform(1), False))
        loads = [executor.submit(task) for task in tasks if task.op is Op.LOAD_WEIGHT]
        for done in loads:
            done.wait()
        executor.times.count()
        assert executor.times.busy["h2d"] == pytest.approx(3 * 0.006)
    assert executor.times.busy["h2d"] == pytest.approx(6 * 0.006)


def test_times_stay_exact_after_hours(pretended: None) -> None:
    """The GPU tells times as fp32 milliseconds, which after ten hours are 4 ms apart."""
    stream = Stream("device")
    seconds = []
    for _ in range(3):
        stream._stream.now += 36_000.0
        began = stream.mark()
        stream._stream.now += 0.0015
        seconds.append(stream.mark().seconds - began.seconds)
    stream.close()
    assert seconds == pytest.approx([0.0015] * 3, rel=1e-4)


def test_a_lost_gpu_costs_times_not_results(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error every query of an event fails: the task's error is raised, not the clock's."""

    def fail(event: Any) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def perform(task: Task) -> None:
        monkeypatch.setattr(pretend_gpu.Event, "query", fail)
        raise ArithmeticError("boom")

    executor = Executor(perform, "stream")
    with pytest.raises(TaskFailed, match="boom"), executor:
        executor.run(Program([("host",)] * 3, 2, 2, DIRECT).sweep(0, uniform(1), False))
    assert not executor.times.busy


def test_inline_waits_for_the_gpu_before_it_reads_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = 0.05

    class Current:
        left = 0.0

        def synchronize(self) -> None:
            time.sleep(self.left)
            self.left = 0.0

    stream = Current()

    def perform(task: Task) -> None:
        stream.left = spent if task.op is Op.COMPUTE else 0.0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    with Executor(perform, "inline") as executor:
        executor.run(Program([()] * 2, 1, 2, DIRECT).sweep(0, uniform(1), False))
    assert executor.times.busy["device"] >= 2 * spent


# The trace.


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_chrome_trace(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    batch = Batch((Piece(0, 3, 1, True),), "disk", "host")
    program = list(Program([("disk",), ("host",), ()], 2, 2, STAGED).sweep(4, [batch, batch], False))
    with Executor(lambda task: time.sleep(0.001), kind, trace.add) as executor:
        executor.run(program)
    trace.write()
    written = json.loads(path.read_text())
    assert set(written) == {"traceEvents", "displayTimeUnit"}
    about = [e for e in written["traceEvents"] if e["ph"] == "M"]
    names = {e["tid"]: e["args"]["name"] for e in about if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted({t.lane for t in program})
    assert [e["args"] for e in about if e["name"] == "process_name"] == [{"name": "flexengine"}]
    places = {names[e["tid"]]: e["args"]["sort_index"] for e in about if e["name"] == "thread_sort_index"}
    assert sorted(places, key=lambda lane: places[lane]) == ["disk_read", "h2d", "device", "d2h", "disk_write"]
    assert len({e["pid"] for e in written["traceEvents"]}) == 1
    spans = [e for e in written["traceEvents"] if e["ph"] == "X"]
    said = [(names[e["tid"]], e["name"], *e["args"].values()) for e in spans]
    named = [(t.lane, t.op.value, *t.cell, getattr(t, "home", ""), getattr(t, "hop", 0)) for t in program]
    assert sorted(said) == sorted(named)
    assert min(e["ts"] for e in spans) == 0
    assert all(e["dur"] >= 1000 for e in spans)  # microseconds
    for tid in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(mine))  # one row never overlaps
    for lane, seconds in executor.times.busy.items():
        assert sum(e["dur"] for e in spans if names[e["tid"]] == lane) == pytest.approx(seconds * 1e6, rel=1e-3)


def test_empty_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.write()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"trace file {tmp_path}/no/trace.json: .*No such file"):
        Trace(tmp_path / "no" / "trace.json")
