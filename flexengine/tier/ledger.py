"""Byte-exact account of one memory: reserved bytes, their purposes, and the peak."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flexengine.errors import OutOfMemory


class Ledger:
    """Reservations in one memory. All methods are thread-safe.

    Attributes:
        name: name of the memory, for messages.
        capacity: bytes that can be reserved; None for no limit.
        used: bytes reserved now.
        peak: largest `used` since the start or the last `restart_peak`, in bytes.
        entries: bytes reserved now, by purpose.
    """

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.name, self.capacity = name, capacity
        self.used = self.peak = 0
        self.entries: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, what: str) -> None:
        """Reserve nbytes for `what`. Raise OutOfMemory, without reserving, if they exceed the capacity."""
        with self._lock:
            if self.capacity is not None and self.used + nbytes > self.capacity:
                raise OutOfMemory(self.name, what, nbytes, self.used, self.capacity)
            self.entries[what] = self.entries.get(what, 0) + nbytes
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    @contextmanager
    def booked(self, nbytes: int, what: str) -> Iterator[None]:
        """Reserve nbytes for `what`, and release them if the block, which allocates the memory, raises."""
        self.reserve(nbytes, what)
        try:
            yield
        except BaseException:
            self.release(nbytes, what)
            raise

    def restart_peak(self) -> None:
        """Set `peak` to `used`, so that it measures the time from now on."""
        with self._lock:
            self.peak = self.used

    def release(self, nbytes: int, what: str) -> None:
        """Release nbytes reserved for `what`. Raise ValueError if fewer are reserved."""
        with self._lock:
            if self.entries.get(what, 0) < nbytes:
                raise ValueError(f"{self.name}: {what} releases {nbytes} of {self.entries.get(what, 0)} bytes")
            self.entries[what] -= nbytes
            if not self.entries[what]:
                del self.entries[what]
            self.used -= nbytes
