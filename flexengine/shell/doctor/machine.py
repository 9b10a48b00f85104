"""Processor, memory and disks: what the machine has, and what this process may use."""

import os
import platform
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Names of instruction sets, by the flags of /proc/cpuinfo (x86: flags, ARM: Features).
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "i8mm": "I8MM",
    "bf16": "BF16",
}
_NETWORK_NAMES = """
nfs nfs4 cifs smb3 smbfs ceph fuse.ceph glusterfs fuse.glusterfs lustre beegfs gpfs fuse.sshfs fuse.s3fs fuse.gcsfuse
fuse.rclone 9p afs
"""
_NETWORK = frozenset(_NETWORK_NAMES.split())
_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
_ROOT = Path("/")  # holds proc/ and sys/


@dataclass(frozen=True)
class Cpu:
    """The processor."""

    model: str  # name of the product
    machine: str  # architecture, such as x86_64
    cores: int  # logical cores of the machine
    usable: int  # logical cores that this process may run on
    quota: float | None  # cores that the cgroups allow, which may be a fraction; None for no limit
    features: tuple[str, ...]  # instruction sets that speed up products

    @property
    def effective(self) -> float:
        """Return the cores that this process can keep busy."""
        return min(self.usable, self.quota or self.usable)


@dataclass(frozen=True)
class MemoryFacts:
    """RAM, in bytes."""

    total: int  # of the machine
    free: int  # that processes can still take
    usable: int  # that this process can still take, within its cgroups
    limit: int | None  # the smallest limit of its cgroups; None if it is not below `total`
    limit_used: int | None  # taken of this limit, without cached files; None without a limit
    swap: int
    swap_used: int
    huge_pages: str | None  # setting of transparent huge pages: always, madvise or never; None if there is none


@dataclass(frozen=True)
class Disk:
    """A directory and its file system."""

    use: str  # purpose of the directory: cache, offload, hub or current
    path: str  # of the directory, which may be missing
    exists: bool
    mount: str  # where its file system is mounted
    filesystem: str  # type, such as ext4
    device: int  # number of the device; directories with the same number share a disk
    total: int  # bytes of the file system
    free: int  # bytes that this user can write
    writable: bool  # whether this user can write there, or create the directory
    in_ram: bool  # whether files lie in RAM
    network: bool  # whether files lie on another machine
    rotational: bool | None  # whether the disk turns; None if not known, as of most disks of virtual machines


class _Mount(NamedTuple):
    number: str  # of the device, as major:minor
    point: str
    filesystem: str
    source: str


def cpu(root: Path = _ROOT) -> Cpu:
    """Return the processor."""
    from flexengine.tier.limits import cgroup_cores

    fields: dict[str, str] = {}
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    features = tuple(name for flag, name in _FEATURES.items() if flag in flags)
    model = fields.get("model name") or platform.processor() or platform.machine()
    usable = len(os.sched_getaffinity(0))
    return Cpu(model, platform.machine(), os.cpu_count() or usable, usable, cgroup_cores(root), features)


def memory(root: Path = _ROOT) -> MemoryFacts:
    """Return the RAM."""
    import psutil

    from flexengine.tier.limits import cgroup_memory, usable_memory

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, used = min(cgroup_memory(root), default=(None, None))
    if limit is None or limit >= ram.total:
        limit = used = None
    pages = None
    with suppress(OSError):
        words = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text().split()
        pages = next((word.strip("[]") for word in words if word.startswith("[")), None)
    return MemoryFacts(ram.total, ram.available, usable_memory(root), limit, used, swap.total, swap.used, pages)


def disk(use: str, path: Path, root: Path = _ROOT) -> Disk:
    """Return a directory's file system. The directory may be missing: then that of its nearest parent."""
    from flexengine.tier.limits import device_of, nearest

    there = Path(os.path.realpath(nearest(path)))
    mount = _mount_of(there, root)
    space = shutil.disk_usage(there)
    writable = space.total > 0 and there.is_dir() and os.access(there, os.W_OK | os.X_OK)  # /proc has 0 bytes
    return Disk(
        use=use,
        path=str(path.absolute()),
        exists=path.is_dir(),
        mount=mount.point,
        filesystem=mount.filesystem,
        device=device_of(there),
        total=space.total,
        free=space.free,
        writable=writable and not os.statvfs(there).f_flag & os.ST_RDONLY,
        in_ram=mount.filesystem in _IN_RAM,
        network=mount.filesystem in _NETWORK,
        rotational=_rotational(mount, root),
    )


def _mount_of(path: Path, root: Path) -> _Mount:
    """Return the mount that holds a path: the one of the longest mount point, and of these the last."""

    def unescaped(text: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

    holding = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        first, _, last = line.partition(" - ")
        fields, others = first.split(" "), last.split(" ")
        mount = _Mount(fields[2], unescaped(fields[4]), others[0], unescaped(others[1]))
        if path.is_relative_to(mount.point):
            holding.append(mount)
    return max(reversed(holding), key=lambda mount: len(mount.point))


def _rotational(mount: _Mount, root: Path) -> bool | None:
    """Return whether the disk of a mount turns, as the kernel says; None if it is no local disk.

    Virtual disks say that they turn, whatever they lie on, so a virtual machine's yes is no answer.
    """
    numbers = [mount.number]
    if mount.source.startswith("/dev/"):  # file systems of several devices, such as btrfs, have a number of their own
        with suppress(OSError):
            number = os.stat(mount.source).st_rdev
            numbers.append(f"{os.major(number)}:{os.minor(number)}")
    for each in numbers:
        device = Path(os.path.realpath(root / "sys/dev/block" / each))
        for folder in (device, device.parent):  # a partition lies in the folder of its disk
            with suppress(OSError):
                if (folder / "queue/rotational").read_text().strip() != "1":
                    return False
                virtual = folder.name.startswith(("vd", "xvd", "nbd", "dm-", "loop"))
                flags = r"^flags\s*:.*\bhypervisor\b"
                virtual = virtual or re.search(flags, (root / "proc/cpuinfo").read_text(), re.MULTILINE) is not None
                return None if virtual else True
    return None
