"""Weights that stay where the page cache has them: files of the checkpoint are mapped, and nothing is copied.

A first write to new RAM costs a page fault, which takes longer than all else about loading: 4 KiB pages of a virtual
machine were filled from the page cache at 2.2 GB/s, pages that had been written before at 17. Mapped files are read at
the memory's rate at once. Products read their weights as the checkpoint has them, not reordered (`Kernels.pack`), so
this is for jobs with few rows, whose products wait for memory. What cannot stay is read before the first sweep.

Pages that the system drops are read again by page faults. Bytes that another process writes to a file are seen. If it
makes a mapped file shorter, or a page that was dropped cannot be read, the system ends this process, as with every
program that maps its files.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.model.checkpoint import ByteRange, Origin
from flexengine.model.skeleton import ParamRef, Skeleton
from flexengine.places import DEVICE
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.tier.file import File

if TYPE_CHECKING:
    from flexengine.kernels.experts import Apart

FEW_ROWS = 4  # most rows of a product in decode
SMALL = 64 << 10  # bytes; smaller tensors are copied
MOST_COPIED = 8  # at most 1 of so many matrices of a tensor is copied, as it is in several pieces
LEAST = 0.75  # share of the device's weights that must stay
STEP = 2 << 20  # bytes between two looks into the page cache; a page that is missing between them costs a page fault


class InPlace(NamedTuple):
    """A weight in a mapped file. tensor: of its shape; on the meta device with `apart`, its matrices by expert."""

    tensor: Tensor
    apart: "Apart | None" = None


def decode_sweeps(facts: ModelFacts, block: int, tokens: int) -> float:
    """Return how often a job reads all weights in decode; infinite if its products have many rows. Those of few rows
    wait for memory, so few sweeps lose less time by weights that are not reordered than copies take.

    Args:
        block: sequences of a block.
        tokens: that the job generates.
    """
    shares = [facts.active / t.experts for t in facts.experts]  # of tokens that an expert computes
    rows, read = block * min([1.0, *shares]), min([1.0, *(1 - (1 - share) ** block for share in shares)])
    return tokens / block * read if rows <= FEW_ROWS else math.inf


def find_in_place(
    skeleton: Skeleton, layout: Layout, stored: Mapping[str, Origin], held: Mapping[str, torch.dtype]
) -> dict[str, Callable[[], InPlace]]:
    """Return the weights on the device that can stay in the page cache, by name, as functions that map them; none if
    some of their bytes are not there, or most of the device's are in other weights.

    Args:
        layout: tier of every weight.
        stored: where each weight is in the files.
        held: dtype on the device, by name; others than the stored one need a conversion.
    """
    params = {name: param for layer in (*skeleton.layers, skeleton.others) for name, param in layer.items()}
    found = dict[str, list[list[ByteRange]]]()
    for name, tier in layout.homes.items():
        origin = stored[name]
        fits = tier == DEVICE and origin.dtype == held[name] and origin.nbytes >= SMALL
        fits = fits and origin.dtype.is_floating_point and not origin.pairs  # kernels may read past the end of codes
        if fits and (parts := _parts(origin, params.get(name))) is not None:
            found[name] = parts
    nbytes = sum(stored[name].nbytes for name, tier in layout.homes.items() if tier == DEVICE)
    if sum(stored[name].nbytes for name in found) < LEAST * nbytes:
        return {}  # others are read by one thread, before the first sweep
    pieces = [piece for parts in found.values() for part in parts for piece in part]
    files = _mapped({piece.path for piece in pieces})
    if not files or any(piece.start + piece.nbytes > len(files[piece.path]) for piece in pieces):
        return {}  # reads of files that are too short raise an error that says so
    return {name: partial(_placed, stored[name], parts, files) for name, parts in found.items()}


def _parts(origin: Origin, param: ParamRef | None) -> list[list[ByteRange]] | None:
    """Return the byte ranges of each of a tensor's matrices, if it has one per expert, or of all of it; None if many
    are in several pieces, unless all are cut at the same row, or elements do not begin at multiples of their size."""
    joined = list[ByteRange]()
    for run in origin.runs:
        if joined and (last := joined[-1]).path == run.path and last.start + last.nbytes == run.start:
            joined[-1] = ByteRange(last.path, last.start, last.nbytes + run.nbytes)
        else:
            joined.append(run)
    if any(run.start % origin.dtype.itemsize for run in joined):
        return None
    if len(joined) == 1:
        return [joined]
    count, _, columns, across = (param.matrix if param is not None else None) or (0, 0, 0, False)
    parts = list(_cut(joined, origin.nbytes // count)) if count else []
    cut = sum(len(part) > 1 for part in parts)
    alike = cut == count and not across and len({tuple(piece.nbytes for piece in part) for part in parts}) == 1
    alike = alike and not any(piece.nbytes % (columns * origin.dtype.itemsize) for piece in parts[0])
    return parts if parts and (alike or cut * MOST_COPIED <= count) else None


def _cut(runs: list[ByteRange], nbytes: int) -> Iterator[list[ByteRange]]:
    """Yield the byte ranges of each matrix of `nbytes`."""
    part, room = list[ByteRange](), nbytes
    for path, start, left in runs:
        while left:
            part.append(ByteRange(path, start, size := min(left, room)))
            start, left, room = start + size, left - size, room - size
            if not room:
                yield part
                part, room = [], nbytes


def _placed(origin: Origin, parts: list[list[ByteRange]], files: Mapping[Path, mmap.mmap]) -> InPlace:
    whole, dtype = len(parts) == 1 and len(parts[0]) == 1, origin.dtype
    shape = origin.shape if whole else origin.shape[1:]

    def flat(piece: ByteRange) -> Tensor:
        count = piece.nbytes // dtype.itemsize
        return torch.frombuffer(files[piece.path], dtype=dtype, count=count, offset=piece.start)

    if whole:
        return InPlace(flat(*parts[0]).view(shape))  # the view keeps the mapping alive
    from flexengine.kernels.experts import Apart  # models without experts do not need it

    if all(len(part) > 1 for part in parts):  # all matrices are cut at the same row, as gates are in another file
        pieces = [[flat(piece).view(-1, shape[-1]) for piece in same] for same in zip(*parts, strict=True)]
    else:  # a matrix in several pieces, as at the end of a file, is copied
        pieces = [[(flat(*part) if len(part) == 1 else torch.cat([*map(flat, part)])).view(shape) for part in parts]]
    return InPlace(torch.empty(origin.shape, dtype=dtype, device="meta"), Apart(*pieces))


def _mapped(paths: set[Path]) -> dict[Path, mmap.mmap]:
    """Return mappings of files; none if the page cache lacks some of their bytes, or the system does not map them."""
    try:
        return {path: _map(path) for path in sorted(paths)} if all(map(_cached, paths)) else {}
    except OSError:
        return {}


def _cached(path: Path) -> bool:
    """Return whether the page cache has a byte of all parts of a file."""
    file = File(path, os.O_RDONLY)
    try:
        size = os.fstat(file.cached).st_size
        byte = [memoryview(bytearray(1))]
        return all(file.read_cached(byte, offset, 1) for offset in (*range(0, size, STEP), size - 1))
    finally:
        file.close()


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)  # a write would change this process's copy only
    finally:
        os.close(fd)
