"""A machine: its tiers, how they are connected, and which lanes suit it. Three kinds: cpu, sim and cuda.

| kind | device tier | host tier | disk to device |
|---|---|---|---|
| cpu | RAM, matrices in bf16 or their own 16 bits, the rest in the compute dtype | the same RAM, as stored | direct |
| sim | RAM with a capacity of its own | RAM behind throttled h2d and d2h links | through host staging |
| cuda | GPU memory | pinned RAM | through host staging |
"""

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from flexengine.errors import InvalidInput
from flexengine.plan.capacity import Capacity
from flexengine.schedule.program import DIRECT, STAGED, Routes
from flexengine.tier import cuda
from flexengine.tier.base import ALIGN, Tier
from flexengine.tier.disk import DiskTier
from flexengine.tier.ledger import Ledger
from flexengine.tier.limits import in_ram, total_memory, usable_disk, usable_memory
from flexengine.tier.memory import MemoryTier, give_back_freed, keep_freed
from flexengine.tier.wrap import Throttled

KINDS = ("auto", "cpu", "cuda", "sim")
HEADROOM = 0.92  # share of the free memory taken when nobody says how much
RAM_DISK = 8  # the part of that which an offload directory in RAM gets
NO_DISK = 1  # bytes of a disk tier whose directory cannot be used: no page fits, and Hardware takes no less
LEAST_DISK = 2 * ALIGN  # bytes of it however little is left: enough to be measured


@dataclass(frozen=True)
class Links:
    """Bytes per second of each link of a sim machine; None is as fast as it goes. latency: seconds that each transfer
    between device and host takes besides."""

    h2d: float | None = None
    d2h: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    latency: float = 0.0


@dataclass
class Machine:
    """A device to compute on and the tiers around it.

    Attributes:
        compute: where torch computes.
        lanes: kind of lane that overlaps here.
        no_offload: why nothing can be offloaded to disk; empty if it can. The disk's capacity is then `NO_DISK`.
    """

    kind: str
    compute: torch.device
    device: Tier
    host: Tier
    disk: Tier
    capacity: Capacity
    routes: Routes
    lanes: str
    no_offload: str = ""

    def tier(self, name: str) -> Tier:
        return {"device": self.device, "host": self.host, "disk": self.disk}[name]

    def traffic(self) -> dict[str, int]:
        """Bytes moved so far per link."""
        return {"disk_read": self.disk.bytes_read, "disk_write": self.disk.bytes_written,
                "h2d": self.host.bytes_read, "d2h": self.host.bytes_written}  # fmt: skip

    def synchronize(self) -> None:
        """Waits until what this thread queued on the device is done, so that lanes may use it."""
        if self.kind == "cuda":
            cuda.synchronize()

    def keep_freed(self, room: bool) -> None:
        """Let malloc keep much freed memory for reuse if there is room for it, else little."""
        if self.kind != "cuda":
            keep_freed(room)

    def give_back(self) -> None:
        """Returns freed memory that allocators keep for themselves."""
        give_back_freed()
        if self.kind == "cuda":
            cuda.give_back()

    def close(self) -> None:
        for tier in (self.device, self.host, self.disk):
            tier.close()
        give_back_freed()


def make_machine(
    kind: str, device_mem: int | None, host_mem: int | None, offload_dir: Path, links: Links | None = None
) -> Machine:
    """The machine to run on. Sizes in bytes; None takes what is free (sim: no limit).

    An offload directory that cannot be used is no error here, as most plans need none: see `Machine.no_offload`.

    Raises InvalidInput for a kind that is not there, or a size that means nothing on it or that it does not have.
    """
    if kind not in KINDS:
        raise InvalidInput(f"device is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "auto":
        kind = "cuda" if cuda.available() else "cpu"
    if kind == "cuda" and not cuda.available():
        raise InvalidInput("device is 'cuda', but torch sees no CUDA GPU; use --device cpu")
    if links is not None and kind != "sim":
        raise InvalidInput(f"link rates can be set for device 'sim' only, not {kind!r}")
    if kind != "cuda":
        keep_freed()
    _check_sizes(kind, device_mem, host_mem)
    _allow_open_files()
    given = {"cpu": device_mem, "cuda": host_mem, "sim": (device_mem or 0) + (host_mem or 0)}[kind]
    ram, free_disk, fault = _ram_and_disk(given, offload_dir)
    disk: Tier = DiskTier("disk", Ledger("disk", free_disk), offload_dir)
    if kind == "cpu":
        return _cpu(ram, disk, free_disk, fault)
    if kind == "sim":
        links = links or Links()
        host = Throttled(MemoryTier("host", Ledger("host", host_mem)), links.h2d, links.d2h, links.latency)
        disk = Throttled(disk, links.disk_read, links.disk_write)
        capacity = Capacity(device_mem, host_mem, free_disk, shared=False, staged=True)
        device: Tier = MemoryTier("device", Ledger("device", device_mem))
        return Machine(kind, torch.device("cpu"), device, host, disk, capacity, STAGED, "thread", fault)
    device_mem = device_mem or int(cuda.free_memory() * HEADROOM)
    pinned = cuda.PinnedTier("host", Ledger("host", ram))
    capacity = Capacity(device_mem, ram, free_disk, shared=False, staged=True)
    gpu = cuda.CudaTier("device", Ledger("device", device_mem))
    return Machine(kind, torch.device("cuda"), gpu, pinned, disk, capacity, STAGED, "stream", fault)


def _check_sizes(kind: str, device_mem: int | None, host_mem: int | None) -> None:
    """Raises InvalidInput if more memory is given than there is."""
    if kind == "cpu" and host_mem is not None:
        raise InvalidInput("host memory cannot be set for device 'cpu': its RAM is the device tier; use --device-mem")
    ram = (total_memory(), "the machine, or the cgroup of this process,")
    device = (cuda.total_memory(), "the GPU") if kind == "cuda" else ram
    sizes = [("--device-mem", device_mem or 0, device), ("--host-mem", host_mem or 0, ram)]
    if kind == "sim":
        sizes.append(("--device-mem and --host-mem together", (device_mem or 0) + (host_mem or 0), ram))
    for option, size, (most, where) in sizes:
        if size > most:
            raise InvalidInput(f"{option}: {size:,} bytes are given, but {where} has {most:,}; give at most that"
                               " (python -m flexengine.plan --hardware FILE plans for other"
                               " machines)")  # fmt: skip


def _allow_open_files() -> None:
    """Every shard is open twice, and a large model has hundreds: as many as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))


def _ram_and_disk(given: int | None, offload_dir: Path) -> tuple[int, int, str]:
    """Return bytes of RAM (`given`, or what is free), bytes of the offload directory, and why it cannot be used.

    A directory that is in RAM itself (tmpfs) takes from the same memory: it gets what is left there, or a part of it if
    no size is given.
    """
    usable = int(usable_memory() * HEADROOM)
    try:
        free = usable_disk(offload_dir)
    except InvalidInput as error:
        return given or usable, NO_DISK, str(error)
    if not in_ram(offload_dir):
        return given or usable, free, ""
    ram = given or usable - min(free, usable // RAM_DISK)
    return ram, min(free, max(usable - ram, LEAST_DISK)), ""


def _cpu(size: int, disk: Tier, free_disk: int, fault: str) -> Machine:
    ram = Ledger("device", size)
    capacity = Capacity(size, None, free_disk, shared=True, staged=False)
    device, host = MemoryTier("device", ram), MemoryTier("host", ram)
    return Machine("cpu", torch.device("cpu"), device, host, disk, capacity, DIRECT, "thread", fault)
