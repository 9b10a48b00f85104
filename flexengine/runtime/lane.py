"""Lanes: serial resources that run tasks. Only this module uses CUDA streams, and threads that run tasks."""

import contextlib
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexengine.places import lane_of


class Mark:
    """A point in time on a lane whose work ends before its call returns."""

    passed = True  # whether the lane has reached this point

    def __init__(self) -> None:
        self.seconds = time.perf_counter()  # read it only when `passed` is true


class StreamMark(Mark):
    """A point in a CUDA stream: the GPU reaches the mark when all work queued before the mark has ended.

    Reading `passed` or `seconds` blocks neither the GPU nor the thread.

    Seconds are summed from mark to mark of a stream: CUDA returns elapsed times as fp32 milliseconds, which are 4 ms
    apart after ten hours.

    Args:
        stream: the torch.cuda.Stream.
        before: the previous mark of the stream; None for the first one, at which the constructor waits for the GPU.
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
        """Whether the GPU has reached this point. False after a GPU error, as every query then fails."""
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
            mark._before = None  # else each mark would keep all earlier marks alive
        return self._seconds


class Done:
    """Completion of a task."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None  # of the task or of a task it waited for
        self.event: Any = None  # torch.cuda.Event on a Stream lane: its work may still run on the GPU after `ended`

    def set(self, error: BaseException | None = None) -> None:
        """Mark the task as ended, with its error if there was one."""
        self.error = error
        self._flag.set()

    @property
    def ended(self) -> bool:
        """Whether the task's work has returned; on a Stream lane the GPU may still compute."""
        return self._flag.is_set()

    def wait(self, stream: Any = None) -> None:
        """Wait until the task has ended, on the GPU too: this thread, or `stream` if it is given. Raise its error if
        there was one."""
        self._flag.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            self.event.synchronize() if stream is None else stream.wait_event(self.event)


class LaneRunner(ABC):
    """Runs tasks one after another, in the order they were submitted. name: for threads and messages."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def submit(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        """Run `work` once all tasks in `after` have ended, then set `done`, with the error if there was one."""

    def mark(self) -> Mark:
        """Return a mark at this point of the lane's work. Called by `work`, in the lane's thread."""
        return Mark()

    def close(self) -> None:  # noqa: B027 - an Inline lane has nothing to close
        """Wait for the submitted tasks and end the lane."""


class Inline(LaneRunner):
    """Lane that runs each task at once in the caller's thread. It is the reference, and fastest without overlap."""

    def submit(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        try:
            for earlier in after:
                earlier.wait()
            work()
            _synchronize()  # copies from pinned memory may still run
        except BaseException as error:
            done.set(error)
            raise
        done.set()

    def mark(self) -> Mark:
        """Return a mark after the queued GPU work has ended, as the mark would else give the time of queueing."""
        _synchronize()
        return Mark()


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


class Thread(LaneRunner):
    """Lane with a thread of its own. After a failed task, tasks that wait for it fail, and the lane keeps running."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Sequence[Done], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"flexengine-{name}", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # such as Ctrl-C, after which the thread may run, but no caller has the lane to close it
            self._queue.put(None)
            raise

    def _loop(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                work, after, done = item
                try:
                    self._run(work, after, done)
                except BaseException as error:  # tasks that wait for this one raise its error
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
    """Thread lane with its own CUDA stream; CUDA events order the work of several streams on the GPU."""

    def __init__(self, name: str) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._last = StreamMark(self._stream, None)
        super().__init__(name)

    def mark(self) -> Mark:
        """Return a mark at this point of the stream, which the GPU may reach long after the call."""
        self._last = StreamMark(self._stream, self._last)
        return self._last

    def _run(self, work: Callable[[], None], after: Sequence[Done], done: Done) -> None:
        with torch.cuda.stream(self._stream):
            for earlier in after:
                earlier.wait(self._stream)
            work()
            done.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.event.record(self._stream)

    def close(self) -> None:
        super().close()
        self._stream.synchronize()  # a prefetch for a sweep that was never run may not have ended


def new_lane(kind: str, name: str) -> LaneRunner:
    """Return a new lane.

    Args:
        kind: inline, thread or stream. With stream, lanes of disks, of the CPU and of attention workers are Thread
            lanes, whose tasks start after the tasks they depend on have ended on the GPU too. Questions to workers, and
            their answers, are copied from and to the GPU, on Stream lanes.
        name: for threads and messages.
    """
    if kind == "inline":
        return Inline(name)
    return Stream(name) if kind == "stream" and lane_of(name).queues else Thread(name)


def forget_variables(error: BaseException) -> None:
    """Clear the local variables of all ended frames in the tracebacks of `error` and of its causes and contexts.

    Tensors in such variables would live as long as the error, and a variable that leads back to the error (a `Done`)
    would close a reference cycle. The traceback still prints as before.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
