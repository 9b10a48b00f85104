"""Locks on prepared directories that processes use, so that `flexengine cache clear` removes none of them.

A process that uses a prepared directory holds a shared flock on the directory until the process ends. A process that
removes a prepared directory first takes the exclusive lock, and renames the directory before it releases the lock.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from flexengine.config import mark_used

_held: dict[Path, int] = {}  # descriptor by directory


def hold(directory: Path) -> bool:
    """Lock a prepared directory for use until this process ends, and mark it as used now.

    Where the file system has no locks, the directory is used without.

    Returns:
        False if the directory does not exist, or was removed or replaced while this call waited for the lock.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not _is(descriptor, directory):
        os.close(descriptor)
        return False
    known = _held.get(directory)
    if known is not None and _is(known, directory):
        os.close(descriptor)
    else:
        _held[directory] = descriptor
        if known is not None:
            os.close(known)
    mark_used(directory)
    return True


def _is(descriptor: int, directory: Path) -> bool:
    """Return whether the descriptor is that of the directory which now has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(directory))
    except OSError:
        return False
