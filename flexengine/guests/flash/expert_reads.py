"""Reads of experts, in a thread: first those that a layer needs now, then those that a guess named.

An early read is done in pieces. Between two pieces it can be stopped, and needed reads go first, so a wrong guess costs
at most one piece. An early read that proves right goes on, and takes its place among the needed ones.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexengine.tier.base import Region
from flexengine.worker.on_demand import DemandReads

PIECE = 16 << 20  # bytes; experts of 352 MB were read at 2.20 GB/s in such pieces, at 2.22 whole, at 1.99 in 8 MiB

Pair = tuple[Region, Tensor]  # source and target of a read


@dataclass(eq=False)
class ExpertRead:
    """One expert that is read."""

    left: deque[list[Pair]]  # pieces that have not begun
    early: bool = False  # whether it was guessed
    # Where it is read to, for the caller: uint8, RAM on the way to a GPU, or a row of the memory.
    buffer: Tensor | int = 0
    # Set when all is read, or a piece failed; never if the read was stopped.
    done: Future[None] = field(default_factory=Future)
    nbytes: int = 0  # bytes of the pieces that have begun

    def take(self, whole: bool) -> list[Pair]:
        """Return the next piece, or all that is left."""
        pairs = list[Pair]()
        while self.left and (whole or not pairs):
            pairs += self.left.popleft()
        self.nbytes += sum(region.nbytes for region, _ in pairs)
        return pairs


class ExpertReads:
    """Reads in one thread.

    Args:
        disk: reads the checkpoint.
        stages: RAM through which experts are read to a GPU; None if they are read straight into the memory.
    """

    def __init__(self, disk: DemandReads, stages: list[Tensor] | None) -> None:
        self.disk, self.stages = disk, stages
        self._needed, self._early, self._lock = deque[ExpertRead](), deque[ExpertRead](), threading.Lock()
        self._thread = ThreadPoolExecutor(1, "flexengine-experts", lambda: torch.set_grad_enabled(False))

    def begin(self, pairs: Iterable[Pair], early: bool = False, buffer: Tensor | int = 0) -> ExpertRead:
        """Begin to read one expert. early, buffer: as in ExpertRead."""
        read = ExpertRead(deque(pieces(pairs)), early, buffer)
        count = len(read.left)
        with self._lock:
            (self._early if early else self._needed).append(read)
        for _ in range(count):  # each reads a piece or more of any read, so there are never too few
            self._thread.submit(self._step)
        return read

    def need(self, read: ExpertRead) -> int:
        """Have an early read go on before other early ones. Return the bytes of it that have begun."""
        with self._lock:
            if read in self._early:
                self._early.remove(read)
                self._needed.append(read)
            return read.nbytes

    def stop(self, read: ExpertRead) -> int:
        """Drop what has not begun of an early read, and an error of it. Return the bytes that have begun.

        A piece may still be read. Its target can be given to another read at once, as that begins after the piece.
        """
        with self._lock:
            if read in self._early:
                self._early.remove(read)
            return read.nbytes

    def _step(self) -> None:
        """Read all that is left of the first needed read, or one piece of the first early one."""
        with self._lock:
            queue = self._needed or self._early
            if not queue:
                return
            read = queue[0]
            pairs = read.take(whole=queue is self._needed)
        error = None
        try:
            self.disk.load_all(pairs)
        except BaseException as failure:
            error = failure
        with self._lock:
            for queue in (self._needed, self._early):  # in none if it was stopped
                if read in queue and (error is not None or not read.left):
                    queue.remove(read)
                    if error is None:
                        read.done.set_result(None)
                    else:
                        read.done.set_exception(error)

    def close(self) -> None:
        """Wait for the piece that is read, and drop all others."""
        self._thread.shutdown(cancel_futures=True)


def pieces(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield pairs of at most PIECE bytes together. Longer ones are cut."""
    run, size = list[Pair](), 0
    for region, target in pairs:
        flat, width = target.view(-1), region.dtype.itemsize
        for start in range(0, region.nbytes, PIECE):
            part = region.part(start, min(PIECE, region.nbytes - start))
            if size + part.nbytes > PIECE:
                yield run
                run, size = [], 0
            run.append((part, flat[start // width : (start + part.nbytes) // width]))
            size += part.nbytes
    if run:
        yield run
