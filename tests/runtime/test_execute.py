"""The one loop. Programs run on real threads with random sleeps against the toy's oracle."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.places import DIRECT, STAGED
from flexengine.runtime import execute
from flexengine.runtime.execute import Executor, TaskFailed
from flexengine.runtime.lane import Thread
from flexengine.schedule.order import Cell
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task
from tests.helpers.patience import PATIENCE, in_time, until
from tests.helpers.strategies import SEEDS
from tests.helpers.toy import MACHINES, Toy, arriving_of, generate, jobs, oracle, uniform

# The loop.


@pytest.mark.parametrize("kind", ["inline", "thread"])
@pytest.mark.parametrize("routes", MACHINES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=6)
def test_programs_are_right_on_real_lanes(
    slots: int, routes: str, kind: str, data: Any, seed: int, left_threads: Any
) -> None:
    machine, lazy = MACHINES[routes], random.Random(seed)
    streamed, layers, policy, rows = data.draw(jobs(slots, machine))
    arriving = arriving_of(lazy, layers)
    toy = Toy(streamed, layers, slots, machine, rows, arriving)
    slow = {op: lazy.choice([0, 0, 0.0003]) for op in Op}

    def perform(task: Task) -> None:
        time.sleep(slow[task.op] * random.random())
        toy.perform(task)

    with Executor(perform, kind) as executor:
        program = Program(streamed, layers, slots, machine, arriving)
        in_time(lambda: generate(toy, executor.run, program, policy, rows))
    assert {s: t[rows[s][0] :] for s, t in toy.tokens.items()} == oracle(streamed, layers, rows)
    assert not left_threads()


def is_task(task: Task, op: Op, layer: int, batch: int, hop: int = 0) -> bool:
    return (task.op, task.cell.layer, task.cell.batch, getattr(task, "hop", 0)) == (op, layer, batch, hop)


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_lanes_are_new_if_it_is_entered_again(kind: str) -> None:
    """After an error, a program with empty slots runs from its first task to its last."""
    batches, begun, faults = uniform(2, "disk", "host"), list[Task](), {9}

    def perform(task: Task) -> None:
        begun.append(task)
        if len(begun) in faults:
            faults.clear()
            raise ArithmeticError("disk on fire")

    executor = Executor(perform, kind)

    def work() -> None:
        with executor:
            executor.run(Program([("disk",)] * 4, 3, 2, STAGED).sweep(0, batches, False))

    with pytest.raises(TaskFailed, match="disk on fire"):
        in_time(work)
    begun.clear()
    in_time(work)
    expected = list(Program([("disk",)] * 4, 3, 2, STAGED).sweep(0, batches, False))
    assert sorted(begun, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("kind", ["inline", "thread"])
@pytest.mark.parametrize(
    ("op", "layer", "batch", "hop"),
    [(Op.COMPUTE, 0, 0, 0), (Op.COMPUTE, 2, 1, 0), (Op.LOAD_WEIGHT, 1, -1, 0), (Op.LOAD_WEIGHT, 2, -1, 1),
     (Op.STORE_CACHE, 1, 1, 1), (Op.LOAD_CACHE, 2, 0, 0), (Op.STORE_HIDDEN, 0, 1, 0)],
)  # fmt: skip
def test_the_first_error_surfaces_with_its_task(
    kind: str, op: Op, layer: int, batch: int, hop: int, left_threads: Any
) -> None:
    batches = uniform(2, "disk", "host")
    failed = threading.Event()

    def perform(task: Task) -> None:
        if is_task(task, op, layer, batch, hop):
            failed.set()
            raise ArithmeticError("disk on fire")

    def work() -> None:
        with Executor(perform, kind) as executor:
            executor.run(Program([("disk",)] * 4, 3, 2, STAGED).sweep(0, batches, False))

    with pytest.raises(TaskFailed) as caught:
        in_time(work)
    assert failed.is_set()
    assert is_task(caught.value.task, op, layer, batch, hop)
    assert isinstance(caught.value.cause, ArithmeticError)
    assert str(caught.value).startswith(f"{op.value}, {Cell(0, layer, batch)}, lane ")
    assert str(caught.value).endswith(": disk on fire")
    assert not left_threads()


def watched(monkeypatch: Any, passes: Callable[[], Any] = lambda: False) -> list[float]:
    """Return the time, in seconds, of a clock that watchdogs read, and let them look every 10 ms. The clock moves by a
    second when a watchdog reads it while `passes()` is true, and by the test."""
    now = [0.0]

    def clock() -> float:
        now[0] += threading.current_thread().name == "flexengine-watchdog" and bool(passes())
        return now[0]

    monkeypatch.setattr(execute, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(execute, "QUIET_SECONDS", 0.04)
    return now


@pytest.mark.parametrize("stuck", ["disk_read", "disk_write", "h2d", "d2h", "device"])
def test_a_lane_that_hangs_is_named_and_the_job_goes_on_when_it_does(stuck: str, monkeypatch: Any) -> None:
    gate, held, said = threading.Event(), list[Task](), list[str]()
    now = watched(monkeypatch, lambda: held and not gate.is_set())

    def perform(task: Task) -> None:
        if task.lane == stuck and not held:
            held.append(task)
            assert gate.wait(PATIENCE)

    def tell(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            now[0] = 0.0  # no more time passes
            gate.set()

    def work() -> None:
        with Executor(perform, "thread") as executor:
            executor.watchdog.say = tell
            executor.run(Program([("disk",)] * 4, 3, 2, STAGED).sweep(0, uniform(2, "disk", "host"), False))

    in_time(work)
    assert len(said) == 2  # and then no more
    for text in said:
        assert text.startswith("no task has ended for ")
        assert f"lane {stuck}: {held[0].op.value}, {held[0].cell}, for " in text


def test_a_gpu_that_does_not_answer_is_named(monkeypatch: Any) -> None:
    """The lanes' threads have ended their work; what they queued on the GPU has not."""
    watched(monkeypatch, lambda: True)
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
        if "GPU" in text:  # all lanes have come that far
            gate.set()

    def work() -> None:
        monkeypatch.setattr(execute, "new_lane", lambda kind, name: Queued(name))
        with Executor(lambda task: None, "stream") as executor:
            executor.watchdog.say = tell
            executor.run(Program([("disk",)] * 2, 1, 2, STAGED).sweep(0, uniform(1), True))

    in_time(work)
    assert said[-1].startswith("no task has ended for ")
    assert "; under way are on the GPU, or before it: " in said[-1]


def test_nobody_is_told_of_silence_between_sweeps(monkeypatch: Any) -> None:
    now, said = watched(monkeypatch), list[str]()
    with Executor(lambda task: None, "thread") as executor:
        executor.watchdog.say = said.append
        for sweep in range(2):
            executor.run(Program([("disk",)] * 2, 1, 2, DIRECT).sweep(sweep, uniform(1), False))
            now[0] += 1000.0
            time.sleep(0.1)
    assert not said
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "flexengine-watchdog"])


def test_a_sweep_ends_after_the_call_of_a_look_that_is_under_way(monkeypatch: Any) -> None:
    """So that the caller reads what `look` writes from one thread at a time."""
    watched(monkeypatch)
    monkeypatch.setattr(execute, "_PATIENCE_SECONDS", PATIENCE)
    looking, gate, ended = threading.Event(), threading.Event(), list[str]()

    def look(cells: int) -> None:
        looking.set()
        assert gate.wait(PATIENCE)
        ended.append("look")

    def work() -> None:
        with Executor(lambda task: until(looking.is_set), "inline") as executor:
            executor.watchdog.look = look
            executor.run(Program([()] * 2, 1, 2, DIRECT).sweep(0, uniform(1), False))
            ended.append("run")
            executor.watchdog.look = None

    thread = threading.Thread(target=work)
    thread.start()
    until(looking.is_set)
    time.sleep(0.1)
    assert not ended
    gate.set()
    thread.join(PATIENCE)
    assert ended[0] == "look"
    assert ended[-1] == "run"


def test_lanes_end_if_the_wait_for_the_watchdog_is_interrupted(monkeypatch: Any, left_threads: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    watchdogs = list[threading.Thread]()

    def work() -> None:
        with Executor(lambda task: None, "thread") as executor:
            executor.run(Program([("disk",)] * 2, 1, 2, DIRECT).sweep(0, uniform(1), False))
            watchdogs.extend(thread for thread in threading.enumerate() if thread.name == "flexengine-watchdog")
            monkeypatch.setattr(watchdogs[0], "join", interrupted)

    with pytest.raises(KeyboardInterrupt):
        work()
    threading.Thread.join(watchdogs[0], PATIENCE)  # nothing waited for it
    assert len(watchdogs) == 1
    assert not left_threads()


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
            with pytest.raises(TaskFailed, match="disk on fire") as caught:
                executor.run(program.sweep(1, uniform(1), False))
        assert caught.value.task == loads[3]

    in_time(work)


def test_an_error_of_the_program_itself_ends_the_threads(left_threads: Any) -> None:
    def program() -> Iterator[Task]:
        yield from Program([("host",)], 1, 1, DIRECT).sweep(0, uniform(1), False)
        raise LookupError("no such layer")

    def work() -> None:
        with Executor(lambda task: time.sleep(0.01), "thread") as executor:
            executor.run(program())

    with pytest.raises(LookupError, match="no such layer"):
        in_time(work)
    assert not left_threads()


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
def test_what_was_not_begun_when_a_job_ended_is_not_done(error: BaseException, left_threads: Any) -> None:
    """After a failure, or Ctrl-C in the caller, the loads queued behind it are not run."""
    begun: list[Task] = []

    def perform(task: Task) -> None:
        begun.append(task)
        while not executor._ended:
            time.sleep(0.001)

    executor = Executor(perform, "thread")

    def work() -> None:
        with executor:
            for task in Program([("host",)] * 40, 39, 40, DIRECT).sweep(0, uniform(1), False):
                executor.submit(task)
            raise error

    with pytest.raises(type(error)):
        in_time(work)
    assert len(begun) <= 2  # one on each of the two lanes
    assert not left_threads()


def test_the_next_layer_is_loaded_while_one_is_computed() -> None:
    """A load and a computation wait for each other inside their tasks: one after the other, neither would end."""
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
            return dict(executor.times.busy)

    busy = in_time(work)
    assert set(busy) == {"device", "h2d"}
    assert next(loaded) == sweeps * layers


def test_without_threads_nothing_overlaps() -> None:
    threads: list[threading.Thread] = []
    with Executor(lambda task: threads.append(threading.current_thread()), "inline") as executor:
        executor.run(Program([("host",)] * 3, 2, 2, DIRECT).sweep(0, uniform(2), False))
    assert len(threads) == 3 * (1 + 2)  # of each unit a load and two cells
    assert set(threads) == {threading.current_thread()}
