"""Removal of items of the cache, with locks, and relative to open directories so that no link leads outside."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

from flexengine.shell.cachedir.items import FOLDER, IN_USE, WRITTEN, CacheItem, key_of, opened


class Kept(Exception):
    """An item was not removed; the message gives the reason."""


def remove(root: Path, item: CacheItem) -> None:
    """Remove an item of the cache directory `root`.

    A prepared directory is renamed while it is locked, so that no job finds a part of it, and then removed. If this
    process is killed meanwhile, the next job that prepares something removes the rest.

    Raises:
        Kept: a process uses or writes the item, or it has changed since it was listed.
        OSError: it cannot be removed.
    """
    if item.busy:
        raise Kept(item.busy)
    try:
        with opened(root, os.O_DIRECTORY) as top, opened(item.folder, FOLDER, top) as place:
            _check_same(place, item)
            if item.folder == "prepared":
                _remove_prepared(place, item)
            elif item.kind == "leftovers" and item.folder == "kernels":
                shutil.rmtree(item.file, dir_fd=place)
            else:
                os.unlink(item.file, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise Kept("changed since it was listed") from error
        raise


def _remove_prepared(place: int, item: CacheItem) -> None:
    key = key_of(item.file)
    garbage = f"{key}.tmp-{os.getpid()}"
    with opened(f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, place) as lock:
        _lock(lock, WRITTEN)
        with opened(item.file, FOLDER, place) as directory:
            _lock(directory, IN_USE)
            _check_same(place, item)
            if item.file != garbage:
                shutil.rmtree(garbage, ignore_errors=True, dir_fd=place)
                os.rename(item.file, garbage, src_dir_fd=place, dst_dir_fd=place)
        shutil.rmtree(garbage, dir_fd=place)


def _lock(handle: int, reason: str) -> None:
    """Take the exclusive lock of a file or directory until it is closed. Raise Kept with the reason if another process
    holds a lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Kept(reason) from error


def _check_same(place: int, item: CacheItem) -> None:
    about = os.stat(item.file, dir_fd=place, follow_symlinks=False)
    if (about.st_dev, about.st_ino) != item.inode:
        raise Kept("changed since it was listed")
