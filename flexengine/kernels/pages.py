"""Writing, reading and checking pages of a KV pool in plain torch."""

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.errors import InvalidInput
from flexengine.kernels.paged import Room


def bad_sequence(i: int, room: Room) -> InvalidInput:
    """Return the error for sequence i, whose length or page table does not fit the pool."""
    return InvalidInput(
        f"sequence {i}: its length must be at least 1 and within its table,"
        f" and its pages among the pool's {room.pages} (of {room.page_tokens} tokens)"
    )


def bad_token(t: int, room: Room) -> InvalidInput:
    """Return the error for token t, whose page or offset lies outside the pool."""
    return InvalidInput(f"token {t}: its page must be below {room.pages} and its offset below {room.page_tokens}")


def write(k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None) -> None:
    """Write K and V as base.Kernels.append does, without checking pages and offsets."""
    page, offset = pages.long()[:, None], offsets.long()[:, None]
    head = torch.arange(k.shape[1], device=pool.device)[None]
    for number, x in enumerate((k, v)):
        if form is None:
            pool[page, number, head, offset] = x.to(pool.dtype)
        else:
            panels, (codes, scale, minimum) = form.panels(pool), form.encode(x)
            panels.codes[page, number, head, offset] = codes
            panels.scale[page, number, head, :, offset] = scale
            panels.minimum[page, number, head, :, offset] = minimum


def read(pool: Tensor, pages: Tensor, form: CacheFormat | None, values: bool = True) -> Tensor:
    """Return pages of a pool, dequantized: [*pages.shape, 2, kv_heads, page_tokens, dim].

    Args:
        pages: int64 page numbers, not checked.
        values: False reads K alone; the 2 is then 1.
    """
    parts = slice(None) if values else slice(1)
    if form is None:
        return pool[:, parts][pages]
    codes, scale, minimum = (x[:, parts][pages] for x in form.panels(pool))
    return form.dequantize(codes, scale.transpose(-1, -2), minimum.transpose(-1, -2))


def check_pages(pages: Tensor, room: Room) -> None:
    """Raise InvalidInput if a page number is outside the pool."""
    if ((pages < 0) | (pages >= room.pages)).any():
        raise bad_sequence(0, room)
