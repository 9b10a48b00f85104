"""A machine: its tiers, the routes between them, and its kind of lanes. There are three kinds: cpu, sim and cuda.

| kind | device tier | host tier | disk to device |
|---|---|---|---|
| cpu | RAM; matrices in bf16 or their own 16 bits, other tensors in the compute dtype | same RAM, as stored | direct |
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
HEADROOM = 0.92  # share of the free memory that is used if no size is set
RAM_DISK = 8  # an offload directory in RAM gets 1/8 of that share if no size is set
NO_DISK = 1  # bytes; capacity of a disk tier whose directory cannot be used: Hardware refuses 0, and no page fits in 1
MIN_DISK_BYTES = 2 * ALIGN  # bytes; minimum capacity of an offload directory in RAM, enough to measure its rates


@dataclass(frozen=True)
class Links:
    """Rates of the links of a sim machine.

    Attributes:
        h2d: host to device, bytes per second; None for unlimited, here and below.
        d2h: device to host, bytes per second.
        disk_read: bytes per second.
        disk_write: bytes per second.
        latency: seconds added to each transfer between device and host.
    """

    h2d: float | None = None
    d2h: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    latency: float = 0.0


@dataclass
class Machine:
    """A compute device with its tiers.

    Attributes:
        kind: cpu, sim or cuda.
        compute: torch device of the kernels.
        device: tier of compute buffers; see the table above.
        host: tier of RAM.
        disk: tier of checkpoint files and the spill file.
        capacity: bytes per tier, for the planner.
        routes: hops that data takes between tiers.
        lanes: kind of lanes that overlap transfers with compute: thread or stream.
        no_offload: reason why the offload directory cannot be used; the disk's capacity is then NO_DISK. Empty if the
            directory can be used.
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
        """Return the tier called `name`: device, host or disk."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[name]

    def traffic(self) -> dict[str, int]:
        """Return the bytes moved so far per link."""
        return {"disk_read": self.disk.bytes_read, "disk_write": self.disk.bytes_written,
                "h2d": self.host.bytes_read, "d2h": self.host.bytes_written}  # fmt: skip

    def synchronize(self) -> None:
        """Wait for the work that this thread queued on the device, so that lanes may use its results."""
        if self.kind == "cuda":
            cuda.synchronize()

    def keep_freed(self, room: bool) -> None:
        """Make malloc keep much freed memory for reuse if `room` is true, else little. Does nothing for cuda."""
        if self.kind != "cuda":
            keep_freed(room)

    def give_back(self) -> None:
        """Return freed memory that malloc and torch hold to the system."""
        give_back_freed()
        if self.kind == "cuda":
            cuda.give_back()

    def close(self) -> None:
        """Close all tiers and return freed memory to the system."""
        for tier in (self.device, self.host, self.disk):
            tier.close()
        give_back_freed()


def make_machine(
    kind: str, device_mem: int | None, host_mem: int | None, offload_dir: Path, links: Links | None = None
) -> Machine:
    """Return the machine to run on.

    An offload directory that cannot be used is no error here, as most plans need none: see `Machine.no_offload`.

    Args:
        kind: one of KINDS; auto takes cuda if there is a CUDA GPU, else cpu.
        device_mem: bytes of the device tier; None for what is free (sim: no limit).
        host_mem: bytes of the host tier; None for what is free (sim: no limit).
        offload_dir: directory of the spill file.
        links: rates, for kind sim only.

    Raises:
        InvalidInput: the kind is unknown or has no device here, or a size does not apply to the kind or exceeds the
            memory of this machine.
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
    ram_limit = {"cpu": device_mem, "cuda": host_mem, "sim": (device_mem or 0) + (host_mem or 0)}[kind]
    ram, free_disk, fault = _ram_and_disk(ram_limit, offload_dir)
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
    """Raise InvalidInput if a size exceeds the memory of this machine, or host_mem is set for kind cpu."""
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
    """Set the limit of open files to this user's maximum: each shard is opened twice, and some models have hundreds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))


def _ram_and_disk(ram_limit: int | None, offload_dir: Path) -> tuple[int, int, str]:
    """Return bytes of RAM (`ram_limit`, or what is free), bytes of the offload directory, and why it cannot be used.

    A directory in RAM (tmpfs) takes from the same memory: it gets the rest of the free RAM, or 1/RAM_DISK of the free
    RAM if `ram_limit` is None.
    """
    usable = int(usable_memory() * HEADROOM)
    try:
        free = usable_disk(offload_dir)
    except InvalidInput as error:
        return ram_limit or usable, NO_DISK, str(error)
    if not in_ram(offload_dir):
        return ram_limit or usable, free, ""
    ram = ram_limit or usable - min(free, usable // RAM_DISK)
    return ram, min(free, max(usable - ram, MIN_DISK_BYTES)), ""


def _cpu(size: int, disk: Tier, free_disk: int, fault: str) -> Machine:
    ram = Ledger("device", size)
    capacity = Capacity(size, None, free_disk, shared=True, staged=False)
    device, host = MemoryTier("device", ram), MemoryTier("host", ram)
    return Machine("cpu", torch.device("cpu"), device, host, disk, capacity, DIRECT, "thread", fault)
