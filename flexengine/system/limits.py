"""Memory, cores, disk space and GPU that this process may use, within the limits of cgroups (v1 and v2)."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from flexengine.errors import InvalidInput

_IN_RAM = ("tmpfs", "ramfs")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of RAM this process can still take: free RAM, or less if its cgroups have less left. root:
    directory that holds proc/ and sys/."""
    free: int = psutil.virtual_memory().available
    return min([free, *(limit - used for limit, used in cgroup_memory(root))])


def total_memory(root: Path = Path("/")) -> int:
    """Return the smaller of the machine's RAM and the limits of this process's cgroups, in bytes, used or not."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in cgroup_memory(root))])


def cgroup_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (limit, used) bytes of each memory cgroup of this process that has a limit.

    `used` does not count inactive page cache, which the kernel can drop.
    """
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    entries = (_read(folder, *names[version]) for version, folder in _cgroups(root, "memory"))
    return [entry for entry in entries if entry is not None]


def cgroup_cores(root: Path = Path("/")) -> float | None:
    """Return the cores that this process's cgroups let it use, as CPU seconds per second; None if there is no limit."""
    quotas = [_quota(version, folder) for version, folder in _cgroups(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def has_gpu() -> bool:
    """Return whether torch can use a CUDA GPU."""
    import torch  # `doctor` reads limits in a process that must not import it

    return torch.cuda.is_available()


def usable_cores() -> float:
    """Return the cores that this process may use, as CPU seconds per second."""
    return min(float(len(os.sched_getaffinity(0))), cgroup_cores() or math.inf)


def _quota(version: int, folder: Path) -> float | None:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is a ValueError: no limit
        return None


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (cgroup version, directory) of the cgroups of this process for a controller, the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == base.parent:
                break
            yield version, folder


def _read(folder: Path, limit_file: str, used_file: str, cached: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_file).read_text())  # "max" is a ValueError: no limit
        used = int((folder / used_file).read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return (limit, max(0, used - int(stats.get(cached, 0)))) if limit < _UNLIMITED else None


def usable_disk(directory: Path) -> int:
    """Return the free bytes, more than 0, of the file system where `directory` is or would be made. Raise InvalidInput
    if no file can be written there; the message gives the reason."""
    here = nearest(directory)
    try:
        if not here.is_dir() or not os.access(here, os.W_OK):
            raise InvalidInput(f"offload directory {directory}: {here} is no directory to write in; set --offload-dir")
        free = shutil.disk_usage(os.fspath(here)).free
    except OSError as error:
        raise InvalidInput(f"offload directory {directory}: {error}; set --offload-dir") from error
    if not free:
        raise InvalidInput(f"offload directory {directory} is on a file system without free space; set --offload-dir")
    return free


def in_ram(directory: Path) -> bool:
    """Return whether the file system where `directory` is or would be made keeps its files in RAM."""
    device = nearest(directory).stat().st_dev
    for mounted in psutil.disk_partitions(all=True):
        if mounted.fstype in _IN_RAM:
            with contextlib.suppress(OSError):  # mount points of other users cannot be read
                if os.stat(mounted.mountpoint).st_dev == device:
                    return True
    return False


def device_of(path: Path) -> int:
    """Return the number of the device on which a file or directory lies or would be made."""
    return nearest(path).lstat().st_dev


def nearest(directory: Path) -> Path:
    """Return the directory itself, or its nearest parent that exists."""
    here = directory.absolute()
    while not os.path.lexists(here):
        here = here.parent
    return here
