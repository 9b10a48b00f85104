"""Page numbers that a sequence holds, reads and writes in layers with and without a window.

A page holds `page_tokens` tokens of a sequence for one layer. Page number n holds tokens n * page_tokens and on. A
query at position t of a layer with a window sees positions t - window + 1 .. t, so it sees at most `ring` pages. A
sequence holds at most `ring` pages for such a layer, and page n is entry n % ring of the list of page ids:

    window 40, 16 tokens a page: ring 4     page    0  1  2  3  4  5  6 ...
                                            entry   0  1  2  3  0  1  2 ...

A state of fixed size, such as that of Mamba, is a page that never fills: a record. Its pool has RECORD tokens a page.
So a sequence holds one page, reads it in all pieces but the first, and writes it in every piece.

Page tables may name pages that have been overwritten. Kernels do not read them, as no query sees their positions.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

RECORD = 1 << 40  # tokens of a page that never fills

Count = TypeVar("Count", int, np.ndarray[Any, Any])  # a number, or an array of numbers


def pages_for(tokens: Count, page_tokens: int) -> Count:
    """Return the number of pages that hold `tokens` tokens of one sequence."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True)
class Pool:
    """Page pool of one tier, for all layers with the same window."""

    pages: int  # number of pages for each of these layers
    page_tokens: int  # tokens per page
    batch_pages: int | None = None  # most pages of one gpu_batch, None for no limit
    window: int | None = None  # tokens that a query sees, None for all
    grain: int = 1  # prompts are cut at multiples of this number of tokens

    @property
    def is_record(self) -> bool:
        """Whether a page is a state of fixed size."""
        return self.page_tokens == RECORD

    @cached_property
    def ring(self) -> int | None:
        """Most pages that `window` consecutive tokens lie in, so the most that a sequence holds; None for no limit."""
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
        """Return the number of pages that a piece reads. start: tokens cached before the piece."""
        read: Count = pages_for(start, self.page_tokens) - self.first(start)
        return read

    def first_written(self, start: Count, end: Count) -> Count:
        """Return the number of the first page that tokens start .. end - 1 are written to.

        It is the first of their pages that a query at `end` sees, or their last page if the query sees none.
        """
        return _larger(start // self.page_tokens, _smaller(self.first(end), (end - 1) // self.page_tokens))

    def num_written(self, start: Count, end: Count) -> Count:
        """Return the number of pages that tokens start .. end - 1 are written to. Pages that no query after the piece
        sees are not written."""
        written: Count = (end - 1) // self.page_tokens + 1 - self.first_written(start, end)
        return written

    def read(self, start: int) -> range:
        """Return the numbers of the pages that a piece reads. start: tokens cached before the piece."""
        return range(self.first(start), pages_for(start, self.page_tokens))

    def written(self, start: int, end: int) -> range:
        """Return the numbers of the pages that tokens start .. end - 1 are written to."""
        return range(self.first_written(start, end), (end - 1) // self.page_tokens + 1)

    def entry(self, number: int) -> int:
        """Return the index of a page in a sequence's list of page ids."""
        return number if self.ring is None else number % self.ring

    def entries(self, numbers: range) -> list[int]:
        """Return the indices of pages in a sequence's list of page ids, rising."""
        return list(numbers) if self.ring is None else sorted(self.entry(n) for n in numbers)

    def num_shared(self, prompt: Count) -> Count:
        """Return the number of prompt pages that samples share until they end: full pages, or 0 with a window, as later
        tokens then overwrite the pages."""
        return prompt // self.page_tokens if self.window is None else prompt * 0

    def table(self, ids: list[int], tokens: int) -> list[int]:
        """Return the page table of a sequence of `tokens` tokens: page ids by page number.

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
