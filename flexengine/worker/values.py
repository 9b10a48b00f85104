"""Chosen values: where attention takes a share of the past values only (`topk`), the others stay where the cache lives.

Of a decoding sequence with a past, whose cache is not on the device, there come ahead of computing

    the keys of all pages, and the values of the page that is being filled.

Once a layer knows its queries it scores the keys, and of the other pages, for each kv head, there come

    the values of those tokens that any of its query heads chose,

so that in one layer, with pages of P tokens and `kv` bytes a token, these bytes cross:

    kv / 2 * (P * (pages with a past + 1 if the last of them is not full) + chosen / kv_heads)

Of a layer with a window, only pages that the query sees count. chosen: (kv head, token) pairs in full pages. Where
pages are short beside the sequence, and every query head has a kv head of its own, that is (1 + topk) / 2 of all.
Attention then runs as if everything were there: it makes the same choice, finds it there, and reads nothing else.

Nothing is written to those pages meanwhile: what stores to a sequence in the same sweep has ended before its last piece
is loaded, and the next sweep begins when this one has ended.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat, Part
from flexengine.places import is_disk
from flexengine.plan.layout import VALUES, Layout
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions

WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)  # rows of bytes are put down four times as slowly


class Closed(NamedTuple):
    """Of the sequences that decode, the pages whose values are not there. All on the device.

    pages, places: int64 [decode, most pages], their numbers in the pool and in the buffer; tokens: int64 [decode], how
    many tokens lie in them.
    """

    pages: Tensor
    places: Tensor
    tokens: Tensor


class PageShape(NamedTuple):
    """How pages lie in a pool, by panels: K, then V, of every kv head. size: bytes of a panel."""

    kv_heads: int
    page_tokens: int
    size: int
    parts: tuple[Part, ...]

    @staticmethod
    def of(form: CacheFormat | None, kv_heads: int, page_tokens: int, row: int) -> "PageShape":
        """row: bytes of one head's key, where pages are not encoded."""
        if form is None:
            return PageShape(kv_heads, page_tokens, page_tokens * row, (Part(row, (0,)),))
        return PageShape(kv_heads, page_tokens, form.panel_bytes, form.parts)

    def rows(self, part: Part, pages: Tensor, heads: Tensor, offsets: Tensor) -> Tensor:
        """Numbers of rows, `part.width` bytes each, of a pool: int64 [starts * tokens]."""
        panels = ((pages * 2 + 1) * self.kv_heads + heads) * (self.size // part.width) + offsets
        return torch.cat([panels + start // part.width for start in part.starts])

    def token_rows(self, part: Part, pages: Tensor, offsets: Tensor) -> Tensor:
        """Return the numbers of all rows of whole tokens: int64 [starts * tokens * 2 * kv_heads], in RAM."""
        every = torch.arange(2 * self.kv_heads)
        panels = (pages[:, None] * 2 * self.kv_heads + every) * (self.size // part.width) + offsets[:, None]
        return torch.cat([(panels + start // part.width).flatten() for start in part.starts])


class Values:
    """Brings rows of values to the pages they belong to, a buffer full at a time."""

    def __init__(self, layout: Layout, machine: Machine, regions: Regions) -> None:
        self.machine = machine
        self._near = regions.take("device", layout.values, VALUES)
        self._stage = regions.take("host", layout.values, VALUES) if machine.capacity.staged else None

    def bring(self, chosen: Tensor, closed: Closed, home: str, pool: Region, buffer: Region, shape: PageShape) -> None:
        """chosen: of kernels.choose. pool, buffer: of one layer, where the pages come from and where they go."""
        at = torch.arange(chosen.shape[2], device=chosen.device)
        wanted = chosen & (at < closed.tokens[:, None])[:, None]
        paged = wanted.view(*wanted.shape[:2], -1, shape.page_tokens).transpose(1, 2)
        sequence, page, head, offset = paged.nonzero().unbind(1)  # in the order in which they lie in a page
        far, near = closed.pages[sequence, page], closed.places[sequence, page]
        for part in shape.parts:
            source = shape.rows(part, far, head, offset)
            target = shape.rows(part, near, head, offset)
            if is_disk(home):
                source, order = source.sort()
                target = target[order]
            self._bring(home, pool, source.cpu(), buffer, target, part.width)

    def _bring(self, home: str, pool: Region, source: Tensor, buffer: Region, target: Tensor, width: int) -> None:
        device, step = self.machine.device, self._near.nbytes // width
        wide = next(dtype for dtype in WIDE if width % dtype.itemsize == 0)
        whole = Region(buffer.place, buffer.start, buffer.nbytes // width * width, wide)
        into = device.view(whole).view(-1, width // wide.itemsize)
        for some, places in zip(torch.split(source, step), torch.split(target, step), strict=True):
            near = device.view(self._near.part(0, len(some) * width)).view(-1, width)
            self._fetch(home, pool, some, near)
            into.index_copy_(0, places, near.view(wide))

    def _fetch(self, home: str, pool: Region, rows: Tensor, near: Tensor) -> None:
        machine, width = self.machine, near.shape[1]
        if self._stage is None:
            machine.tier(home).pick(pool, rows, width, near)
            return
        part = self._stage.part(0, near.nbytes)
        stage = machine.host.view(part).view(near.shape)
        if home == "host":  # gathered where they lie, so that they cross the link in one piece
            every = machine.host.view(Region(pool.place, pool.start, pool.nbytes // width * width, torch.uint8))
            torch.index_select(every.view(-1, width), 0, rows, out=stage)
        else:
            machine.tier(home).pick(pool, rows, width, stage)
        machine.host.load(part, near)
        machine.synchronize()  # the stage is written to again
