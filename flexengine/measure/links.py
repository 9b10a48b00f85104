"""How fast bytes cross each link, measured through the tiers themselves, so that throttles and detours count."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flexengine.errors import InvalidInput
from flexengine.kernels import load as load_kernels
from flexengine.measure.timing import beside, fill, room, unnoticed
from flexengine.plan.assumed import assumed
from flexengine.plan.hardware import Table
from flexengine.tier.base import ALIGN, Home
from flexengine.tier.disk import DiskTier
from flexengine.tier.limits import usable_memory
from flexengine.tier.machine import Machine
from flexengine.tier.memory import HUGE, aligned_buffer
from flexengine.tier.wrap import Throttled
from flexengine.worker.regions import Regions

KIB, MIB = 1 << 10, 1 << 20
COPIES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)  # bytes of a transfer
SPILLS = (64 * KIB, 256 * KIB, MIB, 8 * MIB)
READS = (32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB)
COPIED = 128 * MIB  # of each memory, which no cache holds
SPILLED = 256 * MIB  # most of the offload directory
LEAST_CHECKPOINT = 256 * MIB  # less of it says little about larger models, and a file is written instead
WRITTEN = 128 * MIB  # of that file
TOUCHED, PAGE = 640 * MIB, 4096
WIDTH = 512  # of products that keep the processor busy
COPY_SECONDS, SPILL_SECONDS, READ_SECONDS = 0.1, 0.4, 0.8  # for each size
TURNS = 4  # in which sizes are tried one after the other
PATIENCE = 1.0  # seconds; a size whose single transfer would take longer is left out
WHAT = "measuring"
DTYPE = torch.bfloat16  # of what is moved; it lands as it is


@dataclass(frozen=True)
class LinkRates:
    """links: by lane (bytes of a transfer, bytes per second); checkpoint_read: the same of the model's own files;
    touch: bytes per second of RAM that is used for the first time; touch_busy: the same while the processor computes.
    """

    links: Mapping[str, Table]
    checkpoint_read: Table
    touch: float
    touch_busy: float


def measure_links(machine: Machine, checkpoint: Sequence[Path] = ()) -> LinkRates:
    """Rates of this machine's links. checkpoint: the model's safetensors files, where there are any.

    Takes about ten seconds, and leaves the ledgers as they were. Raises OutOfMemory if not even a few pages are free,
    InvalidInput if the offload directory cannot be written.
    """
    load_kernels()  # else building them would count as a slow transfer
    with unnoticed(machine):
        touch, busy = _touch(room(machine, "device", "host"))
        links = _copies(machine) | (_assumed_spills(machine) if machine.no_offload else _spills(machine))
        return LinkRates(links, _checkpoint_read(machine, checkpoint), touch, busy)


def _sizes(wanted: Sequence[int], most: int) -> list[int]:
    """Those that fit, or the largest that does."""
    return [size for size in wanted if size <= most] or [max(ALIGN, most // ALIGN * ALIGN)]


def _table(sizes: Iterable[int], budget: float, call: Callable[[int, int], object], machine: Machine) -> Table:
    """(size, bytes per second) of call(size, number), `budget` seconds of each size. Sizes take turns, and a rate is
    the mean, as a disk has good and bad moments of its own and a job meets them all."""
    wanted, spent, calls = list(sizes), dict[int, float](), dict[int, int]()
    each = 0.0  # seconds of a byte at the size before
    for size in list(wanted):
        if size * each > PATIENCE:
            wanted = wanted[: wanted.index(size)]
            break
        seconds, count = _turn(partial(call, size), budget / TURNS, 0, machine)
        each = seconds / count / size
        if seconds > budget:  # so slow that it needs no warming up
            spent[size], calls[size] = seconds, count
    for size in wanted * TURNS:
        if spent.get(size, 0.0) < budget:
            first = calls.get(size, 0)
            seconds, count = _turn(partial(call, size), budget / TURNS, first, machine)
            spent[size], calls[size] = spent.get(size, 0.0) + seconds, first + count
    return tuple((float(size), size * calls[size] / spent[size]) for size in wanted)


def _turn(call: Callable[[int], object], budget: float, first: int, machine: Machine) -> tuple[float, int]:
    """(seconds, number) of calls within about `budget` seconds, one at least."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < budget:
        call(first + count)
        count += 1
    machine.synchronize()
    return time.perf_counter() - began, count


def _touch(most: int) -> tuple[float, float]:
    """Return the bytes per second of RAM written to for the first time, alone and while the processor computes: page
    faults in a fresh mapping. Its first two fifths use recently freed pages, which a virtual machine's kernel hands out
    ten times faster.

    Args:
        most: bytes that may be taken.
    """
    fresh = aligned_buffer(max(HUGE, min(TOUCHED, most, usable_memory() // 8)))
    fifth = len(fresh) // 5
    fresh[: 2 * fifth : PAGE] = 1
    alone = _faults(fresh[2 * fifth : 4 * fifth])
    factor = torch.ones(WIDTH, WIDTH)
    _, busy = beside(lambda _: torch.mm(factor, factor), "computing", lambda: _faults(fresh[4 * fifth :]))
    return alone, busy


def _faults(fresh: torch.Tensor) -> float:
    """Return the bytes per second at which every page of it is written to."""
    began = time.perf_counter()
    fresh[::PAGE] = 1
    return len(fresh) / (time.perf_counter() - began)


def _copies(machine: Machine) -> dict[str, Table]:
    """h2d and, where the device has a memory of its own, d2h."""
    most = min(COPIED, room(machine, "device", "host"))
    sizes = _sizes(COPIES, most // 2)
    total = max(sizes[-1], most // sizes[-1] * sizes[-1])
    regions = Regions(machine)
    try:
        home, near = (regions.take(tier, total, WHAT, DTYPE) for tier in ("host", "device"))
        fill(machine.host.view(home))
        target = fill(machine.device.view(near))

        def load(size: int, i: int) -> None:
            part, at = _part(home, size, i), _at(total, size, i) // DTYPE.itemsize
            machine.host.load_all([(part, target[at : at + size // DTYPE.itemsize])])

        def store(size: int, i: int) -> None:
            part, at = _part(home, size, i), _at(total, size, i) // DTYPE.itemsize
            machine.host.store(target[at : at + size // DTYPE.itemsize], part)

        found = {"h2d": _table(sizes, COPY_SECONDS, load, machine)}
        if not machine.capacity.shared:
            found["d2h"] = _table(sizes, COPY_SECONDS, store, machine)
    finally:
        regions.free()
    return found


def _at(total: int, size: int, i: int) -> int:
    """Where the i-th of the transfers that walk through `total` bytes begins."""
    return i % max(1, total // size) * size


def _part(home: Home, size: int, i: int) -> Home:
    return home.part(_at(home.nbytes, size, i), size)


def _spills(machine: Machine) -> dict[str, Table]:
    """disk_write and disk_read of the offload directory. Where its files are read directly no cache answers; where
    they cannot be, a cache answers the engine as well."""
    tier = "device" if machine.capacity.shared else "host"
    sizes = _sizes(SPILLS, min(room(machine, tier), room(machine, "disk")))
    total = max(sizes[-1], min(SPILLED, room(machine, "disk")) // sizes[-1] * sizes[-1])
    regions = Regions(machine)
    try:
        spill = regions.take("disk", total, WHAT, DTYPE)
        near = machine.tier(tier).view(regions.take(tier, sizes[-1], WHAT, DTYPE))
        fill(near)
        written = sizes[-1]

        def write(size: int, i: int) -> None:
            nonlocal written
            part = _part(spill, size, i)
            machine.disk.store(near[: size // DTYPE.itemsize], part)
            written = max(written, part.start - spill.start + size)

        def read(size: int, i: int) -> None:  # only what was written: a gap is read without the disk
            machine.disk.load_all([(_part(spill.part(0, written), size, i), near[: size // DTYPE.itemsize])])

        writes = _table(sizes, SPILL_SECONDS, write, machine)
        return {"disk_write": writes, "disk_read": _table([int(x) for x, _ in writes], SPILL_SECONDS, read, machine)}
    finally:
        regions.free()


def _assumed_spills(machine: Machine) -> dict[str, Table]:
    """Return assumed rates of an offload directory that cannot be used; no plan uses it either."""
    links = assumed(machine.kind, machine.capacity).links
    return {lane: links[lane] for lane in ("disk_write", "disk_read")}


def _checkpoint_read(machine: Machine, checkpoint: Sequence[Path]) -> Table:
    tier = "device" if machine.capacity.shared else "host"
    regions = Regions(machine)
    try:
        with readable(machine, checkpoint) as files:
            sizes = _sizes(READS, min(room(machine, tier), max(files.values())))
            near = fill(machine.tier(tier).view(regions.take(tier, sizes[-1], WHAT, DTYPE)))
            streams = {size: stretches(machine, files, size) for size in sizes}

            def read(size: int, i: int) -> None:  # to a new place each time, as slots are not in the cache either
                at = _at(sizes[-1], size, i) // DTYPE.itemsize
                machine.disk.load_all([(next(streams[size]), near[at : at + size // DTYPE.itemsize])])

            return _table(sizes, READ_SECONDS, read, machine)
    finally:
        regions.free()


def stretches(machine: Machine, files: Mapping[Path, int], size: int) -> Iterator[Home]:
    """Stretches of `size` bytes, one after the other through all files, over and over."""
    while True:
        for path, length in files.items():
            for start in range(0, length - size + 1, size):
                yield machine.disk.checkpoint(path, start, size, DTYPE)  # type: ignore[attr-defined]


@contextmanager
def readable(machine: Machine, checkpoint: Sequence[Path]) -> Iterator[dict[Path, int]]:
    """Files to read, with their bytes, none of them cached: the model's own or, if it is small, one made for this."""
    own = {path: path.stat().st_size // 2 * 2 for path in checkpoint}
    if sum(own.values()) >= LEAST_CHECKPOINT or (own and machine.no_offload):
        for path in own:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield own
    else:
        with _made(machine) as made:
            yield made


@contextmanager
def _made(machine: Machine) -> Iterator[dict[Path, int]]:
    """A file beside the spill file. It loses its name as soon as the tier has it open, so that nothing stays behind."""
    if machine.no_offload:
        raise InvalidInput(machine.no_offload)
    regions = Regions(machine)
    regions.take("disk", ALIGN, WHAT)  # makes the offload directory
    try:
        file, name = tempfile.mkstemp(".measuring", "flexengine-", offload_directory(machine))
        try:
            try:
                length = _write(file, min(WRITTEN, room(machine, "disk")))
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                machine.disk.checkpoint(Path(name), 0, length, DTYPE)  # type: ignore[attr-defined]
            finally:
                os.unlink(name)
            yield {Path(name): length}
        finally:
            os.ftruncate(file, 0)  # the tier keeps it open, but it takes no room
            os.close(file)
    finally:
        regions.free()


def _write(file: int, most: int) -> int:
    """Bytes written and synced within about a second."""
    block = fill(torch.empty(8 * MIB, dtype=torch.uint8), 50.0).numpy().data
    began, done = time.perf_counter(), 0
    while done < most and (not done or time.perf_counter() - began < PATIENCE):
        done += os.write(file, block[: min(len(block), most - done)])
        os.fdatasync(file)
    return done // ALIGN * ALIGN or done


def offload_directory(machine: Machine) -> Path:
    return disk_of(machine).directory


def disk_of(machine: Machine) -> DiskTier:
    """Return the disk itself, without what slows it down."""
    disk = machine.disk.inner if isinstance(machine.disk, Throttled) else machine.disk
    assert isinstance(disk, DiskTier)
    return disk
