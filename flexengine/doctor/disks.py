"""Directories that jobs read and write, and the file systems that they lie on."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_NETWORK_NAMES = """
nfs nfs4 cifs smb3 smbfs ceph fuse.ceph glusterfs fuse.glusterfs lustre beegfs gpfs fuse.sshfs fuse.s3fs fuse.gcsfuse
fuse.rclone 9p afs
"""
_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
_NETWORK = frozenset(_NETWORK_NAMES.split())


@dataclass(frozen=True)
class Disk:
    """A directory and its file system.

    Attributes:
        use: purpose of the directory: cache, offload, hub or current.
        path: path of the directory, which may be missing.
        exists: whether the directory exists.
        mount: where its file system is mounted.
        filesystem: type, such as ext4.
        device: number of the device; directories with the same number share a disk.
        total: bytes of the file system.
        free: bytes that this user can write.
        writable: whether this user can write there, or create the directory.
        in_ram: whether files lie in RAM.
        network: whether files lie on another machine.
        rotational: whether the disk turns; None if not known, as of most disks of virtual machines.
    """

    use: str
    path: str
    exists: bool
    mount: str
    filesystem: str
    device: int
    total: int
    free: int
    writable: bool
    in_ram: bool
    network: bool
    rotational: bool | None


class _Mount(NamedTuple):
    number: str  # of the device, as major:minor
    point: str
    filesystem: str
    source: str


def disk(use: str, path: Path, root: Path = Path("/")) -> Disk:
    """Return a directory's file system. It may be missing: then that of its nearest parent.

    Args:
        use: see Disk.
        path: path of the directory.
        root: directory that holds proc/ and sys/.
    """
    from flexengine.tier.limits import device_of, nearest

    there = Path(os.path.realpath(nearest(path)))
    mount = _mount_of(there, list(_mounts(root)))
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


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        first, _, last = line.partition(" - ")
        fields, others = first.split(" "), last.split(" ")
        yield _Mount(fields[2], _unescaped(fields[4]), others[0], _unescaped(others[1]))


def _mount_of(path: Path, mounts: Sequence[_Mount]) -> _Mount:
    """Return the mount that holds a path: the one of the longest mount point, and of these the last."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    longest = max(len(mount.point) for mount in holding)
    return [mount for mount in holding if len(mount.point) == longest][-1]


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
                turns = (folder / "queue/rotational").read_text().strip() == "1"
                return None if turns and _is_virtual(folder, root) else turns
    return None


def _is_virtual(device: Path, root: Path) -> bool:
    if device.name.startswith(("vd", "xvd", "nbd", "dm-", "loop")):
        return True
    with suppress(OSError):
        return re.search(r"^flags\s*:.*\bhypervisor\b", (root / "proc/cpuinfo").read_text(), re.MULTILINE) is not None
    return False


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
