"""Ports between stages in different processes: hidden states leave as frames and enter from frames.

`Frame.number` is the number of the gpu_batch. Frames of a job that ended early may arrive later; they are dropped.
"""

import torch
from torch import Tensor

from flexengine.errors import InvalidInput
from flexengine.guests.stages.frames import FIRST_KIND, Frame, FrameChannel
from flexengine.worker.stage_ports import Port

HIDDEN = FIRST_KIND  # kind of all these frames


class SendingPort(Port):
    """Port to the next stage.

    Attributes:
        job: number of the present job.
    """

    def __init__(self, channel: FrameChannel) -> None:
        self.channel, self.job = channel, 0

    def put(self, batch: int, hidden: Tensor) -> None:
        copied = torch.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)
        self.channel.put(Frame(HIDDEN, self.job, batch, hidden.shape[1], copied.view(-1).view(torch.uint8)))

    def take(self, batch: int, target: Tensor) -> None:
        raise NotImplementedError("a stage takes hidden states from the stage before it")


class TakingPort(Port):
    """Port from the stage before. The gpu_batches of a sweep may come in another order than they are taken: the hidden
    states of one whose attention is delegated leave a stage later.

    Attributes:
        job: number of the present job.
    """

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
