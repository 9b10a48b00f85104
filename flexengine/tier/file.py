"""Reads and writes of files, direct (O_DIRECT) or through the page cache, and the choice of the faster way."""

import ctypes
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from flexengine.system.read_retries import located, patiently
from flexengine.tier.base import ALIGN

MOST_PARTS = os.sysconf("SC_IOV_MAX")  # buffers that one system call can fill
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems without direct I/O (tmpfs, some network ones)


class File:
    """A file that is opened twice, for reads through the page cache and for direct I/O. path: also for messages."""

    def __init__(self, path: str | Path, flags: int) -> None:
        self.path = Path(path)
        self.cached = os.open(path, flags, 0o600)
        self.direct: int | None = None  # if the file system has no direct I/O
        # Whether some of the file is not in the page cache, or the system only has reads that wait for the disk; None
        # before a byte was asked for.
        self.uncached: bool | None = None if hasattr(os, "RWF_NOWAIT") else True
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

    def read_cached(self, parts: Sequence[memoryview], offset: int, needed: int) -> bool:
        """Read from byte `offset` on if the page cache holds at least `needed` bytes there, and return whether it does.

        A read that does not wait makes the system read what is missing, so a file is asked for one byte first, and not
        again after a byte that was not there.
        """
        if self.uncached is None:
            there = self._resident([memoryview(bytearray(1))], offset) == 1
            if self.uncached is None:  # else another thread has found a byte that is not there
                self.uncached = not there
        if self.uncached:
            return False
        if self._resident(parts, offset) >= needed:
            return True
        self.uncached = True  # never set back, as other threads read the file, too
        return False

    def _resident(self, parts: Sequence[memoryview], offset: int) -> int:
        """Read up to the first byte that is not in the page cache, and return the number of bytes."""
        try:
            return patiently(partial(os.preadv, self.cached, parts, offset, os.RWF_NOWAIT), self.path, offset)
        except OSError as error:
            if error.errno in (*_NOT_DIRECT, errno.EAGAIN):  # the file system does not know the flag
                return 0
            raise

    def transfer(self, call: Callable[..., int], parts: Sequence[memoryview], offset: int, direct: bool) -> int:
        """Call os.preadv or os.pwritev with buffers of consecutive bytes from byte `offset` of the file on, and return
        the number of bytes moved. Direct I/O is used if `direct` is true and the file system supports it."""
        if direct and (fd := self.direct) is not None:
            try:
                return call(fd, parts, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.direct = None  # some file systems accept O_DIRECT in open, but fail each transfer
        return call(self.cached, parts, offset)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor."""
    buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(buffer).cast("B")


def read_fully(file: File, targets: Sequence[memoryview], offset: int, direct: bool) -> int:
    """Read from byte `offset` on until all targets are full or the file ends, and return the number of bytes read.
    Direct I/O is used if the file system supports it. A read that fails with EIO is retried; then OSError names the
    file and the byte."""
    got, left = 0, list(targets)
    while left:
        read = partial(file.transfer, os.preadv, left[:MOST_PARTS], offset + got, direct)
        n = patiently(read, file.path, offset + got)
        if n == 0:
            break
        got, left = got + n, _after(left, n)
        if direct and n % ALIGN:
            direct = False  # the end of the file or a short read: the remaining bytes are not aligned
    return got


def _after(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    left = list[memoryview]()
    for part in parts:
        if nbytes < len(part):
            left.append(part[nbytes:])
        nbytes = max(0, nbytes - len(part))
    return left


def write_fully(file: File, sources: Sequence[memoryview], offset: int) -> None:
    """Write all sources one after the other, by direct I/O if the file system supports it; short writes are continued.

    Writes are not retried: after an error the kernel may have discarded dirty pages. Raise OSError if a write failed;
    the message names the file and the byte.
    """
    left = list(sources)
    while left:
        try:
            n = file.transfer(os.pwritev, left[:MOST_PARTS], offset, direct=offset % ALIGN == 0)
        except OSError as error:
            raise located(error, "writing", file.path, offset) from error
        offset, left = offset + n, _after(left, n)


class FasterWay:
    """Choice between direct and cached reads for long sequential reads, from the measured rates of these reads.

    Cached reads take twice the CPU time. They are tried only if direct reads take at least the share BUSY of the time.
    With a smaller share, the disk lane mostly waits: for a weight slot that the device still uses (always so with one
    slot), or for the spill file.

    A probe before the job cannot find the faster way. On one virtual disk, direct reads gave 0.9 to 2.7 GB/s with idle
    cores (which respond late to interrupts) and 2.1 GB/s while both cores computed; cached reads gave 2.4 and 1.8 GB/s.
    So after FIRST turns of TURN bytes of direct reads, each way gets turns until both have LEARN, then the faster way
    is used. One turn of cached reads is enough if direct ones are CLEAR times as fast. After REVIEW turns the slower
    way gets one turn, and if it is still slower, again after twice as many, up to SELDOM.
    """

    TURN = 256 << 20  # bytes; readahead reaches its full rate after tens of MB
    FIRST, LEARN, REVIEW, SELDOM = 16, 3, 16, 128  # turns; a short job would lose more to a slow one than it gains
    CLEAR = 1.5  # ratio of rates; where the page cache got new pages, cached reads were 2.5 times as slow
    BUSY = 0.8  # share of the elapsed time

    def __init__(self) -> None:
        self.direct = True  # whether the next reads are direct
        self.held = False  # whether `direct` stays fixed; `note` then only measures, and no read asks the page cache
        self._rates: dict[bool, float] = {}
        self._turns: defaultdict[bool, int] = defaultdict(int)
        self._bytes, self._seconds, self._since = 0, 0.0, -1.0
        self._best: bool | None = None  # whether direct reads were the faster ones after the last turn
        self._pause = self._left = self.REVIEW  # turns from one review to the next, and turns left until then
        self._reviewing = False

    def note(self, nbytes: int, began: float, ended: float) -> None:
        """Add one read, made as `direct` says, to the measurement; at the end of a turn this may change `direct`.

        Args:
            nbytes: bytes read.
            began: start of the read, in seconds of any one clock.
            ended: end of the read, in seconds of the same clock.
        """
        if self._since < 0:
            self._since = began
        self._bytes, self._seconds = self._bytes + nbytes, self._seconds + ended - began
        if self._bytes < self.TURN:
            return
        rate, elapsed = self._bytes / max(self._seconds, 1e-9), ended - self._since
        old = rate if self._reviewing else self._rates.get(self.direct, rate)  # rates of long ago do not count
        self._rates[self.direct] = old + (rate - old) / 3
        self._turns[self.direct] += 1
        direct = self._seconds if self.direct else self._bytes / self._rates[True]
        self._bytes, self._seconds, self._since = 0, 0.0, ended
        if self._reviewing:
            self._left = self._pause = min(2 * self._pause, self.SELDOM)
            self._reviewing = False
        if not self.held:
            self.direct = direct < self.BUSY * elapsed or self._next()

    def _next(self) -> bool:
        """Return whether the reads of the next turn are direct, if the disk is busy."""
        early = self._turns[True] < self.FIRST
        clear = self._turns[False] > 0 and self._rates[True] >= self.CLEAR * self._rates[False]
        if early or (not clear and min(self._turns[False], self._turns[True]) < self.LEARN):
            return early or not self.direct
        best = self._rates[True] >= self._rates[False]
        if best is not self._best:
            self._best, self._left, self._pause = best, self.REVIEW, self.REVIEW
        self._left -= 1
        self._reviewing = self._left < 0
        return best is not self._reviewing
