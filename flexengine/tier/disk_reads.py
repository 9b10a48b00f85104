"""The reads of a load from disk: neighbouring regions share one, long ones are made in chunks by several threads."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexengine.tier.base import ALIGN, Region, aligned
from flexengine.tier.file import File, memory
from flexengine.tier.memory import in_huge_pages

CHUNK = 4 << 20  # bytes of a buffer for long reads, and of a read through the page cache
LONG = 16 * CHUNK  # bytes; longest direct read, almost all of it straight into the targets
WORTHWHILE = 64 << 10  # bytes; direct reads put shorter pieces into a buffer, even if they could go straight
STRADDLING = 512 << 10  # bytes; reads of a region whose elements may straddle chunks


@dataclass
class DiskRead:
    """One read of neighbouring regions of a file."""

    file: File  # to read from
    start: int  # first byte in the file
    end: int  # byte after the last one
    parts: list[tuple[Region, torch.Tensor]]  # (region, flat target) pairs, in file order

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def chunk(self, low: int, size: int, direct: bool) -> "Chunk":
        """Return the part of the read from byte `low` of the file to the next multiple of `size`."""
        high = min(low // size * size + size, aligned(self.end))
        if not direct:
            low, high = max(low, self.start), min(high, self.end)
        pieces, at = list[ReadPiece](), low
        for piece in self._straight(low, high, direct):
            pieces += [ReadPiece(at, piece.begin, None), piece]
            at = piece.end
        pieces.append(ReadPiece(at, high, None))
        return Chunk(self, low, high, direct, [piece for piece in pieces if piece.begin < piece.end])

    def between(self, low: int, high: int) -> Iterator[tuple[Region, torch.Tensor, int, int]]:
        """Yield each part with bytes in low .. high of the file, and the first of these bytes and the end."""
        for region, flat in self.parts:
            begin, end = max(region.start, low), min(region.start + region.nbytes, high)
            if begin < end:
                yield region, flat, begin, end

    def _straight(self, low: int, high: int, direct: bool) -> "Iterator[ReadPiece]":
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
            yield ReadPiece(begin, end, target[begin - region.start : end - region.start])


class ReadPiece(NamedTuple):
    """Bytes begin .. end of a file. target: uint8 memory that receives them; None for a part of a buffer, from which
    they are copied to their targets."""

    begin: int
    end: int
    target: torch.Tensor | None


@dataclass
class Chunk:
    """A part of a read that is read at once."""

    read: DiskRead
    low: int  # first byte in the file
    high: int  # end in the file
    # whether direct I/O reads it; `low` and `high` are then multiples of ALIGN, and `high` may lie after the end
    # of the file
    direct: bool
    pieces: list[ReadPiece]  # its bytes, in order

    @property
    def buffered(self) -> int:
        """Bytes that need a buffer."""
        return sum(end - begin for begin, end, target in self.pieces if target is None)

    def in_buffer(self, buffer: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield first byte and end of each piece that needs the buffer (uint8), and its part of the buffer."""
        start = 0
        for begin, end, target in self.pieces:
            if target is None:
                yield begin, end, buffer[start : start + end - begin]
                start += end - begin

    def targets(self, buffer: torch.Tensor | None) -> list[memoryview]:
        """Return the memory for all bytes, in order. buffer: uint8, of at least `buffered` bytes; None if these are
        0."""
        parts = (part for *_, part in self.in_buffer(buffer)) if buffer is not None else iter(())
        return [memory(next(parts) if piece.target is None else piece.target) for piece in self.pieces]


def chunks(reads: Sequence[DiskRead], direct: Callable[[File], bool], readers: int) -> Generator[Chunk, None, None]:
    """Yield long reads in chunks, in order, shared by a number of readers. Cached ones end at multiples of CHUNK in the
    file, so that large folios of the page cache are dropped whole. direct: returns whether a file is read by direct I/O
    now; called for each chunk."""
    long = min(LONG, CHUNK * -(-sum(read.nbytes for read in reads) // (readers * CHUNK)))
    for read in reads:
        low = read.start // ALIGN * ALIGN
        while low < read.end:
            way = direct(read.file)
            chunk = read.chunk(low, long if way else CHUNK, way)
            if chunk.buffered > CHUNK:
                chunk = read.chunk(low, CHUNK, way)
            yield chunk
            low = chunk.high


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
