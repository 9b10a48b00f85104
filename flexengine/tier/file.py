"""Open files: whole reads and writes, directly (O_DIRECT) or through the page cache, and which of the two is faster."""

import ctypes
import errno
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from flexengine.reading import located, patiently
from flexengine.tier.base import ALIGN

_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)  # what file systems without direct I/O answer (tmpfs, some network ones)


class File:
    """A file open both ways; `direct` is None where the file system has no direct I/O."""

    def __init__(self, path: str | Path, flags: int) -> None:
        self.path = Path(path)
        self.cached = os.open(path, flags, 0o600)
        self.direct: int | None = None
        try:
            self.direct = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                os.close(self.cached)
                raise
        self._open = [fd for fd in (self.cached, self.direct) if fd is not None]

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)

    def transfer(self, call: Callable[..., int], part: memoryview, offset: int, direct: bool) -> int:
        """os.preadv or os.pwritev of one buffer, directly if wanted and possible; the bytes moved."""
        if direct and (fd := self.direct) is not None:
            try:
                return call(fd, [part], offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.direct = None  # it opened, but it cannot
        return call(self.cached, [part], offset)


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(buffer).cast("B")


def read_fully(file: File, target: memoryview, offset: int, direct: bool) -> int:
    """Reads until `target` is full or the file ends; returns the bytes read. direct: if the file can be.

    A read that fails with EIO is tried again. Raises OSError that names file and byte.
    """
    got = 0
    while got < len(target):
        n = _read(file, target[got:], offset + got, direct)
        if n == 0:
            break
        got += n
        if direct and n % ALIGN:
            direct = False  # the tail of the file, or an odd stop: the rest is not aligned
    return got


def _read(file: File, target: memoryview, offset: int, direct: bool) -> int:
    return patiently(lambda: file.transfer(os.preadv, target, offset, direct), file.path, offset)


def write_fully(file: File, source: memoryview, offset: int) -> None:
    """Writes all of `source`, directly if the file can be; short writes are continued.

    Nothing is tried again: after a failed write nobody knows what the system has dropped. Raises OSError that names
    file and byte.
    """
    done = 0
    while done < len(source):
        try:
            done += file.transfer(os.pwritev, source[done:], offset + done, direct=done % ALIGN == 0)
        except OSError as error:
            raise located(error, "writing", file.path, offset + done) from error


class FasterWay:
    """Whether long sequential reads go directly or through the page cache, learned from the reads themselves.

    Cached reads take twice the processor time. So they are tried only if direct reads take at least BUSY of the time.
    If they take less, the disk lane is waiting: for a weight slot that the device still uses (with one slot it always
    is), or for the spill file.

    Which way is faster a probe beforehand cannot tell. On one virtual disk direct reads gave 0.9 to 2.7 GB/s on idle
    cores and 2.1 while both computed (idle cores answer its interrupts late); cached ones 2.4 and 1.8. So the ways take
    turns, LEARN each, and then the faster one is kept; every REVIEW turns the other gets one.

    direct: the way that reads go now. held: whether it stays so, whatever is noted.
    """

    TURN = 256 << 20  # bytes; readahead needs tens of MB to get going
    LEARN, REVIEW = 3, 16
    BUSY = 0.8

    def __init__(self) -> None:
        self.direct, self.held = True, False
        self._rates: dict[bool, float] = {}
        self._turns: defaultdict[bool, int] = defaultdict(int)
        self._bytes, self._seconds, self._since = 0, 0.0, -1.0

    def note(self, nbytes: int, began: float, ended: float) -> None:
        """Tells of a read made the way `direct` says, after the one before; may change it. began, ended: seconds of one
        clock."""
        if self._since < 0:
            self._since = began
        self._bytes, self._seconds = self._bytes + nbytes, self._seconds + ended - began
        if self._bytes < self.TURN:
            return
        rate, elapsed = self._bytes / max(self._seconds, 1e-9), ended - self._since
        old = self._rates.get(self.direct, rate)
        self._rates[self.direct] = old + (rate - old) / 3
        self._turns[self.direct] += 1
        direct = self._seconds if self.direct else self._bytes / self._rates[True]
        self._bytes, self._seconds, self._since = 0, 0.0, ended
        if self.held:
            return
        if direct < self.BUSY * elapsed:
            self.direct = True
            return
        if self._turns[False] < self.LEARN or self._turns[True] < self.LEARN:
            self.direct = not self.direct
            return
        best = self._rates[True] >= self._rates[False]
        review = sum(self._turns.values()) % self.REVIEW == 0
        self.direct = best is not review
