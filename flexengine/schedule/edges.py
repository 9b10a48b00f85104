"""Dependencies of a task on earlier tasks that name the same resources (docs/architecture.md 3)."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Done = TypeVar("Done")


class Edges(Generic[Done]):
    """Read-after-write, write-after-read and write-after-write dependencies.

    `Done` is the type of the objects that stand for the end of a task: `runtime.lane.Done`, or a time in a simulation.
    """

    def __init__(self) -> None:
        self.writer: dict[Hashable, Done] = {}
        self.readers: dict[Hashable, list[Done]] = {}

    def add(self, reads: Iterable[Hashable], writes: Iterable[Hashable], done: Done) -> list[Done]:
        """Add a task, in program order. Return the ends of the tasks that it must wait for."""
        reads, writes = tuple(reads), tuple(writes)
        after = [self.writer[r] for r in reads if r in self.writer]
        for resource in writes:
            readers = self.readers.pop(resource, [])
            after += readers
            if not readers and resource in self.writer:  # else the readers wait for the writer
                after.append(self.writer[resource])
        for resource in reads:
            self.readers.setdefault(resource, []).append(done)
        for resource in writes:
            self.writer[resource] = done
        return after
