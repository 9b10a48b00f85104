"""A job in numbers: how many sequences of each size it has."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from flexengine.schedule.pages import Pool


@dataclass(frozen=True)
class Workload:
    """How many sequences there are of each size. sizes: (prompt tokens, most tokens to generate) to their number."""

    sizes: Mapping[tuple[int, int], int]

    @staticmethod
    def of(lengths: Iterable[tuple[int, int]]) -> "Workload":
        """The workload of sequences with these sizes."""
        return Workload(Counter(lengths))

    def up_to(self, tokens: int) -> "Workload":
        """The sequences of at most so many tokens at their end."""
        return Workload({(p, n): times for (p, n), times in self.sizes.items() if p + n <= tokens})

    @cached_property
    def count(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """(Peak cached tokens, number of sequences), falling."""
        return sorted(((p + n - 1, times) for (p, n), times in self.sizes.items()), reverse=True)

    @cached_property
    def _prompts(self) -> list[tuple[int, int]]:
        """(Prompt tokens, number of sequences), falling."""
        return sorted(((p, times) for (p, _), times in self.sizes.items()), reverse=True)

    @cached_property
    def longest(self) -> int:
        """Peak cached tokens of the longest sequence; the last token generated is never cached."""
        return max((n for n, _ in self._ends), default=1)

    def pages(self, count: int, pool: Pool) -> int:
        """Return the pages of a pool that the `count` longest sequences take at their peak."""
        return sum(times * pool.held(n) for n, times in _first(self._ends, count))

    def prompt_tokens(self, count: int) -> int:
        """Tokens of the `count` longest prompts together."""
        return sum(times * n for n, times in _first(self._prompts, count))


def _first(numbers: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """The first `count` of numbers given as (number, how often it occurs)."""
    for number, times in numbers:
        if count <= 0:
            return
        yield number, min(times, count)
        count -= times
