"""Frames between two processes of a group. They wait in queues, so that no thread that computes waits for a socket.

Frames of one channel arrive in order. Ports join stages by frames with hidden states, whose `number` is the number of
the gpu_batch. Frames of a job that ended early may arrive later; they are dropped.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.wire.link import HEADER, MOST_BODY, Broken, Connection
from flexengine.worker.stage_ports import Port

FIRST_KIND = 16  # of frames; lower kinds are those of a connection
HIDDEN = FIRST_KIND  # kind of frames with hidden states
LAST = FIRST_KIND + 100  # kind of the frame after which a channel ends
HEADER_BYTES = HEADER.size
EMPTY = torch.empty(0, dtype=torch.uint8)


class Frame(NamedTuple):
    """A message."""

    kind: int  # number of its kind
    job: int = 0  # number of the job
    number: int = 0  # number whose meaning depends on the kind
    tokens: int = 0  # tokens of hidden states
    body: Tensor = EMPTY  # uint8 [bytes], in RAM


class Ended(Exception):
    """The job ended while a thread waited for a frame."""


class FrameChannel:
    """Frames that wait, between two threads. After `fail`, `put` and `get` raise its error.

    Args:
        most: most frames that wait; `put` then waits. None for no limit.
    """

    def __init__(self, most: int | None = None) -> None:
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
        """Return the first frame. Wait until there is one. Raise Ended if `ended()` is true, which is looked at after
        every `wake`."""
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


class SocketChannel(FrameChannel):
    """Frames to or from a process of the group, which a thread sends or receives. It ends with frame LAST. lost: called
    with the channel and the reason if the connection breaks. seen: called with every frame that is received, from the
    channel's thread; None for a channel that sends. Any number of received frames waits, so that the other process
    never waits for this one."""

    def __init__(
        self,
        link: Connection,
        lost: Callable[[FrameChannel, str], None],
        most: int | None,
        seen: Callable[[Frame], None] | None = None,
    ) -> None:
        super().__init__(most)
        self._link, self._lost, self._seen = link, lost, seen
        self._thread = threading.Thread(target=self._loop, name="flexengine-channel", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the thread has ended: after frame LAST, or an error."""
        self._thread.join(seconds)

    def _loop(self) -> None:
        try:
            while (self._send() if self._seen is None else self._receive(self._seen)) != LAST:
                pass
        except StageLost:  # from `get` or `put`
            return
        except (Broken, MemoryError, RuntimeError) as error:  # RuntimeError: no memory for a tensor
            self._lost(self, str(error))

    def _send(self) -> int:
        kind, *numbers, body = self.get()
        self._link.send(kind, numbers, body)
        return kind

    def _receive(self, seen: Callable[[Frame], None]) -> int:
        kind, (job, number, tokens, *_), _ = self._link.receive()
        frame = Frame(kind, job, number, tokens, self._link.take(MOST_BODY))
        self.put(frame)
        seen(frame)
        return kind


class SendingPort(Port):
    """Port to the next stage, for the job with number `job`."""

    def __init__(self, channel: FrameChannel) -> None:
        self.channel, self.job = channel, 0

    def put(self, batch: int, hidden: Tensor) -> None:
        copied = torch.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)
        self.channel.put(Frame(HIDDEN, self.job, batch, hidden.shape[1], copied.view(-1).view(torch.uint8)))

    def take(self, batch: int, target: Tensor) -> None:
        raise NotImplementedError("a stage takes hidden states from the stage before it")


class TakingPort(Port):
    """Port from the stage before, for the job with number `job`. The gpu_batches of a sweep may come in another order
    than they are taken: the hidden states of one whose attention is delegated leave a stage later."""

    def __init__(self, channel: FrameChannel) -> None:
        self.channel, self.job, self._ended = channel, 0, 0
        self._held: dict[int, Frame] = {}  # by gpu_batch, of the present sweep

    def put(self, batch: int, hidden: Tensor) -> None:
        raise NotImplementedError("a stage puts hidden states to the stage after it")

    def take(self, batch: int, target: Tensor) -> None:
        """Copy the hidden states of a gpu_batch to `target`. Raise Ended if the job ends meanwhile."""
        while (frame := self._held.pop(batch, None)) is None or frame.job != self.job:
            other = self._next()
            if other.number in self._held and self._held[other.number].job == self.job:
                raise InvalidInput(
                    f"hidden states of gpu_batch {other.number} came twice, but those of gpu_batch"
                    f" {batch} are due; run the same version in all stages"
                )
            self._held[other.number] = other
        if (frame.tokens, len(frame.body)) != (target.shape[1], target.nbytes):
            raise InvalidInput(
                f"hidden states of gpu_batch {batch} came with {frame.tokens} tokens in"
                f" {len(frame.body)} bytes, but {target.shape[1]} tokens in {target.nbytes} bytes are"
                " due; run the same version in all stages"
            )
        target.copy_(frame.body.view(target.dtype).view(target.shape))

    def _next(self) -> Frame:
        while (frame := self.channel.get(lambda: self._ended >= self.job)).job != self.job:
            pass  # of a job that ended early
        return frame

    def end(self, job: int) -> None:
        """Let `take` raise Ended in this job and in earlier ones. May be called from any thread."""
        self._ended = job
        self.channel.wake()
