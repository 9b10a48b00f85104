"""Weights that leave the checkpoint once, in the first sweep: into memory, or to a further disk."""

from collections import deque
from dataclasses import dataclass, replace

from torch import Tensor

from flexengine.plan.layout import COPYING, PASSING, Layout
from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine
from flexengine.worker.mover import spread
from flexengine.worker.regions import Regions

BATCH = 128 << 20  # bytes that are read at once: an interrupted job ends when they have been read


@dataclass(frozen=True)
class Copy:
    """A region of a further disk, as the target of a copy from the checkpoint."""

    tier: Tier
    region: Region

    def part(self, start: int, nbytes: int) -> "Copy":
        """Return `nbytes` bytes of it, from byte `start`."""
        return Copy(self.tier, self.region.part(start, nbytes))


Pair = tuple[Region, Tensor | Copy]  # bytes of the checkpoint, and where they go


class Arrivals:
    """The reads of the checkpoint that are yet to be made, by unit (layer or head chunk) and batch.

    Attributes:
        settled: bytes read so far.
    """

    def __init__(self, machine: Machine, regions: Regions, layout: Layout) -> None:
        """Take the memory that weights pass through on their way to a GPU or to a further disk."""
        self.machine = machine
        self._passing = regions.take("host", layout.passing, PASSING) if layout.passing else None
        self._copying = regions.take("host", layout.copying, COPYING) if layout.copying else None
        self._batches: dict[int, deque[list[Pair]]] = {}
        self.settled = 0

    def expect(self, pairs: dict[int, list[Pair]]) -> None:
        """Plan the reads of each unit."""
        self._batches = {unit: deque(_batches(of_unit)) for unit, of_unit in pairs.items()}

    @property
    def units(self) -> list[int]:
        """Units with reads to be made, rising, each as often as it has to be settled."""
        return [unit for unit in sorted(self._batches) for _ in self._batches[unit]]

    @property
    def missing(self) -> float:
        """Share of all bytes that has not been read."""
        coming = sum(source.nbytes for unit in self._batches.values() for pairs in unit for source, _ in pairs)
        return coming / max(1, coming + self.settled)

    def settle(self, unit: int) -> None:
        """Make the reads of the unit's next batch. Raise BadCheckpoint if one fails."""
        batch = self._batches[unit][0]
        tensors = [(source, target) for source, target in batch if isinstance(target, Tensor)]
        self.machine.disk.load_all([(source, target) for source, target in tensors if not self._passes(target)])
        for source, target in batch:
            if isinstance(target, Copy):
                self._copy(source, target)
            elif self._passes(target):
                self._pass(source, target)
        self.machine.synchronize()
        self.settled += sum(source.nbytes for source, _ in self._batches[unit].popleft())

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
        """Return whether a tensor is in GPU memory, which a disk cannot read into."""
        return self._passing is not None and target.device.type == self.machine.compute.type

    def _pass(self, source: Region, target: Tensor) -> None:
        """Read a piece of the checkpoint into GPU memory by way of locked memory, a part of it at a time."""
        assert self._passing is not None
        machine, width = self.machine, source.dtype.itemsize
        step = self._passing.nbytes // width
        for at in range(0, len(target), step):
            part = source.part(at * width, min(step, len(target) - at) * width)
            passing = machine.host.view(replace(self._passing.part(0, part.nbytes), dtype=source.dtype))
            machine.disk.load(part, passing)
            target[at : at + step].copy_(passing, non_blocking=True)
            machine.synchronize()  # before it is written to again

    def close(self) -> None:
        """Drop all references to the memory."""
        self._batches.clear()
        self._passing = self._copying = None


def to_disk(pieces: list[Region], copy: Copy) -> list[Pair]:
    """Return each piece with the part of the copy that holds its bytes."""
    pairs, start = list[Pair](), 0
    for piece in pieces:
        pairs.append((piece, copy.part(start, piece.nbytes)))
        start += piece.nbytes
    return pairs


def to_memory(pieces: list[Region], target: Tensor) -> list[Pair]:
    """Return each piece with the part of the tensor that holds its elements."""
    return [*spread(pieces, target)]


def _batches(pairs: list[Pair]) -> list[list[Pair]]:
    """Return the same reads in the order of the files, in batches of at most BATCH bytes."""
    batches, room = list[list[Pair]](), 0
    for home, target in sorted(pairs, key=lambda pair: (id(pair[0].place), pair[0].start)):
        at, width = 0, home.dtype.itemsize
        while at < home.nbytes:
            if room < width:
                batches.append([])
                room = BATCH
            size = min(home.nbytes - at, room // width * width)
            if isinstance(target, Copy):
                batches[-1].append((home.part(at, size), target.part(at, size)))
            else:
                batches[-1].append((home.part(at, size), target[at // width : (at + size) // width]))
            at, room = at + size, room - size
    return batches
