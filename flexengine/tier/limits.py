"""What this process may really use: free RAM, cgroup limits of both versions, free disk."""

import contextlib
import os
import shutil
from pathlib import Path

import psutil

from flexengine.errors import InvalidInput

_IN_RAM = ("tmpfs", "ramfs")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM this process can still take: free RAM, cut by what its cgroups leave."""
    free: int = psutil.virtual_memory().available
    return min([free, *(limit - used for limit, used in cgroup_memory(root))])


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process could take if nothing else took any: the machine's, or its cgroups' limit."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in cgroup_memory(root))])


def cgroup_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(limit, used) bytes of every memory cgroup around this process that has a limit; page cache is not counted."""
    found: list[tuple[int, int]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder == base.parent:
                break
            if (entry := _read(folder, *names)) is not None:
                found.append(entry)
    return found


def _read(folder: Path, limit_file: str, used_file: str, cached: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_file).read_text())  # "max" is a ValueError: no limit
        used = int((folder / used_file).read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return (limit, max(0, used - int(stats.get(cached, 0)))) if limit < _UNLIMITED else None


def usable_disk(directory: Path) -> int:
    """Return the free bytes where `directory` is or would be made; at least one.

    Raises:
        InvalidInput: nothing can be written there, with the reason.
    """
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
    """Whether the file system where `directory` is or would be made keeps its files in RAM."""
    device = nearest(directory).stat().st_dev
    for mounted in psutil.disk_partitions(all=True):
        if mounted.fstype in _IN_RAM:
            with contextlib.suppress(OSError):  # it may be another user's
                if os.stat(mounted.mountpoint).st_dev == device:
                    return True
    return False


def nearest(directory: Path) -> Path:
    """Return the directory itself, or the nearest one above it that is there and may be looked at."""
    here = directory.absolute()
    while not os.path.lexists(here):
        here = here.parent
    return here
