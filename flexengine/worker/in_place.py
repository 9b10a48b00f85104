"""Weights that stay where the page cache has them: files of the checkpoint are mapped, and nothing is copied.

A first write to new RAM costs a page fault, which takes longer than all else about loading: 4 KiB pages of a virtual
machine were filled from the page cache at 2.2 GB/s, pages that had been written before at 17. Mapped files are read at
the memory's rate at once. Products read their weights as the checkpoint has them, not reordered (`Kernels.pack`), so
this is for jobs with few rows, whose products wait for memory.

Pages that the system drops are read again by page faults. Bytes that another process writes to a file are seen. If it
makes a mapped file shorter, or a page that was dropped cannot be read, the system ends this process, as with every
program that maps its files.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.model.checkpoint import ByteRange, Origin
from flexengine.model.skeleton import ParamRef, Skeleton
from flexengine.places import DEVICE
from flexengine.plan.layout import Layout
from flexengine.tier.file import File

if TYPE_CHECKING:
    from flexengine.kernels.experts import Apart

SMALL = 64 << 10  # bytes; smaller tensors are copied
STEP = 2 << 20  # bytes between two looks into the page cache; a page that is missing between them costs a page fault


class InPlace(NamedTuple):
    """A weight in a mapped file. tensor: of its shape; on the meta device with `apart`, its matrices by expert."""

    tensor: Tensor
    apart: "Apart | None" = None


def find_in_place(
    skeleton: Skeleton, layout: Layout, stored: Mapping[str, Origin], held: Mapping[str, torch.dtype]
) -> dict[str, InPlace]:
    """Return the weights on the device that can stay in the page cache, by name; none if some of their bytes are not
    there.

    Args:
        layout: tier of every weight.
        stored: where each weight is in the files.
        held: dtype on the device, by name; others than the stored one need a conversion.
    """
    params = {name: param for layer in (*skeleton.layers, skeleton.others) for name, param in layer.items()}
    found = dict[str, list[ByteRange]]()
    for name, tier in layout.homes.items():
        origin = stored[name]
        fits = tier == DEVICE and origin.dtype == held[name] and origin.nbytes >= SMALL
        fits = fits and origin.dtype.is_floating_point and not origin.pairs  # kernels may read past the end of codes
        if fits and (parts := _parts(origin, params.get(name))) is not None:
            found[name] = parts
    pieces = [part for parts in found.values() for part in parts]
    files = _mapped({part.path for part in pieces})
    if not files or any(part.start + part.nbytes > len(files[part.path]) for part in pieces):
        return {}  # reads of files that are too short raise an error that says so
    return {name: _placed(stored[name], parts, files) for name, parts in found.items()}


def _parts(origin: Origin, param: ParamRef | None) -> list[ByteRange] | None:
    """Return the byte ranges of a tensor's matrices, if it has one per expert, or of all of it; None if some are in
    several pieces, or elements do not begin at multiples of their size."""
    joined = list[ByteRange]()
    for run in origin.runs:
        if joined and (last := joined[-1]).path == run.path and last.start + last.nbytes == run.start:
            joined[-1] = ByteRange(last.path, last.start, last.nbytes + run.nbytes)
        else:
            joined.append(run)
    if any(run.start % origin.dtype.itemsize for run in joined):
        return None
    if len(joined) > 1:
        count = (param.matrix or (0,))[0] if param is not None else 0
        if not count or any(run.nbytes % (origin.nbytes // count) for run in joined):
            return None
        joined = list(_cut(joined, origin.nbytes // count))
    return joined


def _cut(runs: list[ByteRange], nbytes: int) -> Iterator[ByteRange]:
    for run in runs:
        for start in range(run.start, run.start + run.nbytes, nbytes):
            yield ByteRange(run.path, start, nbytes)


def _placed(origin: Origin, parts: list[ByteRange], files: Mapping[Path, mmap.mmap]) -> InPlace:
    shape = origin.shape if len(parts) == 1 else origin.shape[1:]
    width = origin.dtype.itemsize
    flat = [torch.frombuffer(files[p.path], dtype=origin.dtype, count=p.nbytes // width, offset=p.start) for p in parts]
    views = [x.view(shape) for x in flat]  # they keep the mapping alive
    if len(parts) == 1:
        return InPlace(views[0])
    from flexengine.kernels.experts import Apart  # models without experts do not need it

    return InPlace(torch.empty(origin.shape, dtype=origin.dtype, device="meta"), Apart(views))


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
