"""The reads of a load from disk: neighbouring regions share one, long ones are made in chunks by several threads."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from flexengine.tier.base import ALIGN, Region, aligned
from flexengine.tier.file import File

STRADDLING = 512 << 10  # bytes; reads of a region whose elements may straddle chunks
T = TypeVar("T")


@dataclass
class DiskRead:
    """One read of neighbouring regions of a file.

    Attributes:
        file: to read from.
        start: first byte in the file.
        end: byte after the last one.
        parts: (region, flat target) pairs, in file order.
    """

    file: File
    start: int
    end: int
    parts: list[tuple[Region, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def chunks(self, size: int) -> "Iterator[Chunk]":
        """Yield the read in chunks. They start at multiples of `size` in the file, but for the first, so that large
        folios of the page cache are dropped whole."""
        low = self.start // ALIGN * ALIGN
        while low < self.end:
            high = min(low // size * size + size, aligned(self.end))
            yield self, low, high
            low = high

    def between(self, low: int, high: int) -> Iterator[tuple[Region, torch.Tensor, int, int]]:
        """Yield each part with bytes in low .. high of the file, and the first of these bytes and the end."""
        for region, flat in self.parts:
            begin, end = max(region.start, low), min(region.start + region.nbytes, high)
            if begin < end:
                yield region, flat, begin, end

    def converted(self, low: int, high: int) -> int:
        """Return how many of the bytes low .. high of the file have another dtype than their targets."""
        parts = self.between(low, high)
        return sum(end - begin for region, flat, begin, end in parts if flat.dtype != region.dtype)


Chunk = tuple[DiskRead, int, int]  # a read, and the first byte and the end of a part of it, in the file


class Shared(Generic[T]):
    """Items that several threads take one by one, each once."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items, self._lock, self._ended = iter(items), threading.Lock(), False

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                if self._ended:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item

    def end(self) -> None:
        """Let no thread take another item."""
        self._ended = True


def disk_reads(pairs: Sequence[tuple[Region, torch.Tensor]]) -> list[DiskRead]:
    """Return one read per group of neighbouring regions.

    A region whose start is no multiple of its itemsize is read alone, in short pieces: its elements straddle chunks.
    """
    reads: list[DiskRead] = []
    for region, flat in sorted(pairs, key=lambda pair: (id(pair[0].place), pair[0].start)):
        end, last = region.start + region.nbytes, reads[-1] if reads else None
        if _straddles(region):
            for offset in range(0, region.nbytes, STRADDLING):
                part = region.part(offset, min(STRADDLING, region.nbytes - offset))
                width = region.dtype.itemsize
                target = flat[offset // width : (offset + part.nbytes) // width]
                reads.append(DiskRead(region.place, part.start, part.start + part.nbytes, [(part, target)]))
        elif last and (last.file, last.end) == (region.place, region.start) and not _straddles(last.parts[-1][0]):
            last.end = end
            last.parts.append((region, flat))
        else:
            reads.append(DiskRead(region.place, region.start, end, [(region, flat)]))
    return reads


def _straddles(region: Region) -> bool:
    """Return whether elements of a region may straddle chunks, which start at multiples of every itemsize."""
    return region.start % region.dtype.itemsize != 0
