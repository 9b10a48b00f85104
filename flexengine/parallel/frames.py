"""Frames between two processes of a group: a header of fixed layout, then bytes. Nothing is pickled.

A frame is an int64 tensor of HEADER words (kind, first number, second number, bytes of the body), then a uint8 tensor
of the body. Both are sent by `torch.distributed`, from a thread of their own, so that no thread that computes waits in
the library. Frames of one channel arrive in order.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.errors import StageLost

HEADER = 4  # int64 words
LAST = -1  # kind of the frame after which a channel ends
HEADER_BYTES = 8 * HEADER
LONG = timedelta(days=1000)  # channels wait for as long as a sweep takes; heartbeats notice lost processes
MOST_BODY = 1 << 40  # bytes; a larger number in a header is damage


class Frame(NamedTuple):
    """A message.

    Attributes:
        kind: number of its kind.
        first, second: numbers whose meaning depends on the kind.
        body: uint8 [bytes], in RAM.
    """

    kind: int
    first: int
    second: int
    body: Tensor


class Ended(Exception):
    """The job ended while a thread waited for a frame."""


class Queue:
    """Frames that wait, between two threads. After `fail`, `put` and `get` raise its error.

    Args:
        most: most frames that wait; `put` then waits. None for no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._most, self._frames = most, deque[Frame]()
        self._changed = threading.Condition()
        self._error: StageLost | None = None

    def put(self, frame: Frame) -> None:
        """Add a frame. Wait while `most` frames wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._most is None or len(self._frames) < self._most)
            if self._error is not None:
                raise self._error
            self._frames.append(frame)
            self._changed.notify_all()

    def get(self, ended: Callable[[], bool] = lambda: False) -> Frame:
        """Return the first frame. Wait until there is one.

        Args:
            ended: looked at after every `wake`; if it is true, Ended is raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._frames or ended())
            if ended():
                raise Ended
            if not self._frames:
                assert self._error is not None
                raise self._error
            self._changed.notify_all()
            return self._frames.popleft()

    def wake(self) -> None:
        """Let `get` look at its `ended` again."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: StageLost) -> None:
        """Let all calls raise an error. Frames that arrived before it can still be taken."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class Channel:
    """Frames to or from one process of a group.

    Attributes:
        nbytes: bytes sent or received so far, with headers.
    """

    def __init__(
        self, step: Callable[["Channel"], int], lost: Callable[[Exception], StageLost], most: int | None
    ) -> None:
        """Start the thread that calls `step`, which returns the kind of a frame, until it is LAST or `step` fails.

        Args:
            step: sends or receives a frame.
            lost: returns the error of the other process.
            most: most frames that wait; None for no limit.
        """
        self.queue, self.nbytes, self._lost = Queue(most), 0, lost
        self._thread = threading.Thread(target=self._loop, args=(step,), name="flexengine-channel", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended: after frame LAST, or an error."""
        self._thread.join(seconds)

    def _loop(self, step: Callable[["Channel"], int]) -> None:
        kind = 0
        while kind != LAST:
            try:
                kind = step(self)
            except StageLost:
                return
            except Exception as error:
                self.queue.fail(self._lost(error))
                return


def sender(process_group: Any, to: int, tag: int, lost: Callable[[Exception], StageLost], most: int) -> Channel:
    """Return a channel that sends the frames that are put into its queue.

    Args:
        process_group: gloo process group.
        to: rank of the other process.
        tag: number of the channel.
        lost: returns the error of the other process, from an error of the library.
        most: most frames that wait.
    """

    def step(channel: Channel) -> int:
        kind, first, second, body = channel.queue.get()
        process_group.send([torch.tensor([kind, first, second, len(body)])], to, tag).wait(LONG)
        if len(body):
            process_group.send([body], to, tag).wait(LONG)
        channel.nbytes += HEADER_BYTES + len(body)
        return kind

    return Channel(step, lost, most)


def receiver(
    process_group: Any, of: int, tag: int, lost: Callable[[Exception], StageLost],
    seen: Callable[[Frame], None] = lambda frame: None,
) -> Channel:  # fmt: skip
    """Return a channel whose queue gets the frames that another process sends. Any number of frames wait, so that the
    other process never waits for this one.

    Args:
        process_group, tag, lost: as for `sender`.
        of: rank of the other process.
        seen: called with every frame when it arrives, from the channel's thread.
    """

    def step(channel: Channel) -> int:
        header = torch.empty(HEADER, dtype=torch.int64)
        process_group.recv([header], of, tag).wait(LONG)
        kind, first, second, nbytes = header.tolist()
        if not 0 <= nbytes < MOST_BODY:
            raise ValueError(f"a frame of {nbytes} bytes was announced")
        body = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            process_group.recv([body], of, tag).wait(LONG)
        channel.nbytes += HEADER_BYTES + nbytes
        frame = Frame(int(kind), first, second, body)
        channel.queue.put(frame)
        seen(frame)
        return frame.kind

    return Channel(step, lost, None)
