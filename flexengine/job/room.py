"""Messages for a full disk: which file system is full, what is free, and what there belongs to flexengine."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flexengine.config import cache_root
from flexengine.errors import InvalidInput

_FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: OSError, directory: str | os.PathLike[str] | None, needed: int = 0, own: str = "") -> str:
    """Return why a write failed and what to free, as text; "" if the disk is not full.

    Args:
        error: error of the write.
        directory: directory that was written to.
        needed: bytes that are needed there; 0 if unknown.
        own: further files of the job in this directory, for the message; "" for none.
    """
    if error.errno not in _FULL or directory is None:
        return ""
    place = Path(directory)
    try:
        free = shutil.disk_usage(place).free
        device = place.stat().st_dev
    except OSError:
        return f"the disk of {place} is full; free space there"
    quota = " (your quota is used up)" if error.errno == errno.EDQUOT else ""
    enough = f", {needed:,} more are needed" if needed else ""
    parts = [own, *_cache_on(device)]
    ours = "; of it " + " and ".join(filter(None, parts)) if any(parts) else ""
    return f"the disk of {place} is full{quota}: {free:,} bytes are free{enough}{ours}; free space there"


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _cache_on(device: int) -> Iterator[str]:
    """Yield the cache's directory and bytes as text, if the cache is on this device and holds anything."""
    try:
        root = cache_root()
        if root.stat().st_dev == device and (total := sum(map(size_of, root.rglob("*")))):
            yield f"{total:,} bytes are the cache {root}, which may be deleted while no job runs"
    except (OSError, InvalidInput):
        return
