"""Byte-exact account of one memory: what is reserved, by whom, and the most there ever was."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flexengine.errors import OutOfMemory


class Ledger:
    """Reservations in one memory of `capacity` bytes (None: as much as is asked). Safe from any thread."""

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.name, self.capacity = name, capacity
        self.used = self.peak = 0
        self.entries: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, what: str) -> None:
        """Books nbytes for `what`. Raises OutOfMemory, booking nothing, when they do not fit."""
        with self._lock:
            if self.capacity is not None and self.used + nbytes > self.capacity:
                raise OutOfMemory(self.name, what, nbytes, self.used, self.capacity)
            self.entries[what] = self.entries.get(what, 0) + nbytes
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    @contextmanager
    def booked(self, nbytes: int, what: str) -> Iterator[None]:
        """Reserve nbytes for `what` while its memory is taken, and release them again if that raises."""
        self.reserve(nbytes, what)
        try:
            yield
        except BaseException:
            self.release(nbytes, what)
            raise

    def restart_peak(self) -> None:
        """From now on `peak` tells of what comes."""
        with self._lock:
            self.peak = self.used

    def release(self, nbytes: int, what: str) -> None:
        """Gives back nbytes booked for `what`. Releasing more than is booked is a fault of the caller: ValueError."""
        with self._lock:
            if self.entries.get(what, 0) < nbytes:
                raise ValueError(f"{self.name}: {what} releases {nbytes} of {self.entries.get(what, 0)} bytes")
            self.entries[what] -= nbytes
            if not self.entries[what]:
                del self.entries[what]
            self.used -= nbytes
