"""Overlapped steps: order, bounds, the first error, interrupts, and threads that end."""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from flexengine.model.encoding import overlap
from tests.helpers.patience import PATIENCE, in_time, until

DEPTH = 3


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def fails(at: int, error: BaseException) -> Any:
    """Return a function that returns its argument, and raises the error for the argument `at`."""

    def step(n: int) -> int:
        if n == at:
            raise error
        return n

    return step


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("depth", [1, DEPTH])
def test_every_item_passes_in_order(count: int, depth: int) -> None:
    found: list[int] = []
    in_time(lambda: overlap(range(count), lambda n: n * n, found.append, depth))
    assert found == [n * n for n in range(count)]


def test_the_steps_run_at_the_same_time() -> None:
    """Each item waits for the other steps' work on its neighbours, which steps in turn would never begin."""
    barrier, threads = threading.Barrier(3, timeout=PATIENCE), set[str]()

    def met(n: int, ahead: int) -> int:
        threads.add(threading.current_thread().name)
        if 2 <= n + ahead < 10:  # the items 2, 1 and 0 of three steps meet first
            barrier.wait()
        return n

    found: list[int] = []
    make = (met(n, 0) for n in range(12))
    overlap(make, lambda n: met(n, 1), lambda n: found.append(met(n, 2)), DEPTH)
    assert found == list(range(12))
    assert threads == {threading.current_thread().name, "flexengine-changing_0", "flexengine-consuming_0"}


def test_several_items_are_changed_at_the_same_time() -> None:
    """Three meet, each begun and in the caller's context; a later one that is finished first waits for its turn."""
    barrier, begun, found = threading.Barrier(3, timeout=PATIENCE), list[str](), list[tuple[int, str]]()
    name = ContextVar("name", default="none")
    name.set("caller's")

    def change(n: int) -> tuple[int, str]:
        barrier.wait()
        time.sleep(0.01 * (2 - n % 3))
        return n, name.get()

    overlap(range(9), change, found.append, DEPTH, 3, lambda: begun.append(threading.current_thread().name))
    assert found == [(n, "caller's") for n in range(9)]
    assert sorted(begun) == [f"flexengine-changing_{n}" for n in range(3)]


@pytest.mark.parametrize("slow", ["change", "consume"])
def test_a_slow_step_holds_the_earlier_ones_back(slow: str) -> None:
    """At most `depth` items wait, one is made and one is consumed."""
    made, changed, consumed, most = [0], [0], [0], [0, 0]

    def make() -> Iterator[int]:
        for n in range(60):
            made[0] += 1
            most[0] = max(most[0], made[0] - changed[0])
            yield n

    def rest(step: int, n: int) -> None:
        until(lambda: n or most[step] == DEPTH + 2)  # the first item waits until the earlier steps have gone ahead
        time.sleep(0.002)

    def change(n: int) -> int:
        if slow == "change":
            rest(0, n)
        most[1] = max(most[1], changed[0] + 1 - consumed[0])
        changed[0] += 1
        return n

    def consume(n: int) -> None:
        if slow == "consume":
            rest(1, n)
        consumed[0] += 1

    overlap(make(), change, consume, DEPTH)
    assert max(most) == DEPTH + 2
    assert most[slow == "consume"] == DEPTH + 2


@pytest.mark.parametrize("at", [0, 1, 50, 99])
@pytest.mark.parametrize("which", ["make", "change", "consume"])
@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_of_each_step_reaches_the_caller(which: str, at: int, error: BaseException) -> None:
    """What was finished before it is consumed."""
    steps = {name: fails(at if name == which else -1, error) for name in ("make", "change", "consume")}
    found: list[int] = []
    with pytest.raises(type(error)) as caught:
        in_time(lambda: overlap(
            map(steps["make"], range(100)), steps["change"], lambda n: found.append(steps["consume"](n)), DEPTH
        ))  # fmt: skip
    assert caught.value is error
    assert found == list(range(at))


def test_the_first_error_wins() -> None:
    failed = threading.Event()

    def consume(n: int) -> None:
        failed.set()
        raise ValueError("first")

    def change(n: int) -> int:
        if n:
            assert failed.wait(PATIENCE)
            raise ValueError("second")
        return n

    with pytest.raises(ValueError, match="first"):
        overlap(range(10), change, consume, DEPTH)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("idle", ["make", "consume"])
def test_an_interrupt_while_the_caller_waits(idle: str) -> None:
    """SIGINT arrives while another step lasts, which ends first."""
    begun, go_on, found = threading.Event(), threading.Event(), list[int]()

    def lasting(n: int) -> int:
        if n == 5:
            begun.set()
            assert go_on.wait(PATIENCE)
        return n

    def interrupting() -> None:
        assert begun.wait(PATIENCE)
        time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.02)
        go_on.set()

    def consume(n: int) -> None:
        found.append(lasting(n) if idle == "consume" else n)

    make: Iterable[int] = map(lasting, range(100)) if idle == "make" else range(100)
    helper = threading.Thread(target=interrupting)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        overlap(make, lambda n: n, consume, 1)
    helper.join()
    assert found == list(range(len(found)))
    assert len(found) in ([5] if idle == "make" else range(6, 10))


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "flexengine-consuming_0":
            time.sleep(0.05)  # no room is left by now
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        overlap(range(10), lambda n: n, print, 1)
