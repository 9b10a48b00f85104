"""Stores of single tokens to pages in RAM: a decode step stores the rows of its tokens, not whole pages.

A page has one row per KV head for a token's K, and one for its V. An encoded page has, per KV head, a row of codes and
one for each scale and minimum (codec.cache). Rows of equal width are gathered on the device, cross the link in one
copy, and are scattered to the pool.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.values import WIDE, PageShape


class TokenRows(NamedTuple):
    """Numbers of a batch's rows of one width, in a layer's pool and in a buffer.

    Attributes:
        width: bytes of a row.
        pool_rows: int64 [rows], in RAM: row numbers in the pool.
        buffer_rows: int64 [rows], on the device: row numbers in the buffer.
    """

    width: int
    pool_rows: Tensor
    buffer_rows: Tensor


def rows_of(shape: PageShape, tokens: list[tuple[int, int, int]], device: torch.device) -> list[TokenRows]:
    """Return the rows of tokens, grouped by width.

    Args:
        shape: layout of a page.
        tokens: (page in the pool, page in the buffer, offset in the page) of every token.
        device: device of the buffer.
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
