"""Reports of long work: contexts, nesting, threads, and the logger."""

import logging
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flexengine import activity as module
from flexengine.activity import (
    Activity,
    RunningActivity,
    activity,
    advance,
    listener,
    listener_of,
    message,
    messenger,
    reported,
    reporting,
    tick,
)
from flexengine.activity.display import Display
from tests.helpers.listening import Heard, listening


@pytest.fixture(autouse=True)
def every_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)


def test_the_states_of_work() -> None:
    with listening() as heard:
        with activity("converting", "why", 10, "B", logging.INFO) as work:
            work.advance(4)
            advance(6)
        with pytest.raises(LookupError), activity("reading", "why"):
            raise LookupError
    assert [(r.name, r.state, r.done) for r in heard] == [
        ("converting", "began", 0), ("converting", "running", 4), ("converting", "running", 10),
        ("converting", "done", 10), ("reading", "began", 0), ("reading", "failed", 0),
    ]  # fmt: skip
    assert {(r.total, r.unit, r.level) for r in heard[:4]} == {(10, "B", logging.INFO)}


def test_numbers_go_to_the_innermost_activity() -> None:
    with listening() as heard:
        with activity("outer", ""):
            advance(1)
            with activity("inner", ""):
                advance(2)
                tick()
            advance(3)
        advance(5)  # to none
        tick()
    assert [(r.name, r.done) for r in heard if r.state == "running"] == [
        ("outer", 1), ("inner", 2), ("inner", 2), ("outer", 4)
    ]  # fmt: skip


def test_reports_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of a million steps makes a few reports, and the last one has the final count."""
    clock = [0.0]
    monkeypatch.setattr(module, "INTERVAL", 0.5)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with listening() as heard, activity("reading", "", unit="rows") as work:
        for _ in range(1000):
            clock[0] += 0.01
            work.advance()
    running = [r.done for r in heard if r.state == "running"]
    assert len(running) == pytest.approx(10.0 / 0.5, abs=1)
    assert heard[-1].done == 1000


def test_nothing_is_reported_after_the_end() -> None:
    heard = Heard()
    work = RunningActivity(heard, Activity("a", ""))
    work.end(failed=True)
    work.end()
    work.advance()
    assert [r.state for r in heard] == ["began", "failed"]


def test_a_generator_reports_to_its_own_listener_only() -> None:
    """Between two items the caller's reports go where they went before, also in an abandoned generator."""
    inner = Heard()

    def made() -> Generator[int]:
        try:
            for i in range(3):
                message(f"inner {i}")
                yield i
        finally:
            message("closed")

    with listening() as outer:
        for i in reported(inner, made()):
            message(f"outer {i}")
            if i == 1:
                break
    assert listener() is None
    assert outer.messages == ["outer 0", "outer 1"]
    assert inner.messages == ["inner 0", "inner 1", "closed"]


def test_a_generator_may_be_closed_in_another_thread() -> None:
    heard = Heard()

    def made() -> Generator[int]:
        try:
            yield 1
        finally:
            message("closed")

    running = reported(heard, made())
    next(running)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(running.close).result()
    assert heard.messages == ["closed"]


def test_threads_have_no_listener_unless_they_take_one() -> None:
    def work(say: Any) -> None:
        message("lost")
        say("told")

    with listening() as heard, ThreadPoolExecutor(1) as pool:
        pool.submit(work, messenger()).result()
    assert heard.messages == ["told"]


def test_without_a_listener_the_logger_has_the_texts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flexengine"):
        message("slow", logging.WARNING)
        with activity("converting", "once", level=logging.INFO) as work:
            work.advance()
        with activity("planning", "often"):
            pass
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("flexengine", "WARNING", "slow"), ("flexengine", "INFO", "once")
    ]  # fmt: skip


def test_a_function_is_called_by_one_thread_at_a_time() -> None:
    busy, calls, lock = [0], [0], threading.Lock()

    def slow(record: Activity) -> None:
        with lock:
            busy[0] += 1
            assert busy[0] == 1
        threading.Event().wait(0.001)
        with lock:
            busy[0] -= 1
            calls[0] += 1

    to = listener_of(slow)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(RunningActivity(to, Activity(str(i), "")).advance) for i in range(20)]:
            done.result()
    assert calls[0] == 40  # began and running


def test_which_listener_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        monkeypatch.setattr("flexengine.activity.is_terminal", lambda terminal=terminal: terminal)
        assert isinstance(listener_of(True), Display)
        assert listener_of(False) is None
        assert isinstance(listener_of(None), Display) == terminal
        with listening() as heard:
            assert listener_of(None) is heard
            assert listener_of(False) is None
    with reporting(None):
        assert listener() is None
