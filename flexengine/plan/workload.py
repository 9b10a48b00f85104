"""A job in numbers: the number of sequences of each size."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexengine.schedule.pages import Pool

Size = tuple[int, int]  # prompt tokens, most tokens to generate
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Number of sequences of each size."""

    sizes: Mapping[Size, int]  # (prompt tokens, most tokens to generate) -> number of sequences
    # by size, prompt tokens that a sequence spares on average because it shares them: of a prefix that m
    # sequences share, each spares (m - 1) / m
    spared: Mapping[Size, float] = field(default_factory=dict)
    stems: int = 0  # number of shared prefixes
    longest_stem: int = 0  # tokens of the longest one
    nested: int = 1  # most of them that one sequence has
    # tokens that predict a given token, beyond one for each sequence; None if nothing is scored
    scored: int | None = None
    reading: int = 0  # bytes of memory that reading its rows takes

    @staticmethod
    def of(lengths: Iterable[tuple[int, int]]) -> "Workload":
        """Return the workload of sequences with these (prompt tokens, most tokens to generate)."""
        return Workload(Counter(lengths))

    def up_to(self, tokens: int) -> "Workload":
        """Return the sequences with at most `tokens` tokens, prompt and generated."""
        return replace(self, sizes={(p, n): times for (p, n), times in self.sizes.items() if p + n <= tokens})

    @cached_property
    def unshared(self) -> "Workload":
        """Return the sequences without the prefixes that they share."""
        return replace(self, spared={}, stems=0)

    @cached_property
    def count(self) -> int:
        """Return the number of sequences."""
        return sum(self.sizes.values())

    @cached_property
    def _ends(self) -> list[tuple[int, int, float]]:
        """Return (peak cached tokens, number of sequences, spared tokens), falling."""
        ends = ((p + n - 1, times, self.spared.get((p, n), 0.0)) for (p, n), times in self.sizes.items())
        return sorted(ends, reverse=True)

    @cached_property
    def _prompts(self) -> tuple[Floats, Floats]:
        return _sums(sorted(((p, times) for (p, _), times in self.sizes.items()), reverse=True))

    @cached_property
    def _pages(self) -> dict[tuple[int, int | None], tuple[Floats, Floats]]:
        """Running totals of pages at the sequences' peaks, by (tokens of a page, window): a search repeats requests."""
        return {}

    @cached_property
    def longest(self) -> int:
        """Return the peak cached tokens of the longest sequence. The last generated token is never cached."""
        return max((n for n, _, _ in self._ends), default=1)

    def pages(self, count: int, pool: Pool) -> int:
        """Return the pages of a pool that the `count` longest sequences take at their peak, with the prefixes that they
        share. A prefix takes one page more if it does not end with a page. In layers with a window it shares nothing in
        the end."""
        key = (pool.page_tokens, pool.window)
        if key not in self._pages:
            held = ((pool.held(n) - pool.num_shared(int(spared)), times) for n, times, spared in self._ends)
            self._pages[key] = _sums(held)
        own = round(np.interp(count, *self._pages[key]))
        if not self.stems:
            return own
        prefixes = max(self.nested, math.ceil(min(count, self.count) * self.stems / max(1, self.count)))
        longest = pool.held(self.longest_stem)
        return own + (prefixes + longest if pool.window is None else prefixes * longest)

    def prompt_tokens(self, count: int) -> int:
        """Return the total tokens of the `count` longest prompts."""
        return round(np.interp(count, *self._prompts))


def _sums(numbers: Iterable[tuple[int, int]]) -> tuple[Floats, Floats]:
    """Return how many numbers come before each one, and their sum; last, those of all. numbers: (number, how often it
    occurs), in order. Both are contiguous float64: `np.interp` would copy other arrays in every call."""
    table = np.array([(0, 0), *((times, number * times) for number, times in numbers)])
    counts, totals = np.ascontiguousarray(np.cumsum(table, axis=0).T, dtype=np.float64)
    return counts, totals
