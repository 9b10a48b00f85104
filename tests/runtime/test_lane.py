"""Lanes: every kind passes one conformance class."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexengine.runtime.lane import Done, Inline, LaneRunner, Thread, new_lane
from tests.helpers.patience import PATIENCE, in_time, until


class LaneTests:
    """Tests that every lane must pass; a subclass makes the lane in `make`."""

    def make(self, name: str) -> LaneRunner:
        raise NotImplementedError

    @pytest.fixture
    def lanes(self) -> Any:
        made = [self.make("a"), self.make("b")]
        yield made
        in_time(lambda: [lane.close() for lane in made])

    def submit(self, lane: LaneRunner, work: Callable[[], None], *after: Done) -> Done:
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

    def test_one_after_another_in_order(self, lanes: list[LaneRunner]) -> None:
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

    def test_waits_for_another_lane(self, lanes: list[LaneRunner]) -> None:
        seen: list[str] = []

        def slow() -> None:
            time.sleep(0.05)
            seen.append("first")

        first = self.submit(lanes[0], slow)
        second = self.submit(lanes[1], lambda: seen.append("second"), first)
        in_time(second.wait)
        assert seen == ["first", "second"]

    def test_an_error_reaches_whoever_waits_and_nobody_else(self, lanes: list[LaneRunner]) -> None:
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

    def test_no_gradients(self, lanes: list[LaneRunner]) -> None:
        found: list[bool] = []
        with torch.no_grad():  # the caller of an Inline lane sees to it itself
            in_time(self.submit(lanes[0], lambda: found.append(torch.is_grad_enabled())).wait)
        assert found == [False]


class TestInline(LaneTests):
    def make(self, name: str) -> LaneRunner:
        return Inline(name)

    def test_raises_at_once(self) -> None:
        done = Done()
        with pytest.raises(ArithmeticError) as caught:
            Inline("a").submit(self.fail("boom"), (), done)
        assert done.error is caught.value


class TestThread(LaneTests):
    def make(self, name: str) -> LaneRunner:
        return Thread(name)

    def test_lanes_overlap(self, lanes: list[LaneRunner]) -> None:
        """Two tasks that each wait for the other's beginning end only if both lanes run at once."""
        begun = [threading.Event(), threading.Event()]

        def work(i: int) -> None:
            begun[i].set()
            assert begun[1 - i].wait(PATIENCE)

        done = [self.submit(lane, lambda i=i: work(i)) for i, lane in enumerate(lanes)]
        in_time(lambda: [d.wait() for d in done])

    def test_idle_lane_holds_nothing(self, lanes: list[LaneRunner]) -> None:
        import weakref

        class Thing:
            pass

        thing = Thing()
        known = weakref.ref(thing)
        done = self.submit(lanes[0], lambda thing=thing: None)
        in_time(done.wait)
        del thing
        in_time(self.submit(lanes[1], lambda: None).wait)
        until(lambda: known() is None)


def test_an_interrupt_while_a_lane_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, left_threads: Any) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            Thread("a")
    until(lambda: not left_threads())


def test_new_lane() -> None:
    lanes = [new_lane("inline", "h2d"), new_lane("thread", "h2d"), new_lane("stream", "disk_read")]
    assert [type(lane) for lane in lanes] == [Inline, Thread, Thread]
    for lane in lanes:
        lane.close()
