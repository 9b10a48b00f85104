"""Reads that are retried after EIO: a loose cable or a network disk may have recovered."""

import errno
import io
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAUSES = (0.1, 0.4, 1.6)  # seconds before each retry of a failed read

log = logging.getLogger(__name__)


def patiently(read: Callable[[], int], path: Path, offset: int) -> int:
    """Return what `read` returns. Call it again after each of PAUSES while it fails with EIO. Raise OSError if the last
    read failed, or one failed with another error. The message names file and byte.

    Args:
        read: reads the file at `offset`.
        path: the file, for messages.
        offset: byte of the file, for messages.
    """
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise located(error, "reading", path, offset) from error
            log.warning("%s: reading byte %s failed (%s); trying again", path, f"{offset:,}", error.strerror)
        time.sleep(pause)
    try:
        return read()
    except OSError as error:
        raise located(error, f"{len(PAUSES) + 1} times, reading", path, offset) from error


def located(error: OSError, doing: str, path: Path, offset: int) -> OSError:
    """Return the error with file and byte added to its message. doing: what failed, such as "reading"."""
    return OSError(error.errno, f"{error.strerror} ({doing} byte {offset:,})", str(path))


def opened(path: Path) -> io.BufferedReader:
    """Open a file for reading. Its reads are retried by `patiently`."""
    return io.BufferedReader(_Patient(path))


class _Patient(io.FileIO):
    """A raw file whose reads all pass through `readinto` and `os.preadv`. Tests replace `os.preadv` by faults."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, opener=os.open)
        self._path = path

    def readinto(self, target: Any) -> int:
        offset = self.tell()
        count = patiently(lambda: os.preadv(self.fileno(), [target], offset), self._path, offset)
        self.seek(offset + count)
        return count

    def read(self, size: int | None = -1) -> Any:
        return io.RawIOBase.read(self, -1 if size is None else size)

    def readall(self) -> Any:
        return io.RawIOBase.readall(self)
