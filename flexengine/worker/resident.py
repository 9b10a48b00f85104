"""Weights that are read from the checkpoint once, in the first sweep: into memory, or to a further disk."""

from collections import deque
from dataclasses import dataclass, replace

from torch import Tensor

from flexengine.plan.layout import COPYING, PASSING, Layout
from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine
from flexengine.worker.mover import spread
from flexengine.worker.regions import Regions

BATCH_BYTES = 128 << 20  # read by one task; an interrupted job waits for its end


@dataclass(frozen=True)
class Copy:
    """A region of a further disk to which weights are copied."""

    tier: Tier
    region: Region

    def part(self, start: int, nbytes: int) -> "Copy":
        """Return the part of `nbytes` bytes from byte `start` on."""
        return Copy(self.tier, self.region.part(start, nbytes))


Pair = tuple[Region, Tensor | Copy]  # bytes of the checkpoint, and their target


class Arrivals:
    """Pending reads of the checkpoint, by unit (layer or head chunk) and batch.

    Attributes:
        loaded_bytes: bytes read so far.
    """

    def __init__(self, machine: Machine, regions: Regions, layout: Layout) -> None:
        """Take the memory that weights pass through on their way to a GPU or to a further disk."""
        self.machine = machine
        self._passing = regions.take("host", layout.passing, PASSING) if layout.passing else None
        self._copying = regions.take("host", layout.copying, COPYING) if layout.copying else None
        self._batches: dict[int, deque[list[Pair]]] = {}
        self.loaded_bytes = 0

    def expect(self, pairs: dict[int, list[Pair]]) -> None:
        """Divide the reads of each unit into batches."""
        self._batches = {unit: deque(_batches(of_unit)) for unit, of_unit in pairs.items()}

    @property
    def units(self) -> list[int]:
        """Units with pending reads, rising. A unit with n batches is there n times."""
        return [unit for unit in sorted(self._batches) for _ in self._batches[unit]]

    @property
    def missing(self) -> float:
        """Fraction of all bytes that is not read yet."""
        pending = sum(source.nbytes for unit in self._batches.values() for pairs in unit for source, _ in pairs)
        return pending / max(1, pending + self.loaded_bytes)

    def load_resident(self, unit: int) -> None:
        """Read the unit's next batch. Raise BadCheckpoint if a read fails."""
        batch = self._batches[unit][0]
        tensors = [(source, target) for source, target in batch if isinstance(target, Tensor)]
        self.machine.disk.load_all([(source, target) for source, target in tensors if not self._passes(target)])
        for source, target in batch:
            if isinstance(target, Copy):
                self._copy(source, target)
            elif self._passes(target):
                self._pass(source, target)
        self.machine.synchronize()
        self.loaded_bytes += sum(source.nbytes for source, _ in self._batches[unit].popleft())

    def _copy(self, source: Region, target: Copy) -> None:
        """Copy a piece of the checkpoint to a further disk, a part of it at a time."""
        assert self._copying is not None
        step = self._copying.nbytes
        for at in range(0, source.nbytes, step):
            nbytes = min(step, source.nbytes - at)
            passing = self.machine.host.view(replace(self._copying.part(0, nbytes), dtype=source.dtype))
            self.machine.disk.load(source.part(at, nbytes), passing)
            target.tier.store(passing, target.region.part(at, nbytes))

    def _passes(self, target: Tensor) -> bool:
        """Return whether a tensor is in GPU memory, which a read from disk reaches only through host memory."""
        return self._passing is not None and target.device.type == self.machine.compute.type

    def _pass(self, source: Region, target: Tensor) -> None:
        """Read a piece of the checkpoint into GPU memory, part by part, through pinned host memory."""
        assert self._passing is not None
        machine, width = self.machine, source.dtype.itemsize
        step = self._passing.nbytes // width
        for first in range(0, len(target), step):
            part = source.part(first * width, min(step, len(target) - first) * width)
            passing = machine.host.view(replace(self._passing.part(0, part.nbytes), dtype=source.dtype))
            machine.disk.load(part, passing)
            target[first : first + step].copy_(passing, non_blocking=True)
            machine.synchronize()  # the next read overwrites `passing`

    def close(self) -> None:
        """Drop all references to the memory."""
        self._batches.clear()
        self._passing = self._copying = None


def to_disk(pieces: list[Region], copy: Copy) -> list[Pair]:
    """Return each piece with its part of the copy."""
    pairs, start = list[Pair](), 0
    for piece in pieces:
        pairs.append((piece, copy.part(start, piece.nbytes)))
        start += piece.nbytes
    return pairs


def to_memory(pieces: list[Region], target: Tensor) -> list[Pair]:
    """Return each piece with its part of the tensor."""
    return [*spread(pieces, target)]


def _batches(pairs: list[Pair]) -> list[list[Pair]]:
    """Return the same reads in the order of the files, in batches of at most BATCH_BYTES bytes."""
    batches, room = list[list[Pair]](), 0
    for source, target in sorted(pairs, key=lambda pair: (id(pair[0].place), pair[0].start)):
        offset, width = 0, source.dtype.itemsize
        while offset < source.nbytes:
            if room < width:
                batches.append([])
                room = BATCH_BYTES
            size = min(source.nbytes - offset, room // width * width)
            if isinstance(target, Copy):
                batches[-1].append((source.part(offset, size), target.part(offset, size)))
            else:
                batches[-1].append((source.part(offset, size), target[offset // width : (offset + size) // width]))
            offset, room = offset + size, room - size
    return batches
