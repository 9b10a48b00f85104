"""Lanes: serial resources that run tasks. The only place with CUDA streams, and with threads that run tasks."""

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexengine.runtime.frames import forget_variables


class Mark:
    """A point in time on a lane whose work ends before its call returns.

    Attributes:
        seconds: of time.perf_counter. To be read only when `passed` is true.
        passed: whether the lane has come to this point.
    """

    passed = True

    def __init__(self) -> None:
        self.seconds = time.perf_counter()


class StreamMark(Mark):
    """A point in a CUDA stream: the GPU reaches it when everything queued before it has ended.

    Reading it makes neither the GPU nor this thread wait: `passed` turns true by itself.

    Seconds are summed from mark to mark of a stream: the GPU tells them as fp32 milliseconds, which after ten hours
    would be 4 ms apart.

    Args:
        stream: the torch.cuda.Stream.
        before: the stream's mark before this one; None makes this one the first, for which this thread waits once.
    """

    def __init__(self, stream: Any, before: "StreamMark | None") -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._before, self._seconds = before, 0.0
        if before is None:
            self._event.synchronize()
            self._seconds = time.perf_counter()

    @property
    def passed(self) -> bool:  # type: ignore[override]
        """Whether the GPU has come to this point. False after an error of the GPU, as then every query fails."""
        with contextlib.suppress(RuntimeError):
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        return False

    @property
    def seconds(self) -> float:  # type: ignore[override]
        unknown = [self]
        while (before := unknown[-1]._before) is not None:
            unknown.append(before)
        for mark in reversed(unknown[:-1]):
            assert mark._before is not None
            mark._seconds = mark._before._seconds + mark._before._event.elapsed_time(mark._event) / 1e3
            mark._before = None  # each mark would keep all before it
        return self._seconds


class Done:
    """A task that has ended, or will. `error` is its own failure or that of something it waited for."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None
        self.event: Any = None  # torch.cuda.Event on a Stream lane: work is queued on the GPU, perhaps not finished

    def set(self, error: BaseException | None = None) -> None:
        self.error = error
        self._flag.set()

    @property
    def ended(self) -> bool:
        return self._flag.is_set()

    def wait(self) -> None:
        """Returns when the task has ended, on the GPU too. Raises its error."""
        self._flag.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            self.event.synchronize()

    def wait_on(self, stream: Any) -> None:
        """Like wait(), but GPU work is waited for by `stream` instead of by this thread."""
        self._flag.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            stream.wait_event(self.event)


class Lane(ABC):
    """Runs tasks one after another, in the order they were submitted."""

    name: str

    @abstractmethod
    def submit(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        """Runs `work` once everything in `after` has ended, then sets `done`, with the error if there was one."""

    def mark(self) -> Mark:
        """Return this point of the lane's work. Called within `work`, in the thread that runs it."""
        return Mark()

    def close(self) -> None:  # noqa: B027 - an Inline lane has nothing to close
        """Waits for what was submitted and ends the lane."""


class Inline(Lane):
    """Runs each task at once in the caller's thread: the reference, and the fastest where nothing overlaps."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        try:
            for earlier in after:
                earlier.wait()
            work()
            _synchronize()  # copies from pinned memory are still under way
        except BaseException as error:
            done.set(error)
            raise
        done.set()

    def mark(self) -> Mark:
        """Return this point, after what was queued on a GPU has ended: else it would be the time of queueing."""
        _synchronize()
        return Mark()


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


class Thread(Lane):
    """A thread of its own. A failed task fails everything that waits for it; the lane itself lives on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Sequence[Done], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"flexengine-{name}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                work, after, done = item
                try:
                    self._run(work, after, done)
                except BaseException as error:  # every failure travels to whoever waits
                    forget_variables(error)
                    done.set(error)
                else:
                    done.set()
                del item, work, after, done  # hold no tensors while idle

    def _run(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        for earlier in after:
            earlier.wait()
        work()

    def submit(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        self._queue.put((work, after, done))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class Stream(Thread):
    """A Thread lane with its own CUDA stream; ordering between streams is left to the GPU."""

    def __init__(self, name: str) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._last = StreamMark(self._stream, None)
        super().__init__(name)

    def mark(self) -> Mark:
        """Return this point of the stream, which the GPU may reach long after the call."""
        self._last = StreamMark(self._stream, self._last)
        return self._last

    def _run(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        with torch.cuda.stream(self._stream):
            for earlier in after:
                earlier.wait_on(self._stream)
            work()
            done.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.event.record(self._stream)

    def close(self) -> None:
        super().close()
        self._stream.synchronize()  # a load for a sweep that never came may still be under way


def new_lane(kind: str, name: str) -> Lane:
    """kind: inline, thread or stream. On a machine with CUDA streams the disk and cpu lanes stay plain threads, which
    begin when what they wait for has ended on the GPU too."""
    if kind == "inline":
        return Inline(name)
    if kind == "stream" and not name.startswith(("disk", "cpu")):
        return Stream(name)
    return Thread(name)
