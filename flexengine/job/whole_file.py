"""Writing of files that appear complete or not at all, and what a message says if the disk is full."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from flexengine.config import cache_root
from flexengine.errors import InvalidInput


def part_path(output: str | os.PathLike[str]) -> Path:
    """Return the temporary path at which an output file is written before it is renamed."""
    target = Path(output).resolve()
    return target.with_name(target.name + ".part")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing under a temporary name. At the end of the block the file is fsynced and renamed. An
    exception in the block removes it."""
    part, target = part_path(path), Path(path).resolve()
    try:
        part.unlink(missing_ok=True)  # if `part` is a link, the file must not be written to the link's target
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_directory(target.parent)


@contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in an OSError of the block, which writes it, and what to free if the disk is full."""
    try:
        yield
    except OSError as error:
        full = full_disk(error, Path(path).resolve().parent)
        reason = f"{error.strerror}: {full}; the same command then continues" if full else error.strerror
        raise OSError(error.errno, f"the file cannot be written: {reason}", str(path)) from error


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that appears complete or not at all. Raise OSError as `explained` does."""
    with explained(path), whole_file(path) as file:
        file.write(data)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def full_disk(error: OSError, directory: str | os.PathLike[str], needed: int = 0, own: Path | None = None) -> str:
    """Return what a full disk has free and what to free there, as text; "" if the error is not that of a full disk.

    Args:
        directory: directory that was written to.
        needed: about how many bytes are needed there; 0 if unknown.
        own: the job's journal; None if there is none.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
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
    with suppress(OSError, InvalidInput):
        root = cache_root()
        if root.stat().st_dev == device and (total := sum(size_of(path) for path in root.rglob("*") if path.is_file())):
            parts.append(f"the cache {root} takes {total:,} bytes, and may be deleted while no job runs")
    return "; ".join([*parts, "free space there"])


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
