"""Reads that are tried again: after EIO, a cable or a network disk may have recovered."""

import errno
import io
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAUSES = (0.1, 0.4, 1.6)  # seconds before a failed read is tried again

log = logging.getLogger(__name__)


def patiently(read: Callable[[], int], path: Path, offset: int) -> int:
    """What `read` returns, which reads at byte `offset` of a file. One that fails with EIO is called again after each
    of PAUSES. Raises OSError that names file and byte."""
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
    """The same error, naming file and byte."""
    return OSError(error.errno, f"{error.strerror} ({doing} byte {offset:,})", str(path))


def opened(path: Path) -> io.BufferedReader:
    """A file open for reading, whose reads are `patiently` done."""
    return io.BufferedReader(_Patient(path))


class _Patient(io.FileIO):
    """All its reads go through readinto, and that through os, where tests make them fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, opener=os.open)
        self._path = path

    def readinto(self, target: Any) -> int:
        at = self.tell()
        count = patiently(lambda: os.preadv(self.fileno(), [target], at), self._path, at)
        self.seek(at + count)
        return count

    def read(self, size: int | None = -1) -> Any:
        return io.RawIOBase.read(self, -1 if size is None else size)

    def readall(self) -> Any:
        return io.RawIOBase.readall(self)
