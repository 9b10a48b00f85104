"""Measurement of each link's rate through the tiers, so that throttling and staging are included."""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexengine.activity import tick
from flexengine.errors import InvalidInput
from flexengine.kernels import load as load_kernels
from flexengine.measure.timing import Borrowed, beside, fill, room, timed, unnoticed
from flexengine.places import DISK, disks_of, place_of
from flexengine.plan.hardware import Table
from flexengine.plan.rates import assumed
from flexengine.system.limits import usable_memory
from flexengine.tier.base import ALIGN, Region
from flexengine.tier.machine import Machine
from flexengine.tier.memory import HUGE, aligned_buffer

KIB, MIB = 1 << 10, 1 << 20
COPIES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)  # bytes of a transfer
SPILLS = (64 * KIB, 256 * KIB, MIB, 8 * MIB)
READS = (32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB)
COPIED = 128 * MIB  # bytes of each memory, more than the caches hold
SPILLED = 256 * MIB  # maximum bytes in the offload directory
MIN_CHECKPOINT_BYTES = 256 * MIB  # bytes; a smaller checkpoint is not representative, so a file is written instead
WRITTEN = 128 * MIB  # bytes of this file
TOUCHED, PAGE = 1536 * MIB, 4096  # bytes of fresh memory for page faults; bytes of a page
WIDTH = 512  # rows and columns of products that keep the CPU busy
QUICK_READS, QUICK_SECONDS = (256 * KIB, 4 * MIB), 0.12  # of `quick_reads`
QUICK_SPILLED, QUICK_SPILL_SECONDS = 32 * MIB, 0.04  # of `quick_spills`
COPY_SECONDS, SPILL_SECONDS, READ_SECONDS = 0.1, 0.4, 0.8  # for each size
TURNS = 4  # turns of all sizes
FEWEST = 3  # turns whose median one halt of a disk does not decide
PATIENCE = 1.0  # seconds; a size whose single transfer would take longer is left out
WHAT = "measuring"
DTYPE = torch.bfloat16  # of all transfers, which do not convert


def measure_links(machine: Machine, checkpoint: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the fields of `Hardware` about this machine's links and page faults.

    Takes about ten seconds. The ledgers are unchanged afterwards.

    Args:
        machine: the machine to measure.
        checkpoint: the model's safetensors files; empty if there are none.

    Raises:
        OutOfMemory: fewer than a few pages of memory are free.
        InvalidInput: the offload directory cannot be written.
    """
    load_kernels()  # else building them would count as a slow transfer
    with unnoticed(machine):
        faults = _touch(room(machine, "device", "host"))
        links = copies(machine)
        for place in disks_of(machine.tiers):
            if _usable(machine, place):
                links |= _spills(machine, place, SPILLS, SPILLED, SPILL_SECONDS)
            else:  # no plan uses these rates
                links |= {lane: assumed(machine.kind, machine.capacity).links[lane] for lane in DISK.lanes}
        with readable(machine, checkpoint) as files:
            reads = _checkpoint_read(machine, files, READS, READ_SECONDS)
        return dict(links=links, checkpoint_read=reads, **faults)


def _usable(machine: Machine, disk: str) -> bool:
    """Return whether a disk's offload directory can be used."""
    return not (disk == DISK and machine.no_offload)


def _sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes of at most `most` bytes, or one size near `most` if none is so small."""
    return [size for size in sizes if size <= most] or [max(ALIGN, most // ALIGN * ALIGN)]


def _table(
    sizes: Iterable[int], budget: float, call: Callable[[int, int], object], machine: Machine, few: bool = False
) -> Table:
    """Return (size, bytes per second) for each size of a transfer, ascending. Sizes take turns, and a rate is a mean
    over all turns, as the rate of a disk changes with time.

    budget: seconds for each size.
    call: call(size, number) makes transfer `number`.
    few: turns are too short for a mean, which one halt of a disk would decide; a rate is the median of its turns.
    """
    chosen, turns = list(sizes), defaultdict[int, list[tuple[float, int]]](list)  # seconds and transfers by size
    each = 0.0  # seconds per byte at the previous size
    for size in list(chosen):
        if size * each > PATIENCE:
            chosen = chosen[: chosen.index(size)]
            break
        seconds, count = timed(partial(call, size), budget / TURNS, machine)
        each = seconds / count / size
        if seconds > budget:  # a slow transfer needs no warm-up
            turns[size].append((seconds, count))
    for size in chosen * TURNS:
        spent, first = sum(seconds for seconds, _ in turns[size]), sum(count for _, count in turns[size])
        if spent < budget or (few and len(turns[size]) < FEWEST and spent < PATIENCE):
            turns[size].append(timed(partial(call, size), budget / TURNS, machine, first))
    rate = _median if few else _mean
    return tuple((float(size), size * rate(turns[size])) for size in chosen)


def _mean(turns: Sequence[tuple[float, int]]) -> float:
    """Return transfers per second of (seconds, transfers)."""
    return sum(count for _, count in turns) / sum(seconds for seconds, _ in turns)


def _median(turns: Sequence[tuple[float, int]]) -> float:
    """Return the median over turns of transfers per second."""
    return statistics.median(count / seconds for seconds, count in turns)


def _touch(most: int) -> dict[str, float]:
    """Return the fields of `Hardware` about first writes to RAM, in a fresh mapping of at most `most` bytes.

    The mapping's first two fifths are left out: they use RAM that was freed lately, which the host of a virtual machine
    need not provide anew. Then the mapping is freed, so that another one of this size uses such RAM only.
    """
    size = max(HUGE, min(TOUCHED, most, usable_memory() // 8))
    fresh = aligned_buffer(size)
    fresh[: 2 * size // 5 : PAGE] = 1
    touch, busy = _faults(fresh[2 * size // 5 : 4 * size // 5]), _faults_beside(fresh[4 * size // 5 :])
    del fresh
    fresh = aligned_buffer(size)
    freed, freed_busy = _faults(fresh[: size // 2]), _faults_beside(fresh[size // 2 :])
    return dict(
        touch=touch, touch_busy=busy, freed=size, touch_freed=max(touch, freed), touch_freed_busy=max(busy, freed_busy)
    )


def _faults_beside(fresh: torch.Tensor) -> float:
    """Return the same rate as `_faults` while the CPU computes."""
    factor = torch.ones(WIDTH, WIDTH)
    return beside(lambda _: torch.mm(factor, factor), "computing", lambda: _faults(fresh))[1]


def _faults(fresh: torch.Tensor) -> float:
    """Return the bytes per second of page faults in memory that nothing was written to."""
    began = time.perf_counter()
    fresh[::PAGE] = 1
    tick()
    return len(fresh) / (time.perf_counter() - began)


def copies(machine: Machine, seconds: float = COPY_SECONDS) -> dict[str, Table]:
    """Return the rates of h2d and, if the device has its own memory, of d2h. seconds: time for each size."""
    most = min(COPIED, room(machine, "device", "host"))
    sizes = _sizes(COPIES, most // 2)
    total = max(sizes[-1], most // sizes[-1] * sizes[-1])
    with Borrowed(machine) as regions:
        host, device = (regions.take(tier, total, WHAT, DTYPE) for tier in ("host", "device"))
        fill(machine.host.view(host))
        target = fill(machine.device.view(device))

        def load(size: int, i: int) -> None:
            machine.host.load_all([(_part(host, size, i), _slice(target, size, i))])

        def store(size: int, i: int) -> None:
            machine.host.store(_slice(target, size, i), _part(host, size, i))

        tables = {"h2d": _table(sizes, seconds, load, machine)}
        if not machine.capacity.shared:
            tables["d2h"] = _table(sizes, seconds, store, machine)
    return tables


def _offset(total: int, size: int, i: int) -> int:
    """Return the first byte of transfer i, of transfers of `size` that cycle through `total` bytes."""
    return i % max(1, total // size) * size


def _part(region: Region, size: int, i: int) -> Region:
    return region.part(_offset(region.nbytes, size, i), size)


def _slice(tensor: torch.Tensor, size: int, i: int) -> torch.Tensor:
    first = _offset(tensor.nbytes, size, i) // tensor.itemsize
    return tensor[first : first + size // tensor.itemsize]


def _spills(
    machine: Machine, place: str, sizes: Sequence[int], most: int, seconds: float, few: bool = False
) -> dict[str, Table]:
    """Return the rates of writes and reads in the offload directory of a disk, of which at most `most` bytes are used.

    With direct I/O no cache is involved. Without it, the page cache serves jobs as well as this measurement.
    """
    tier = "device" if machine.capacity.shared else "host"
    sizes = _sizes(sizes, min(room(machine, tier), room(machine, place)))
    total = max(sizes[-1], min(most, room(machine, place)) // sizes[-1] * sizes[-1])
    disk = machine.tier(place)
    with Borrowed(machine) as regions:
        spill = regions.take(place, total, WHAT, DTYPE)
        buffer = machine.tier(tier).view(regions.take(tier, sizes[-1], WHAT, DTYPE))
        fill(buffer)
        written = sizes[-1]

        def write(size: int, i: int) -> None:
            nonlocal written
            part = _part(spill, size, i)
            disk.store(buffer[: size // DTYPE.itemsize], part)
            written = max(written, part.start - spill.start + size)

        def read(size: int, i: int) -> None:  # only written bytes, as reads of a gap do not reach the disk
            disk.load_all([(_part(spill.part(0, written), size, i), buffer[: size // DTYPE.itemsize])])

        writes = _table(sizes, seconds, write, machine, few)
        reads = _table([int(x) for x, _ in writes], seconds, read, machine, few)
        return dict(zip(place_of(place).lanes, (reads, writes), strict=True))


def quick_spills(machine: Machine) -> dict[str, Table]:
    """Return the rates of writes and reads in the offload directories, within a fifth of a second for each; without
    those of directories that cannot be used or lack the room."""
    links = dict[str, Table]()
    for place in disks_of(machine.tiers):
        if _usable(machine, place) and room(machine, place) >= QUICK_SPILLED:
            links |= _spills(machine, place, QUICK_READS, QUICK_SPILLED, QUICK_SPILL_SECONDS, few=True)
    return links


def quick_reads(machine: Machine, checkpoint: Sequence[Path]) -> Table:
    """Return the rates of reads of the model's own file, within half a second; () if it has none."""
    with readable(machine, checkpoint, quick=True) as files:
        return _checkpoint_read(machine, files, QUICK_READS, QUICK_SECONDS, few=True) if files else ()


def _checkpoint_read(
    machine: Machine, files: Mapping[Path, int], sizes: Sequence[int], seconds: float, few: bool = False
) -> Table:
    tier = "device" if machine.capacity.shared else "host"
    with Borrowed(machine) as regions:
        sizes = _sizes(sizes, min(room(machine, tier), max(files.values())))
        target = fill(machine.tier(tier).view(regions.take(tier, sizes[-1], WHAT, DTYPE, reads=True)))
        streams = {size: stretches(machine, files, size) for size in sizes}

        def read(size: int, i: int) -> None:  # to another offset each time, as weight slots are not cached either
            machine.disk.load_all([(next(streams[size]), _slice(target, size, i))])

        return _table(sizes, seconds, read, machine, few)


def stretches(machine: Machine, files: Mapping[Path, int], size: int) -> Iterator[Region]:
    """Yield regions of `size` bytes, in order through all files, endlessly."""
    while True:
        for path, length in files.items():
            for start in range(0, length - size + 1, size):
                yield machine.disk.checkpoint(path, start, size, DTYPE)


@contextmanager
def readable(machine: Machine, checkpoint: Sequence[Path], quick: bool = False) -> Iterator[dict[Path, int]]:
    """Yield files to read, with their bytes: the model's own, or a new file if it is small. Reads of them do not ask
    the page cache, which may still hold pages that are mapped or were not written yet.

    quick: yield the first bytes of the model's largest file only, or none if it is tiny.
    """
    with _chosen(machine, checkpoint, quick) as files:
        opened = [machine.disk.checkpoint(path, 0, 0, DTYPE).place for path in files]
        before = [file.uncached for file in opened]
        for file in opened:
            file.uncached = True
        try:
            yield files
        finally:
            for file, uncached in zip(opened, before, strict=True):
                file.uncached = uncached


@contextmanager
def _chosen(machine: Machine, checkpoint: Sequence[Path], quick: bool) -> Iterator[dict[Path, int]]:
    own = {path: path.stat().st_size // 2 * 2 for path in checkpoint}
    if quick:
        nbytes, largest = max(((size, path) for path, size in own.items()), default=(0, Path()))
        yield _evicted({largest: min(nbytes, MIN_CHECKPOINT_BYTES)} if nbytes >= QUICK_READS[0] else {})
        return
    if sum(own.values()) >= MIN_CHECKPOINT_BYTES or (own and machine.no_offload):
        yield _evicted(own)
        return
    if machine.no_offload:
        raise InvalidInput(machine.no_offload)
    with Borrowed(machine) as regions:
        regions.take("disk", ALIGN, WHAT)  # makes the offload directory
        handle, name = tempfile.mkstemp(".measuring", "flexengine-", machine.directories[0])
        try:
            try:
                length = _write(handle, min(WRITTEN, room(machine, "disk")))
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                machine.disk.checkpoint(Path(name), 0, length, DTYPE)
            finally:  # the tier has opened it, so no file remains
                os.unlink(name)
            yield {Path(name): length}
        finally:
            os.ftruncate(handle, 0)  # the tier still has the file open; truncated, it takes no space
            os.close(handle)


def _evicted(files: dict[Path, int]) -> dict[Path, int]:
    """Remove the first bytes of the files from the page cache, and return their numbers, by path."""
    for path, nbytes in files.items():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, nbytes, os.POSIX_FADV_DONTNEED)
    return files


def _write(file: int, most: int) -> int:
    """Write to `file` for about PATIENCE seconds, with fdatasync. Return the number of bytes, at most `most`."""
    block = fill(torch.empty(8 * MIB, dtype=torch.uint8), 50.0).numpy().data
    began, done = time.perf_counter(), 0
    while done < most and (not done or time.perf_counter() - began < PATIENCE):
        done += os.write(file, block[: min(len(block), most - done)])
        os.fdatasync(file)
        tick()
    return done // ALIGN * ALIGN or done
