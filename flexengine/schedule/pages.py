"""Which pages of a sequence exist, are read and are written, as windows bound them. All formulas are here.

A page holds `page_tokens` tokens of a sequence for one layer. Page number n holds tokens n * page_tokens and on. A
query at position t of a layer with a window sees positions t - window + 1 .. t, so no query sees more than `ring`
pages. A sequence keeps that many pages for such layers, and page n lies in entry n % ring of its list of page ids:

    window 40, 16 tokens a page: ring 4     page    0  1  2  3  4  5  6 ...
                                            entry   0  1  2  3  0  1  2 ...

Entries of a page table whose pages have been overwritten are never read by the kernels: no query sees their positions.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray[Any, Any])  # the formulas take numbers and arrays of numbers alike


def pages_for(tokens: Count, page_tokens: int) -> Count:
    """Return the number of pages that hold `tokens` tokens of one sequence."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True)
class Pool:
    """Page pool of one tier for the layers with one window.

    Attributes:
        pages: pages of each of these layers.
        page_tokens: tokens of a page.
        batch_pages: most pages of one gpu_batch, None for no limit.
        window: tokens that these layers' queries see, None for all.
    """

    pages: int
    page_tokens: int
    batch_pages: int | None = None
    window: int | None = None

    @cached_property
    def ring(self) -> int | None:
        """Most pages that a sequence holds, None for no limit: `window` neighbouring tokens lie in at most so many."""
        return None if self.window is None else (self.window + self.page_tokens - 2) // self.page_tokens + 1

    def held(self, tokens: Count) -> Count:
        """Return the number of pages that a sequence of `tokens` cached tokens holds."""
        pages = pages_for(tokens, self.page_tokens)
        return pages if self.ring is None else _smaller(pages, self.ring)

    def first(self, position: Count) -> Count:
        """Return the number of the first page that a query at `position` sees."""
        unseen = position * 0 if self.window is None else _larger(position + 1 - self.window, 0)
        number: Count = unseen // self.page_tokens
        return number

    def num_read(self, start: Count) -> Count:
        """Return how many pages a piece reads that begins after `start` cached tokens."""
        read: Count = pages_for(start, self.page_tokens) - self.first(start)
        return read

    def first_written(self, start: Count, end: Count) -> Count:
        """Return the number of the first page that tokens start .. end - 1 are written to: the first that a query at
        `end` sees, or the last page if it sees none."""
        last: Count = (end - 1) // self.page_tokens
        return _larger(start // self.page_tokens, _smaller(self.first(end), last))

    def num_written(self, start: Count, end: Count) -> Count:
        """Return how many pages tokens start .. end - 1 are written to. Earlier pages of a long piece are not: no query
        after the piece sees them."""
        written: Count = (end - 1) // self.page_tokens + 1 - self.first_written(start, end)
        return written

    def read(self, start: int) -> range:
        """Return the numbers of the pages that a piece reads that begins after `start` cached tokens."""
        return range(self.first(start), pages_for(start, self.page_tokens))

    def written(self, start: int, end: int) -> range:
        """Return the numbers of the pages that tokens start .. end - 1 are written to."""
        return range(self.first_written(start, end), (end - 1) // self.page_tokens + 1)

    def entry(self, number: int) -> int:
        """Return where a page lies in a sequence's list of page ids."""
        return number if self.ring is None else number % self.ring

    def entries(self, numbers: range) -> list[int]:
        """Return where pages lie in a sequence's list of page ids, rising."""
        return list(numbers) if self.ring is None else sorted(self.entry(n) for n in numbers)

    def num_shared(self, prompt: Count) -> Count:
        """Return how many pages of a prompt its samples share for good: the full ones, where no window lets later pages
        overwrite them."""
        full: Count = prompt // self.page_tokens if self.window is None else prompt * 0
        return full

    def table(self, ids: list[int], tokens: int) -> list[int]:
        """Return the page table of a sequence of `tokens` tokens: the id of every page by its number.

        Args:
            ids: `held(tokens)` page ids or more.
        """
        count = pages_for(tokens, self.page_tokens)
        if self.ring is None or count <= self.ring:
            return ids[:count]
        return (ids[: self.ring] * (count // self.ring + 1))[:count]


def _larger(a: Count, b: Any) -> Count:
    return max(a, b) if isinstance(a, int) else np.maximum(a, b)  # type: ignore[no-any-return]


def _smaller(a: Count, b: Any) -> Count:
    return min(a, b) if isinstance(a, int) else np.minimum(a, b)  # type: ignore[no-any-return]
