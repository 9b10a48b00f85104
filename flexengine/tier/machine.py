"""A machine: its tiers, the routes between them, and its kind of lanes. There are three kinds: cpu, sim and cuda.

| kind | device tier | host tier | disk to device |
|---|---|---|---|
| cpu | RAM; matrices in bf16 or their own 16 bits, other tensors in the compute dtype | same RAM, as stored | direct |
| sim | RAM with a capacity of its own | RAM behind throttled h2d and d2h links | through host staging |
| cuda | GPU memory | pinned RAM | through host staging |
"""

import contextlib
import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Annotated, ClassVar

import torch

from flexengine.activity import message
from flexengine.errors import InvalidInput, shown, size_within
from flexengine.places import MOST_DISKS, Routes, disks_of, place_names, place_of
from flexengine.plan.hardware import Capacity
from flexengine.records import Limit, check, named_fields
from flexengine.system.limits import device_of, has_gpu, in_ram, total_memory, usable_disk, usable_memory
from flexengine.tier.base import ALIGN, Ledger, Tier
from flexengine.tier.disk import DiskTier
from flexengine.tier.memory import MemoryTier, give_back_freed, keep_freed

KINDS = ("auto", "cpu", "cuda", "sim")
HEADROOM = 0.92  # share of the free memory that is used if no size is set
RAM_DISK = 8  # an offload directory in RAM gets 1/8 of that share if no size is set
NO_DISK = 1  # bytes; capacity of a disk tier whose directory cannot be used: Hardware refuses 0, and no page fits in 1
MIN_DISK_BYTES = 2 * ALIGN  # bytes; minimum capacity of an offload directory in RAM, enough to measure its rates


_Rate = Annotated[
    float | None, Limit(math.ulp(0.0), math.inf), "a positive number of bytes per second, or None for no limit"
]


@named_fields
@dataclass(frozen=True)
class Links:
    """Rates of the links of a sim machine, by which transfers are slowed down.

    Attributes:
        h2d: host to device, bytes per second; None for unlimited, here and below.
        d2h: device to host, bytes per second.
        disk_read: bytes per second.
        disk_write: bytes per second.
        more_disks: (read, write) of the further offload directories, in order; without limits for those left out.
        latency: seconds added to each transfer between device and host.

    Raises:
        InvalidInput: a rate is not positive, or the latency is negative.

    Examples:
        >>> Engine(device="sim", device_mem="2G", links=Links(h2d=12e9, d2h=12e9, disk_read=2e9, disk_write=1e9))
    """

    h2d: _Rate = None
    d2h: _Rate = None
    disk_read: _Rate = None
    disk_write: _Rate = None
    latency: Annotated[float, Limit(0), "a number of seconds of at least 0"] = 0.0
    more_disks: Annotated[
        tuple[Annotated[tuple[_Rate, _Rate], Limit(2, 2), "a pair (read, write) of rates"], ...],
        "a list with a pair (read, write) of rates for each further offload directory",
    ] = ()

    def __post_init__(self) -> None:
        check(self)

    def of_disk(self, number: int) -> tuple[float | None, float | None]:
        """Return the rates (read, write) of a disk, by its number from 0."""
        rates = ((self.disk_read, self.disk_write), *self.more_disks)
        return rates[number] if number < len(rates) else (None, None)


@dataclass
class Machine:
    """A compute device with its tiers."""

    kind: str  # cpu, sim or cuda
    device: Tier  # tier of compute buffers; see the table above
    host: Tier  # tier of RAM
    # tiers of the offload directories, one spill file each. The first also reads checkpoint files.
    disks: tuple[Tier, ...]
    workers: tuple[Tier, ...]  # tiers of the attention workers
    capacity: Capacity  # bytes per tier, for the planner
    routes: Routes  # hops that data takes between tiers
    directories: tuple[Path, ...]  # the offload directory of each disk
    # reason why the first offload directory cannot be used; the disk's capacity is then NO_DISK. Empty if the
    # directory can be used.
    no_offload: str = ""
    gpu: ClassVar = False  # whether the device computes without the processor, and does not wait for what is queued
    compute: ClassVar = torch.device("cpu")  # torch device of the kernels
    lanes: ClassVar = "thread"  # kind of lanes that overlap transfers with compute: thread or stream

    @property
    def disk(self) -> Tier:
        """Return the tier of checkpoint files and of the first offload directory."""
        return self.disks[0]

    @cached_property
    def tiers(self) -> dict[str, Tier]:
        """Return the tier of every place, from near to far."""
        return dict(zip(self.capacity.places, (self.device, self.host, *self.disks, *self.workers), strict=True))

    @property
    def same_device(self) -> list[tuple[str, str]]:
        """Return the pairs of disks whose directories lie on one device, and so share its rate."""
        disks = zip(disks_of(self.capacity.places), map(device_of, self.directories), strict=True)
        return [(a, b) for (a, one), (b, other) in combinations(disks, 2) if one == other]

    def renew(self, place: str) -> None:
        """Replace a lost attention worker. The new one may have other memory. Raise as `Tier.renew`."""
        tier = self.tier(place)
        tier.renew()
        self.capacity = self.capacity.limited({place: tier.ledger.capacity})

    def tier(self, place: str) -> Tier:
        return self.tiers[place]

    def say_no_offload(self) -> None:
        if self.no_offload:
            message(f"nothing is offloaded to disk: {self.no_offload}")

    def traffic(self) -> dict[str, int]:
        """Return the bytes moved so far per link."""
        moved = dict[str, int]()
        for place, tier in self.tiers.items():
            moved |= zip(place_of(place).lanes, (tier.bytes_read, tier.bytes_written), strict=False)
            moved |= zip(place_of(place).attention[::2], tier.attention_bytes, strict=False)
        return moved | {"h2d": self.host.bytes_read, "d2h": self.host.bytes_written}

    def synchronize(self) -> None:
        """Wait for the work that this thread queued on the device, so that lanes may use its results."""

    def keep_freed(self, room: bool = True) -> None:
        """Make malloc keep much freed memory for reuse if `room` is true, else little."""
        keep_freed(room)

    def give_back(self) -> None:
        """Return freed memory that malloc and torch hold to the system."""
        give_back_freed()

    def keep_until_read(self, x: torch.Tensor) -> None:
        """Let no other thread's tensor get the memory of a tensor, of another thread, before this thread's queued work
        has read it."""

    def close(self) -> None:
        """Close all tiers and return freed memory to the system."""
        for tier in (*self.tiers.values(), *reversed(self.disks)):  # again: a disk's parents may hold other disks
            tier.close()
        give_back_freed()


def make_machine(
    kind: str, device_mem: int | None, host_mem: int | None, offload_dirs: Sequence[Path], links: Links | None = None,
    sharing: int = 1, processes: int = 1, workers: Sequence[Tier] = (),
) -> Machine:  # fmt: skip
    """Return the machine to run on.

    A first offload directory that cannot be used is no error here, as most plans need none: see `Machine.no_offload`.
    Raise InvalidInput if the kind is unknown or has no device here, or a size does not apply to the kind or exceeds the
    memory of this machine, or a further offload directory cannot be used.

    Args:
        kind: one of KINDS; auto takes cuda if there is a CUDA GPU, else cpu.
        device_mem: bytes of the device tier; None for what is free (sim: no limit).
        host_mem: bytes of the host tier; None for what is free (sim: no limit).
        offload_dirs: directories of spill files, at least one; each is a place of its own.
        links: rates, for kind sim only.
        sharing: engines that share RAM and disks of this machine. Each takes its part of what is free.
        processes: processes that share its GPUs.
        workers: tiers of the attention workers.
    """
    if kind not in KINDS:
        raise InvalidInput(f"device is {shown(kind)}; it must be one of {', '.join(KINDS)}")
    kind = resolved(kind)
    if kind == "cuda" and not has_gpu():
        raise InvalidInput("device is 'cuda', but torch sees no CUDA GPU; use --device cpu, or leave --device out")
    if links is not None and kind != "sim":
        raise InvalidInput(f"link rates can be set for device 'sim' only, not {shown(kind)}")
    made: type[Machine] = Machine
    if kind == "cuda":
        cuda = import_module("flexengine.tier.cuda")  # not on other machines
        made = cuda.CudaMachine
    else:
        keep_freed()
    _check_sizes(kind, device_mem, host_mem, cuda.memory()[1] if kind == "cuda" else None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else max(soft, 65536)
    with contextlib.suppress(ValueError, OSError):  # each shard is opened twice, and some models have hundreds
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    ram_limit = {"cpu": device_mem, "cuda": host_mem, "sim": (device_mem or 0) + (host_mem or 0)}[kind]
    directories = tuple(offload_dirs)
    taken = sum(worker.local_bytes for worker in workers)
    ram, free_disk, fault = _ram_and_disk(ram_limit, directories[0], sharing, taken)
    free_disk, *more = _disk_sizes(directories, free_disk, sharing)
    of_disks = zip(place_names(len(directories))[2:], (free_disk, *more), directories, strict=True)
    disks: tuple[Tier, ...] = tuple(DiskTier(name, Ledger(name, size), path) for name, size, path in of_disks)
    device: Tier
    host: Tier
    sizes: tuple[int | None, int | None]  # bytes of device and host
    if kind == "cpu":
        memory, sizes = Ledger("device", ram), (ram, None)
        device, host = MemoryTier("device", memory), MemoryTier("host", memory)
    elif kind == "sim":
        from flexengine.tier.throttled import Throttled

        links, sizes = links or Links(), (device_mem, host_mem)
        device = MemoryTier("device", Ledger("device", device_mem))
        host = Throttled(MemoryTier("host", Ledger("host", host_mem)), links.h2d, links.d2h, links.latency)
        disks = tuple(Throttled(disk, *links.of_disk(number)) for number, disk in enumerate(disks))
    else:
        sizes = (device_mem or int(cuda.memory()[0] * HEADROOM) // cuda.sharing(processes), ram)
        device = cuda.CudaTier("device", Ledger("device", sizes[0]))
        host = cuda.PinnedTier("host", Ledger("host", ram))
    capacity = Capacity(*sizes, free_disk, shared=kind == "cpu", staged=kind != "cpu", more_disks=tuple(more),
                        workers=tuple(worker.ledger.capacity for worker in workers),
                        filed=sum(place_of(worker.name).filed for worker in workers),
                        engines=max((worker.engines for worker in workers), default=1))  # fmt: skip
    routes = Routes.between(capacity.places, staged=capacity.staged)
    return made(kind, device, host, disks, tuple(workers), capacity, routes, directories, fault)


def resolved(kind: str) -> str:
    """Return the kind of device that `auto` stands for on this machine; other kinds unchanged."""
    return ("cuda" if has_gpu() else "cpu") if kind == "auto" else kind


def _disk_sizes(directories: Sequence[Path], first: int, sharing: int) -> list[int]:
    """Return the bytes of each offload directory. Directories on one file system share its free bytes. Raise
    InvalidInput if there are too many, one is given twice, or one after the first cannot be used.

    Args:
        first: free bytes of the first one; NO_DISK if it cannot be used.
        sharing: processes that share each directory.
    """
    if len(directories) > MOST_DISKS:
        raise InvalidInput(f"--offload-dir is given {len(directories)} times; give it at most {MOST_DISKS} times")
    more = directories[1:]
    if null := next((each for each in directories if more and "\0" in str(each)), None):
        raise InvalidInput(f"offload directory {shown(str(null))} has a null character; give another directory")
    real = [os.path.realpath(each) for each in directories if more]
    if twice := next((path for path in real if real.count(path) > 1), None):
        raise InvalidInput(f"offload directory {twice} is given twice; give each directory once")
    free = [first, *map(usable_disk, more)]
    if in_memory := next(filter(in_ram, more), None):
        raise InvalidInput(f"offload directory {in_memory} is in RAM, which is no further disk; leave it out")
    usable = [(device_of(each), size) for each, size in zip(directories, free, strict=True) if size > NO_DISK]
    devices = [device for device, _ in usable]
    shares = [max(size // devices.count(device) // sharing, NO_DISK) for device, size in usable]
    return shares if first > NO_DISK else [first, *shares]


def _check_sizes(kind: str, device_mem: int | None, host_mem: int | None, gpu: int | None) -> None:
    """Raise InvalidInput if a size exceeds the memory of this machine (gpu: bytes of its GPU, or None), or host_mem is
    set for kind cpu."""
    if kind == "cpu" and host_mem is not None:
        raise InvalidInput("host memory cannot be set for device 'cpu': its RAM is the device tier; use --device-mem")
    ram = (total_memory(), "the machine, or the cgroup of this process,")
    device = ram if gpu is None else (gpu, "the GPU")
    sizes = [("--device-mem", device_mem or 0, device), ("--host-mem", host_mem or 0, ram)]
    if kind == "sim":
        sizes.append(("--device-mem and --host-mem together", (device_mem or 0) + (host_mem or 0), ram))
    for option, given, (most, where) in sizes:
        if given > most:
            fault = f"{option}: {size_within(given)} are given, but {where} has {size_within(most, up=False)}"
            raise InvalidInput(f"{fault}; give at most that (flexengine plan --hardware FILE plans for other machines)")


def _ram_and_disk(ram_limit: int | None, offload_dir: Path, sharing: int, taken: int) -> tuple[int, int, str]:
    """Return bytes of RAM (`ram_limit`, or what is free), bytes of the offload directory, and why it cannot be used.

    A directory in RAM (tmpfs) takes from the same memory: it gets the rest of the free RAM, or 1/RAM_DISK of the free
    RAM if `ram_limit` is None. Attention workers of this machine take `taken` bytes.
    """
    free_ram = int(usable_memory() * HEADROOM)
    if taken >= free_ram:
        raise InvalidInput(
            f"attention workers may take {size_within(taken)} of RAM, but {size_within(free_ram, up=False)} are free;"
            " give a smaller --worker-mem, or fewer workers"
        )
    usable = (free_ram - taken) // sharing
    try:
        free = usable_disk(offload_dir)
    except InvalidInput as error:
        return ram_limit or usable, NO_DISK, str(error)
    if not in_ram(offload_dir):
        return ram_limit or usable, free, ""
    ram = ram_limit or usable - min(free, usable // RAM_DISK)
    return ram, min(free, max(usable - ram, MIN_DISK_BYTES)), ""
