"""Stores of single tokens to pages in RAM: a decode step stores the rows of its tokens, not whole pages.

A page has one row per KV head for a token's K, and one for its V. An encoded page has, per KV head, a row of codes and
one for each scale and minimum (codec.cache). Rows of equal width are gathered on the device, cross the link in one
copy, and are scattered to the pool.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat, PanelPart
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine

# Dtypes to copy rows of bytes in, the first that fits: index_copy_ of uint8 is four times as slow as of int64.
WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PageShape(NamedTuple):
    """Layout of a page. A page has a panel of K for each KV head, then a panel of V for each."""

    kv_heads: int  # number of KV heads
    page_tokens: int  # tokens of a page
    size: int  # bytes of a panel
    parts: tuple[PanelPart, ...]  # rows of a panel, by width

    @staticmethod
    def of(form: CacheFormat | None, kv_heads: int, page_tokens: int, row: int) -> "PageShape":
        """Return the layout of pages. row: bytes of one head's key in pages that are not encoded."""
        if form is None:
            return PageShape(kv_heads, page_tokens, page_tokens * row, (PanelPart(row, (0,)),))
        return PageShape(kv_heads, page_tokens, form.panel_bytes, form.parts)

    def rows(self, part: PanelPart, pages: Tensor, heads: Tensor, offsets: Tensor) -> Tensor:
        """Return row numbers of values in a pool, in rows of `part.width` bytes: int64 [starts * tokens]."""
        panels = ((pages * 2 + 1) * self.kv_heads + heads) * (self.size // part.width) + offsets
        return torch.cat([panels + start // part.width for start in part.starts])

    def token_rows(self, part: PanelPart, pages: Tensor, offsets: Tensor) -> Tensor:
        """Return row numbers of K and V of tokens in all heads: int64 [starts * tokens * 2 * kv_heads], in RAM."""
        every = torch.arange(2 * self.kv_heads)
        panels = (pages[:, None] * 2 * self.kv_heads + every) * (self.size // part.width) + offsets[:, None]
        return torch.cat([(panels + start // part.width).flatten() for start in part.starts])


class TokenRows(NamedTuple):
    """Numbers of a batch's rows of one width, in a layer's pool and in a buffer."""

    width: int  # bytes of a row
    pool_rows: Tensor  # int64 [rows], in RAM: row numbers in the pool
    buffer_rows: Tensor  # int64 [rows], on the device: row numbers in the buffer


def rows_of(shape: PageShape, tokens: list[tuple[int, int, int]], device: torch.device) -> list[TokenRows]:
    """Return the rows of tokens, grouped by width.

    Args:
        tokens: (page in the pool, page in the buffer, offset in the page) of every token.
    """
    if not tokens:
        return []
    pool_pages, buffer_pages, offsets = torch.tensor(tokens).unbind(1)
    return [
        TokenRows(
            part.width,
            shape.token_rows(part, pool_pages, offsets),
            shape.token_rows(part, buffer_pages, offsets).to(device),
        )
        for part in shape.parts
    ]


def store_rows(machine: Machine, rows: TokenRows, buffer: Region, pool: Region, tier: str) -> None:
    """Copy rows from a device buffer to a pool in RAM."""
    wide = next(dtype for dtype in WIDE if rows.width % dtype.itemsize == 0)
    whole = Region(buffer.place, buffer.start, buffer.nbytes // rows.width * rows.width, wide)
    source = machine.device.view(whole).view(-1, rows.width // wide.itemsize)
    machine.tier(tier).put(source.index_select(0, rows.buffer_rows), pool, rows.pool_rows)
