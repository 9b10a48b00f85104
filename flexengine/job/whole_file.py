"""Writing of files that appear complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from flexengine.job.room import full_disk


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
