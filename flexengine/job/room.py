"""Messages for a full disk: which file system is full, what is free, and what there belongs to flexengine."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flexengine.config import cache_root
from flexengine.errors import InvalidInput

_FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: OSError, directory: str | os.PathLike[str], needed: int = 0, own: Path | None = None) -> str:
    """Return what a full disk has free and what to free there, as text; "" if the error is not that of a full disk.

    Args:
        error: error of a write.
        directory: directory that was written to.
        needed: about how many bytes are needed there; 0 if unknown.
        own: the job's journal; None if there is none.
    """
    if error.errno not in _FULL:
        return ""
    place = Path(directory)
    try:
        free, device = shutil.disk_usage(place).free, place.stat().st_dev
    except OSError:
        return f"the disk of {place} is full; free space there"
    parts = [f"the disk of {place} is full: {free:,} bytes are free"]
    if needed:
        parts[0] += f", about {needed:,} are needed"
    if error.errno == errno.EDQUOT:
        parts.append("your quota may allow less")
    if own is not None:
        parts.append(f"the journal {own} takes {size_of(own):,} bytes, and must be kept, as it holds the results")
    return "; ".join([*parts, *_cache_on(device), "free space there"])


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _cache_on(device: int) -> Iterator[str]:
    """Yield a text about the cache, if it is on this device and holds anything."""
    try:
        root = cache_root()
        if root.stat().st_dev == device and (total := sum(size_of(path) for path in root.rglob("*") if path.is_file())):
            yield f"the cache {root} takes {total:,} bytes, and may be deleted while no job runs"
    except (OSError, InvalidInput):
        return
