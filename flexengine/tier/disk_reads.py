"""The reads of a load from disk: neighbouring regions share one, long ones are made in chunks by several threads."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import torch

from flexengine.tier.base import ALIGN, Region, aligned
from flexengine.tier.file import File, memory
from flexengine.tier.memory import in_huge_pages

CHUNK = 4 << 20  # bytes of a buffer for long reads, and of a read through the page cache
LONG = 16 * CHUNK  # bytes; longest direct read, almost all of it straight into the targets
WORTHWHILE = 64 << 10  # bytes; shorter spans are read into a buffer, even if they could be read straight
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

    def chunk(self, low: int, size: int, direct: bool) -> "Chunk":
        """Return the part of the read from byte `low` of the file to the next multiple of `size`."""
        high = min(low // size * size + size, aligned(self.end))
        if not direct:
            low, high = max(low, self.start), min(high, self.end)
        return Chunk(self, low, high, direct, list(self._straight(low, high, direct)))

    def between(self, low: int, high: int) -> Iterator[tuple[Region, torch.Tensor, int, int]]:
        """Yield each part with bytes in low .. high of the file, and the first of these bytes and the end."""
        for region, flat in self.parts:
            begin, end = max(region.start, low), min(region.start + region.nbytes, high)
            if begin < end:
                yield region, flat, begin, end

    def _straight(self, low: int, high: int, direct: bool) -> "Iterator[Span]":
        """Yield what can be read straight into the targets: bytes that need no conversion, and for direct I/O whole
        blocks that begin in memory where blocks of the disk do."""
        for region, flat, begin, end in self.between(low, high):
            if flat.dtype != region.dtype:
                continue
            target = flat.view(torch.uint8)
            if direct:
                begin, end = aligned(begin), end // ALIGN * ALIGN
                in_step = (target.data_ptr() + begin - region.start) % ALIGN == 0
                if end - begin < WORTHWHILE or not in_step or not in_huge_pages(target):
                    continue
            yield begin, end, target[begin - region.start : end - region.start]


Span = tuple[int, int, torch.Tensor]  # first byte and end in the file, and uint8 memory for these bytes


@dataclass
class Chunk:
    """A part of a read that one system call reads.

    Attributes:
        low: first byte in the file.
        high: end in the file.
        direct: whether direct I/O reads it; `low` and `high` are then multiples of ALIGN, and `high` may lie after the
            end of the file.
        straight: spans that are read straight into the targets, in file order.
    """

    read: DiskRead
    low: int
    high: int
    direct: bool
    straight: list[Span]

    @property
    def others(self) -> list[tuple[int, int]]:
        """First byte and end of each span that is read into a buffer, and from there copied to the targets."""
        bounds = [self.low, *chain.from_iterable(span[:2] for span in self.straight), self.high]
        return [(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]

    @property
    def buffered(self) -> int:
        """Bytes that need a buffer."""
        return sum(end - begin for begin, end in self.others)

    def targets(self, buffer: torch.Tensor | None) -> list[memoryview]:
        """Return the memory for all bytes, in file order. The buffer (uint8) receives `others` one after the other."""
        spans, start = [(begin, target) for begin, _, target in self.straight], 0
        if buffer is not None:
            for begin, end in self.others:
                spans.append((begin, buffer[start : start + end - begin]))
                start += end - begin
        return [memory(target) for _, target in sorted(spans, key=lambda span: span[0])]


def chunks(reads: Iterable[DiskRead], direct: Callable[[File], bool]) -> Iterator[Chunk]:
    """Yield long reads in chunks, in file order. They end at multiples of their size in the file, so that large folios
    of the page cache are dropped whole.

    Args:
        reads: see `disk_reads`.
        direct: returns whether a file is read by direct I/O now. This is asked for each chunk.
    """
    for read in reads:
        low = read.start // ALIGN * ALIGN
        while low < read.end:
            way = direct(read.file)
            chunk = read.chunk(low, LONG if way else CHUNK, way)
            if chunk.buffered > CHUNK:
                chunk = read.chunk(low, CHUNK, way)
            yield chunk
            low = chunk.high


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
