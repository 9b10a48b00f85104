"""Memory that each sequence has while it lives: KV pages, and records of fixed size (docs/architecture.md 7)."""

from abc import ABC, abstractmethod

from flexengine.errors import OutOfMemory
from flexengine.plan.layout import MEAN_KEYS
from flexengine.schedule.sweeps import Sequence

# Kinds of state beside KV pages (`pools.Pools`), by their name in the account of a layout's device, which books their
# bytes: a class as module:name, which is imported for jobs that have the state. `Cache` makes it of model, layout,
# machine and regions.
STATES = {MEAN_KEYS: "flexengine.worker.cache.smoothing:Smoothing"}


class SequenceState(ABC):
    """One kind of state, of all sequences. A sweep may be repeated: claims of what is held already change nothing."""

    @abstractmethod
    def claim(self, sequence: Sequence, tokens: int) -> None:
        """Take memory for the sequence until it can hold `tokens` tokens. It shares the state of its source."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Give the sequence's memory back, also if it has none."""


class Pages:
    """Ids 0 .. count-1 of one pool. The page freed last is handed out first, so that warm memory is reused. Sequences
    may share a page; the page is free when the last of them has given it back."""

    def __init__(self, tier: str, count: int) -> None:
        self.tier, self.count = tier, count
        self._free = list(range(count - 1, -1, -1))
        self._more: dict[int, int] = {}  # by page that several sequences hold: how many beside the first

    @property
    def used(self) -> int:
        """Number of pages that some sequence holds."""
        return self.count - len(self._free)

    def take(self, n: int) -> list[int]:
        """Return n free pages, now held once. Raise OutOfMemory if there are fewer: admission by forecast makes that a
        fault of the schedule."""
        if n > len(self._free):
            raise OutOfMemory(self.tier, f"{n} KV pages (counted in pages)", n, self.used, self.count)
        return [self._free.pop() for _ in range(n)]

    def share(self, pages: list[int]) -> list[int]:
        """Return the same pages, each held once more."""
        for page in pages:
            self._more[page] = self._more.get(page, 0) + 1
        return list(pages)

    def is_shared(self, page: int) -> bool:
        """Return whether several sequences hold a page."""
        return page in self._more

    def give(self, pages: list[int]) -> None:
        """Give pages back, each held once less. Those that no sequence holds any more are free."""
        for page in reversed(pages):
            if more := self._more.pop(page, 0):
                if more > 1:
                    self._more[page] = more - 1
            else:
                self._free.append(page)


class SequenceRecords(SequenceState):
    """A record of fixed size for each sequence: a page that never fills. A sequence has the record of its source."""

    def __init__(self, tier: str, count: int) -> None:
        self._free = Pages(tier, count)
        self.number: dict[int, int] = {}  # by sequence id: number of its record

    def claim(self, sequence: Sequence, tokens: int) -> None:
        if sequence.id not in self.number:
            source = sequence.source
            (number,) = self._free.share([self.number[source.id]]) if source else self._free.take(1)
            self.number[sequence.id] = number

    def release(self, sequence: Sequence) -> None:
        if sequence.id in self.number:
            self._free.give([self.number.pop(sequence.id)])
