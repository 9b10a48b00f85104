"""Single tokens written to pages in RAM: a decode step stores the rows of its tokens, not the pages they lie in.

A page holds a token's K, and its V, as one row per KV head; encoded pages hold a row of codes, and each scale and
minimum, per KV head (codec.cache). Rows of equal width are gathered in the device buffer, cross the link in one piece,
and are scattered to their home.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.values import WIDE, PageShape


class Rows(NamedTuple):
    """Rows of one width of a batch's tokens, by number of row in a layer's pool and in a buffer.

    Attributes:
        width: bytes of a row.
        far: int64 [rows], in RAM: row numbers in the pool.
        near: int64 [rows], on the device: row numbers in the buffer.
    """

    width: int
    far: Tensor
    near: Tensor


def rows_of(shape: PageShape, tokens: list[tuple[int, int, int]], device: torch.device) -> list[Rows]:
    """Return the rows of tokens, grouped by width.

    Args:
        shape: layout of a page.
        tokens: (page in the pool, page in the buffer, place in the page) of every token.
        device: device of the buffer.
    """
    if not tokens:
        return []
    pages, places, offsets = torch.tensor(tokens).unbind(1)
    return [
        Rows(part.width, shape.token_rows(part, pages, offsets), shape.token_rows(part, places, offsets).to(device))
        for part in shape.parts
    ]


def store_rows(machine: Machine, rows: Rows, buffer: Region, pool: Region, tier: str) -> None:
    """Copy rows from a device buffer to a pool in RAM."""
    wide = next(dtype for dtype in WIDE if rows.width % dtype.itemsize == 0)
    whole = Region(buffer.place, buffer.start, buffer.nbytes // rows.width * rows.width, wide)
    source = machine.device.view(whole).view(-1, rows.width // wide.itemsize)
    machine.tier(tier).put(source.index_select(0, rows.near), pool, rows.far)
