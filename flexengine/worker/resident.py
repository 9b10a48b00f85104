"""Weights that are read from the checkpoint once, in the first sweep: into memory, or to a further disk."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import NamedTuple

from torch import Tensor

from flexengine import kernels
from flexengine.activity import advance
from flexengine.model.skeleton import ParamRef
from flexengine.plan.layout import COPYING, PASSING, Layout
from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions, part_of, spread

TURNED = 4 << 20  # bytes; most memory outside the ledgers for a matrix that is transposed
BATCH_BYTES = 128 << 20  # read by one task; an interrupted job waits for its end


class ResidentRead(NamedTuple):
    """Bytes of the checkpoint that go to memory."""

    source: Region  # where they are in a file
    target: Tensor  # elements in RAM or in GPU memory


class DiskCopy(NamedTuple):
    """Bytes of one tensor that go to a further disk."""

    sources: Sequence[Region]  # where they are in files, in the tensor's order
    tier: Tier  # the further disk
    target: Region  # their region there. It starts at a whole block, and ends with one or with the tensor.


def bytes_of(items: Iterable[ResidentRead | DiskCopy]) -> int:
    """Return the bytes that are read."""
    return sum((item.target if isinstance(item, DiskCopy) else item.source).nbytes for item in items)


class ResidentReads:
    """Pending reads of the checkpoint, by unit (layer or head chunk) and batch."""

    def __init__(self, machine: Machine, regions: Regions, layout: Layout) -> None:
        """Take the memory that weights pass through on their way to a GPU or to a further disk."""
        self.machine = machine
        self._passing = regions.take("host", layout.passing, PASSING) if layout.passing else None
        self._copying = regions.take("host", layout.copying, COPYING) if layout.copying else None
        self._planned: dict[int, list[ResidentRead | DiskCopy]] = {}
        self._batches: dict[int, deque[list[ResidentRead | DiskCopy]]] = {}
        self.loaded_bytes = 0
        self.kept_bytes = 0  # of weights that are not read, as they stay in the page cache

    def into_memory(self, unit: int, sources: Sequence[Region], target: Tensor) -> None:
        """Plan to read a tensor of a unit into memory."""
        self._planned.setdefault(unit, []).extend(starmap(ResidentRead, spread(sources, target)))

    def onto_disk(self, unit: int, sources: Sequence[Region], tier: Tier, target: Region) -> None:
        """Plan to copy a tensor of a unit to a further disk."""
        assert self._copying is not None
        for start in range(0, target.nbytes, self._copying.nbytes):
            nbytes = min(self._copying.nbytes, target.nbytes - start)
            copy = DiskCopy(part_of(sources, start, nbytes), tier, target.part(start, nbytes))
            self._planned.setdefault(unit, []).append(copy)

    def divide(self) -> None:
        """Divide the planned reads of each unit into batches."""
        for unit, items in self._planned.items():
            self._batches[unit] = deque(batches_of(items))
        self._planned = {}  # the batches hold the tensors from here on

    @property
    def units(self) -> list[int]:
        """Units with pending reads, rising. A unit with n batches is there n times."""
        return [unit for unit in sorted(self._batches) for _ in self._batches[unit]]

    @property
    def pending_bytes(self) -> int:
        """Bytes that are not read yet. Must not be called while another thread reads them."""
        return sum(bytes_of(batch) for unit in self._batches.values() for batch in unit)

    @property
    def missing(self) -> float:
        """Fraction of all bytes that is not read yet."""
        return (pending := self.pending_bytes) / max(1, pending + self.loaded_bytes + self.kept_bytes)

    def load_resident(self, unit: int) -> None:
        """Make the reads of the unit's next batch. Raise BadCheckpoint if a file ends early."""
        batch = self._batches[unit][0]
        reads = [item for item in batch if isinstance(item, ResidentRead)]
        self.machine.disk.load_all([read for read in reads if not self._passes(read.target)])
        for item in batch:
            if isinstance(item, DiskCopy):
                self._copy(item)
            elif self._passes(item.target):
                self._pass(*item)
        self.machine.synchronize()
        self.loaded_bytes += (nbytes := bytes_of(self._batches[unit].popleft()))
        advance(nbytes)  # if this is the thread of an activity, not of a lane

    def _copy(self, copy: DiskCopy) -> None:
        assert self._copying is not None
        part = replace(self._copying.part(0, copy.target.nbytes), dtype=copy.target.dtype)
        buffer = self.machine.host.view(part)
        self.machine.disk.load_all(spread(copy.sources, buffer))
        copy.tier.store(buffer, copy.target)

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


def batches_of(items: Iterable[ResidentRead | DiskCopy]) -> list[list[ResidentRead | DiskCopy]]:
    """Return reads in the order of the files, in batches of at most BATCH_BYTES, then copies in batches of about as
    much: copies stay whole, as a disk writes whole blocks."""
    batches, room = list[list[ResidentRead | DiskCopy]](), 0
    reads = [item for item in items if isinstance(item, ResidentRead)]
    for source, target in sorted(reads, key=lambda read: (id(read.source.place), read.source.start)):
        start, width = 0, source.dtype.itemsize
        while start < source.nbytes:
            if room < width:
                batches.append([])
                room = BATCH_BYTES
            size = min(source.nbytes - start, room // width * width)
            batches[-1].append(ResidentRead(source.part(start, size), target[start // width : (start + size) // width]))
            start, room = start + size, room - size
    room = 0
    for copy in (item for item in items if isinstance(item, DiskCopy)):
        if room <= 0:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(copy)
        room -= copy.target.nbytes
    return batches


def pack_resident(param: ParamRef, weight: Tensor) -> None:
    """Reorder a weight that only products read, and note it in its module. Matrices of experts that are stored as
    [in, out] are transposed before, unless that takes more than TURNED bytes; kernels also read them as they are."""
    pack = kernels.load().pack
    if param.linear:
        param.module.packed = pack(weight)  # type: ignore[assignment]
        return
    count, rows, columns, across = param.matrix or (0, 0, 0, False)
    for matrix, own in zip(weight, weight.view(count, rows, columns), strict=True) if count else ():
        if across and matrix.nbytes > TURNED:
            return
        if across:
            matrix = matrix.t().contiguous()
        if not pack(matrix):
            return
        if across:
            own.copy_(matrix)
    if count:
        param.module.__dict__.setdefault("packed", set()).add(param.name)


def note_plain(param: ParamRef) -> None:
    """Note in the module that a weight is not reordered."""
    if param.linear:
        param.module.packed = False  # type: ignore[assignment]
    elif param.matrix is not None:
        for name in ("packed", "apart"):
            param.module.__dict__.pop(name, None)
