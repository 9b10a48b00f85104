"""Memory and processors of an attention worker, which all its engines share."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Member(Protocol):
    """The connection of one engine."""

    def leave(self) -> None:
        """End the connection, and return when its memory is given back."""


class Pool:
    """What engines share. Threads may call all methods at the same time.

    Questions of all engines are computed one after the other, in the order in which they came, so each has all
    processors. Answers are sent by other threads: an engine that does not read them delays no other.

    Attributes:
        memory: most bytes of pages, of all engines together.
        taken: bytes of pages that engines hold.
    """

    def __init__(self, memory: int) -> None:
        self.memory, self.taken = memory, 0
        self._lock = threading.Lock()
        self._members: dict[int, Member] = {}  # by number of the engine
        self._thread = ThreadPoolExecutor(1, "flexengine-attention", lambda: torch.set_grad_enabled(False))

    @property
    def free(self) -> int:
        """Bytes that no engine holds."""
        return self.memory - self.taken

    def take(self, nbytes: int) -> bool:
        """Take memory. Return False, without taking any, if fewer bytes are free."""
        with self._lock:
            if nbytes > self.free:
                return False
            self.taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Give memory back."""
        with self._lock:
            self.taken -= nbytes

    def compute(self, work: Callable[[], T]) -> "Future[T]":
        """Queue a computation. Return its result, when it has ended, or its error."""
        return self._thread.submit(work)

    def join(self, engine: int, member: Member) -> None:
        """Add a connection. If the same engine has an older one, which is lost, the older one ends first.

        Args:
            engine: number that the engine has drawn.
            member: the connection.
        """
        with self._lock:
            older, self._members[engine] = self._members.get(engine), member
        if older is not None:
            older.leave()

    def part(self, engine: int, member: Member) -> None:
        """Remove a connection, unless a newer one has replaced it."""
        with self._lock:
            if self._members.get(engine) is member:
                del self._members[engine]

    def close(self) -> None:
        """End the thread that computes. Work that it has not begun is cancelled."""
        self._thread.shutdown(cancel_futures=True)
