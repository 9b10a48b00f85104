"""Lanes, the one loop and the trace. Programs run on real threads with random sleeps against the toy's oracle."""

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.errors import InvalidInput
from flexengine.runtime import execute
from flexengine.runtime.execute import Executor
from flexengine.runtime.lane import Done, Inline, Lane, Stream, Thread, new_lane
from flexengine.runtime.trace import Trace
from flexengine.schedule.order import Batch, Cell, Piece
from flexengine.schedule.program import DIRECT, STAGED, Op, Program, Task
from flexengine.schedule.simulate import simulate
from tests.helpers import pretend_gpu
from tests.helpers.strategies import SEEDS
from tests.helpers.toy import ROUTES, Toy, generate, jobs, oracle, uniform

PATIENCE = 20.0  # seconds after which something hangs


def in_time(work: Callable[[], Any]) -> Any:
    """work(), or a failure if it does not end."""
    found: list[Any] = []

    def body() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it hangs"
    value, error = found[0]
    if error is not None:
        raise error
    return value


class LaneTests:
    """What every lane must do; a subclass says which lane in `make`."""

    def make(self, name: str) -> Lane:
        raise NotImplementedError

    @pytest.fixture
    def lanes(self) -> Any:
        made = [self.make("a"), self.make("b")]
        yield made
        in_time(lambda: [lane.close() for lane in made])

    def submit(self, lane: Lane, work: Callable[[], None], *after: Done) -> Done:
        done = Done()
        try:
            lane.submit(work, after, done)
        except ArithmeticError:  # an Inline lane raises at once, and books it all the same
            return done
        return done

    def fail(self, text: str) -> Callable[[], None]:
        def work() -> None:
            raise ArithmeticError(text)

        return work

    def test_one_after_another_in_order(self, lanes: list[Lane]) -> None:
        seen: list[int] = []
        inside: list[int] = []

        def work(i: int) -> None:
            inside.append(i)
            time.sleep(0.001 * (i % 3))
            assert inside == [i]
            inside.pop()
            seen.append(i)

        done = [self.submit(lanes[0], lambda i=i: work(i)) for i in range(20)]
        in_time(lambda: [d.wait() for d in done])
        assert seen == list(range(20))
        assert all(d.ended and d.error is None for d in done)

    def test_waits_for_another_lane(self, lanes: list[Lane]) -> None:
        seen: list[str] = []

        def slow() -> None:
            time.sleep(0.05)
            seen.append("first")

        first = self.submit(lanes[0], slow)
        second = self.submit(lanes[1], lambda: seen.append("second"), first)
        in_time(second.wait)
        assert seen == ["first", "second"]

    def test_an_error_reaches_whoever_waits_and_nobody_else(self, lanes: list[Lane]) -> None:
        seen: list[str] = []
        bad = self.submit(lanes[0], self.fail("boom"))
        after = self.submit(lanes[1], lambda: seen.append("after"), bad)
        later = self.submit(lanes[0], lambda: seen.append("later"), after)
        free = self.submit(lanes[0], lambda: seen.append("free"))
        for done in (bad, after, later):
            with pytest.raises(ArithmeticError, match="boom"):
                in_time(done.wait)
            assert done.ended
        in_time(free.wait)
        assert seen == ["free"]

    def test_close_ends_what_was_submitted(self) -> None:
        lane, seen = self.make("a"), list[int]()
        done = [self.submit(lane, lambda i=i: (time.sleep(0.005), seen.append(i))[1]) for i in range(5)]
        in_time(lane.close)
        assert seen == [0, 1, 2, 3, 4]
        assert all(d.ended for d in done)
        assert not any(t.name == "flexengine-a" for t in threading.enumerate())

    def test_no_gradients(self, lanes: list[Lane]) -> None:
        found: list[bool] = []
        with torch.no_grad():  # the caller of an Inline lane sees to it itself
            in_time(self.submit(lanes[0], lambda: found.append(torch.is_grad_enabled())).wait)
        assert found == [False]


class TestInline(LaneTests):
    def make(self, name: str) -> Lane:
        return Inline(name)

    def test_raises_at_once(self) -> None:
        done = Done()
        with pytest.raises(ArithmeticError) as caught:
            Inline("a").submit(self.fail("boom"), (), done)
        assert done.error is caught.value


class TestThread(LaneTests):
    def make(self, name: str) -> Lane:
        return Thread(name)

    def test_lanes_overlap(self, lanes: list[Lane]) -> None:
        """Two tasks that each wait for the other's beginning end only if both lanes run at once."""
        begun = [threading.Event(), threading.Event()]

        def work(i: int) -> None:
            begun[i].set()
            assert begun[1 - i].wait(PATIENCE)

        done = [self.submit(lane, lambda i=i: work(i)) for i, lane in enumerate(lanes)]
        in_time(lambda: [d.wait() for d in done])

    def test_idle_lane_holds_nothing(self, lanes: list[Lane]) -> None:
        import weakref

        class Thing:
            pass

        thing = Thing()
        known = weakref.ref(thing)
        done = self.submit(lanes[0], lambda thing=thing: None)
        in_time(done.wait)
        del thing
        in_time(self.submit(lanes[1], lambda: None).wait)
        for _ in range(100):
            if known() is None:
                return
            time.sleep(0.01)
        pytest.fail("the lane's thread still holds its last task")


def test_new_lane() -> None:
    lanes = [new_lane("inline", "h2d"), new_lane("thread", "h2d"), new_lane("stream", "disk_read")]
    assert [type(lane) for lane in lanes] == [Inline, Thread, Thread]
    for lane in lanes:
        lane.close()


# The loop.


@pytest.mark.parametrize("kind", ["inline", "thread"])
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=6)
def test_programs_are_right_on_real_lanes(slots: int, routes: str, kind: str, data: Any, seed: int) -> None:
    streamed, layers, policy, rows = data.draw(jobs(slots))
    toy, lazy = Toy(streamed, layers, slots, ROUTES[routes], rows), random.Random(seed)
    slow = {op: lazy.choice([0, 0, 0.0003]) for op in Op}

    def perform(task: Task) -> None:
        time.sleep(slow[task.op] * random.random())
        toy.perform(task)

    with Executor(perform, kind) as executor:
        program = Program(streamed, layers, slots, ROUTES[routes])
        in_time(lambda: generate(toy, executor.run, program, policy, rows))
    assert {s: t[rows[s][0] :] for s, t in toy.tokens.items()} == oracle(streamed, layers, rows)
    assert not [t for t in threading.enumerate() if t.name.startswith("flexengine-")]


def is_task(task: Task, op: Op, layer: int, batch: int, hop: int = 0) -> bool:
    return (task.op, task.cell.layer, task.cell.batch, task.hop) == (op, layer, batch, hop)


@pytest.mark.parametrize("kind", ["inline", "thread"])
@pytest.mark.parametrize(
    ("op", "layer", "batch", "hop"),
    [(Op.COMPUTE, 0, 0, 0), (Op.COMPUTE, 2, 1, 0), (Op.LOAD_WEIGHT, 1, -1, 0), (Op.LOAD_WEIGHT, 2, -1, 1),
     (Op.STORE_CACHE, 1, 1, 1), (Op.LOAD_CACHE, 2, 0, 0), (Op.STORE_HIDDEN, 0, 1, 0)],
)  # fmt: skip
def test_the_first_error_surfaces_with_its_task(kind: str, op: Op, layer: int, batch: int, hop: int) -> None:
    batches = uniform(2, "disk", "host")
    failed = threading.Event()

    def perform(task: Task) -> None:
        if is_task(task, op, layer, batch, hop):
            failed.set()
            raise ArithmeticError("disk on fire")

    def work() -> None:
        with Executor(perform, kind) as executor:
            executor.run(Program([("disk",)] * 4, 3, 2, STAGED).sweep(0, batches, False))

    with pytest.raises(ArithmeticError, match="disk on fire") as caught:
        in_time(work)
    assert failed.is_set()
    assert len(caught.value.__notes__) == 1
    note = caught.value.__notes__[0]
    assert note.startswith(f"in task: {op.value}, {Cell(0, layer, batch)}, lane ")
    assert not [t for t in threading.enumerate() if t.name.startswith("flexengine-")]


@pytest.mark.parametrize("stuck", ["disk_read", "disk_write", "h2d", "d2h", "device"])
def test_a_lane_that_hangs_is_named_and_the_job_goes_on_when_it_does(stuck: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(execute, "QUIET_SECONDS", 0.2)
    gate, held, said = threading.Event(), list[Task](), list[str]()

    def perform(task: Task) -> None:
        if task.lane == stuck and not held:
            held.append(task)
            assert gate.wait(PATIENCE)

    def tell(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            gate.set()

    def work() -> None:
        with Executor(perform, "thread") as executor:
            executor.say = tell
            executor.run(Program([("disk",)] * 4, 3, 2, STAGED).sweep(0, uniform(2, "disk", "host"), False))

    in_time(work)
    assert len(said) == 2  # and then no more
    for text in said:
        assert text.startswith("no task has ended for ")
        assert f"lane {stuck}: {held[0].op.value}, {held[0].cell}, for " in text


def test_a_gpu_that_does_not_answer_is_named(monkeypatch: Any) -> None:
    """The lanes' threads have ended their work; what they queued on the GPU has not."""
    monkeypatch.setattr(execute, "QUIET_SECONDS", 0.2)
    gate, said = threading.Event(), list[str]()

    class Event:
        def synchronize(self) -> None:
            assert gate.wait(PATIENCE)

    class Queued(Thread):
        def _run(self, work: Any, after: Any, done: Any) -> None:
            work()
            done.event = Event()

    def tell(text: str) -> None:
        said.append(text)
        gate.set()

    def work() -> None:
        monkeypatch.setattr(execute, "new_lane", lambda kind, name: Queued(name))
        with Executor(lambda task: None, "stream") as executor:
            executor.say = tell
            executor.run(Program([("disk",)] * 2, 1, 2, STAGED).sweep(0, uniform(1), True))

    in_time(work)
    assert said[0].startswith("no task has ended for ")
    assert "; under way are on the GPU, or before it: " in said[0]


def test_nobody_is_told_of_silence_between_sweeps(monkeypatch: Any) -> None:
    monkeypatch.setattr(execute, "QUIET_SECONDS", 0.05)
    said = list[str]()
    with Executor(lambda task: None, "thread") as executor:
        executor.say = said.append
        for sweep in range(2):
            executor.run(Program([("disk",)] * 2, 1, 2, DIRECT).sweep(sweep, uniform(1), False))
            time.sleep(0.2)
    assert not said
    assert not [thread for thread in threading.enumerate() if thread.name == "flexengine-watchdog"]


def test_an_error_in_a_load_ahead_surfaces_in_the_sweep_that_needs_it() -> None:
    gate, loads = threading.Event(), list[Task]()

    def perform(task: Task) -> None:
        if task.op is Op.LOAD_WEIGHT:
            loads.append(task)
            if len(loads) == 4:  # the next sweep's first
                assert gate.wait(PATIENCE)
                raise ArithmeticError("disk on fire")

    def work() -> None:
        program = Program([("disk",)] * 3, 2, 2, DIRECT)
        with Executor(perform, "thread") as executor:
            executor.run(program.sweep(0, uniform(1), True))
            gate.set()
            with pytest.raises(ArithmeticError, match="disk on fire") as caught:
                executor.run(program.sweep(1, uniform(1), False))
        assert caught.value.__notes__ == [f"in task: load weight, {loads[3].cell}, lane disk_read"]

    in_time(work)


def test_an_error_of_the_program_itself_ends_the_threads() -> None:
    def program() -> Iterator[Task]:
        yield from Program([("host",)], 1, 1, DIRECT).sweep(0, uniform(1), False)
        raise LookupError("no such layer")

    def work() -> None:
        with Executor(lambda task: time.sleep(0.01), "thread") as executor:
            executor.run(program())

    with pytest.raises(LookupError, match="no such layer"):
        in_time(work)
    assert not [t for t in threading.enumerate() if t.name.startswith("flexengine-")]


def test_run_returns_when_all_but_loads_ahead_have_ended() -> None:
    """The next sweep's loads go on while the caller samples; everything else has ended."""
    ended: list[Task] = []
    gate = threading.Event()

    def perform(task: Task) -> None:
        if task.op is Op.LOAD_WEIGHT and sum(t.op is Op.LOAD_WEIGHT for t in ended) >= 3:
            assert gate.wait(PATIENCE)
        ended.append(task)

    def work() -> tuple[list[Task], list[Task]]:
        with Executor(perform, "thread") as executor:
            tasks = list(Program([("host",)] * 3, 2, 2, DIRECT).sweep(0, uniform(2, "host", "host"), True))
            executor.run(tasks)
            now = list(ended)
            gate.set()
            while len(ended) < len(tasks):
                time.sleep(0.001)
        return tasks, now

    tasks, now = in_time(work)
    rest = [t for t in tasks if t not in now]
    assert [t.op for t in rest] == [Op.LOAD_WEIGHT] * 2
    assert len(ended) == len(tasks)


@pytest.mark.parametrize("error", [LookupError("broken"), KeyboardInterrupt()])
def test_what_was_not_begun_when_a_job_ended_is_not_done(error: BaseException) -> None:
    """A failure, or Ctrl-C in the caller, does not wait for the loads that were queued behind it."""
    begun: list[Task] = []

    def perform(task: Task) -> None:
        begun.append(task)
        time.sleep(0.02)

    def work() -> None:
        with Executor(perform, "thread") as executor:
            for task in Program([("host",)] * 40, 39, 40, DIRECT).sweep(0, uniform(1), False):
                executor._submit(task)
            raise error

    with pytest.raises(type(error)):
        in_time(work)
    assert len(begun) <= 4  # one or two on each of the two lanes
    assert not [t for t in threading.enumerate() if t.name.startswith("flexengine-")]


def test_the_next_layer_is_loaded_while_one_is_computed() -> None:
    """A load and a computation wait for one another inside their tasks: in turn, neither would end."""
    layers, sweeps = 6, 4
    met = threading.Barrier(2)
    loaded = itertools.count()

    def perform(task: Task) -> None:
        first = task.op is Op.LOAD_WEIGHT and next(loaded) == 0
        last = task.cell.layer == layers - 1 and not sweeps_left
        if not first and (task.op is Op.LOAD_WEIGHT or (task.cell.batch == 0 and not last)):
            met.wait(timeout=10)

    sweeps_left = sweeps

    def work() -> dict[str, float]:
        nonlocal sweeps_left
        with Executor(perform, "thread") as executor:
            program = Program([("host",)] * layers, layers - 1, 2, DIRECT)
            for n in range(sweeps):
                sweeps_left -= 1
                executor.run(program.sweep(n, uniform(2), n + 1 < sweeps))
            return dict(executor.busy)

    busy = in_time(work)
    assert set(busy) == {"device", "h2d"}
    assert next(loaded) == sweeps * layers


def test_without_threads_nothing_overlaps() -> None:
    threads: list[threading.Thread] = []
    with Executor(lambda task: threads.append(threading.current_thread()), "inline") as executor:
        executor.run(Program([("host",)] * 3, 2, 2, DIRECT).sweep(0, uniform(2), False))
    assert len(threads) == 3 * (1 + 2)  # of each unit a load and two cells
    assert set(threads) == {threading.current_thread()}


# Times of CUDA streams, on a virtual clock.

SECONDS = {Op.LOAD_WEIGHT: 0.006, Op.COMPUTE: 0.003, Op.LOAD_CACHE: 0.0015, Op.STORE_CACHE: 0.0007}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu.pretend(monkeypatch)


def queued(task: Task) -> None:
    """Returns at once; the GPU will be busy with it."""
    pretend_gpu.queue(SECONDS[task.op])


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_busy_is_what_the_gpu_did_not_how_long_queueing_took(pretended: None, tmp_path: Path, slots: int) -> None:
    """Lane by lane, and when each task began and ended in the trace: against the program on a virtual clock."""

    def program() -> Program:
        return Program([("host",)] * 5, 4, slots, STAGED)

    batches = uniform(3, "host")
    trace = Trace(tmp_path / "trace.json")
    with Executor(queued, "stream", trace) as executor:
        walked, run, forecast = program(), program(), 0.0
        for number in range(3):
            tasks = list(walked.sweep(number, batches, False))
            forecast = simulate(tasks, lambda task: SECONDS[task.op])
            before = dict(executor.busy)
            executor.run(run.sweep(number, batches, False))
            spent = {lane: seconds - before.get(lane, 0.0) for lane, seconds in executor.busy.items()}
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
        assert executor.busy["h2d"] == pytest.approx(3 * 0.006)
        lane: Any = executor.lanes["h2d"]
        lane._stream.reached = lane._stream.now  # the GPU comes no further for now
        tasks = list(Program([("host",)] * 3, 2, 2, DIRECT).sweep(1, uniform(1), False))
        loads = [executor._submit(task) for task in tasks if task.op is Op.LOAD_WEIGHT]
        for done in loads:
            done.wait()
        executor._count()
        assert executor.busy["h2d"] == pytest.approx(3 * 0.006)
    assert executor.busy["h2d"] == pytest.approx(6 * 0.006)


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
    """After an error every query of an event fails: the task's error surfaces, not that of the clock."""

    def fail(event: Any) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def perform(task: Task) -> None:
        monkeypatch.setattr(pretend_gpu.Event, "query", fail)
        raise ArithmeticError("boom")

    executor = Executor(perform, "stream")
    with pytest.raises(ArithmeticError, match="boom"), executor:
        executor.run(Program([("host",)] * 3, 2, 2, DIRECT).sweep(0, uniform(1), False))
    assert not executor.busy


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
    assert executor.busy["device"] >= 2 * spent


# The trace.


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_chrome_trace(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    batch = Batch((Piece(0, 3, 1, True),), "disk", "host")
    program = list(Program([("disk",), ("host",), ()], 2, 2, STAGED).sweep(4, [batch, batch], False))
    with Executor(lambda task: time.sleep(0.001), kind, trace) as executor:
        executor.run(program)
    trace.write()
    written = json.loads(path.read_text())
    assert set(written) == {"traceEvents", "displayTimeUnit"}
    names = {e["tid"]: e["args"]["name"] for e in written["traceEvents"] if e["ph"] == "M"}
    assert sorted(names.values()) == sorted({t.lane for t in program})
    assert all(e["name"] == "thread_name" for e in written["traceEvents"] if e["ph"] == "M")
    spans = [e for e in written["traceEvents"] if e["ph"] == "X"]
    said = [(names[e["tid"]], e["name"], *e["args"].values()) for e in spans]
    assert sorted(said) == sorted((t.lane, t.op.value, *t.cell, t.home, t.hop) for t in program)
    assert min(e["ts"] for e in spans) == 0
    assert all(e["dur"] >= 1000 for e in spans)  # microseconds
    for tid in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(mine))  # one row never overlaps
    for lane, seconds in executor.busy.items():
        assert sum(e["dur"] for e in spans if names[e["tid"]] == lane) == pytest.approx(seconds * 1e6, rel=1e-3)


def test_empty_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.write()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"trace file {tmp_path}/no/trace.json: .*No such file"):
        Trace(tmp_path / "no" / "trace.json")
