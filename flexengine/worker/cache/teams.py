"""KV pages that several attention workers hold together: each has a slice of every page, under the same number.

With partition "heads", worker i holds heads i * kv_heads / n and on. With "tokens", it holds tokens i * t and on of a
page of n * t tokens. So page numbers, page tables and the forecast of pages are those of a single place.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.policy import TOKENS
from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions


class Group(NamedTuple):
    """Pages of a group of layers."""

    start: int  # bytes of whole pages before the group
    page_tokens: int  # tokens of a whole page


class Team(Tier):
    """A tier whose regions are whole pages, which workers hold in slices.

    Args:
        members: places of the workers.
        partition: HEADS or TOKENS.
        groups: pages of each group of layers, in the order of their bytes.
        kv_heads: KV heads of a page.
        head_dim: elements of a head.
        bits: bits of an encoded element; 0 if pages are not encoded.
    """

    def __init__(
        self, machine: Machine, members: Sequence[str], partition: str, groups: Sequence[Group], kv_heads: int,
        head_dim: int, bits: int,
    ) -> None:  # fmt: skip
        self.name, self.members, self.partition, self.groups = members[0], tuple(members), partition, tuple(groups)
        self.kv_heads, self.head_dim, self.bits = kv_heads, head_dim, bits
        self._tiers = [machine.tier(member) for member in members]
        self._held: list[Region] = []

    def take(self, regions: Regions, nbytes: int, what: str, dtype: torch.dtype) -> Region:
        """Return a new region of whole pages. regions: frees the memory of all workers."""
        size = nbytes // len(self.members)
        self._held = [regions.take(member, size, what, dtype) for member in self.members]
        return Region(self, 0, nbytes, dtype)

    def slices(self, region: Region) -> list[Region]:
        """Return the workers' parts of a region of whole pages."""
        count = len(self.members)
        return [held.part(region.start // count, region.nbytes // count) for held in self._held]

    def slice_form(self, group: int) -> tuple[int, int]:
        """Return the KV heads and the tokens of a slice of a page."""
        tokens, count = self.groups[group].page_tokens, len(self.members)
        if self.partition == TOKENS:
            return self.kv_heads, tokens // count
        return self.kv_heads // count, tokens

    def store(self, source: Tensor, region: Region) -> None:
        for tier, part, whole in zip(self._tiers, self.slices(region), self._cut(source, region), strict=True):
            flat, views = self._empty(part, region)
            for target, view in zip(views, whole, strict=True):
                target.copy_(view)
            tier.store(flat, part)

    def load_all(self, pairs: Sequence[tuple[Region, Tensor]]) -> None:
        for number, tier in enumerate(self._tiers):
            parts = [self.slices(region)[number] for region, _ in pairs]
            pieces = [self._empty(part, region) for part, (region, _) in zip(parts, pairs, strict=True)]
            tier.load_all([(part, flat) for part, (flat, _) in zip(parts, pieces, strict=True)])
            for (region, target), (_, views) in zip(pairs, pieces, strict=True):
                for view, source in zip(list(self._cut(target, region))[number], views, strict=True):
                    view.copy_(source)

    def _group(self, region: Region) -> int:
        return max(g for g, group in enumerate(self.groups) if group.start <= region.start)

    def _cut(self, flat: Tensor, region: Region) -> Iterator[list[Tensor]]:
        """Yield each worker's views of whole pages. flat: the pages of the region."""
        group = self._group(region)
        heads, tokens = self.slice_form(group)
        whole = self._views(flat, self.kv_heads, self.groups[group].page_tokens)
        for number in range(len(self.members)):
            if self.partition == TOKENS:
                yield [view.narrow(axis, number * tokens, tokens) for view, axis in whole]
            else:
                yield [view.narrow(2, number * heads, heads) for view, _ in whole]

    def _empty(self, part: Region, region: Region) -> tuple[Tensor, list[Tensor]]:
        """Return memory for a worker's slice of some pages, and views of it."""
        flat = torch.empty(part.nbytes // part.dtype.itemsize, dtype=part.dtype)
        return flat, [view for view, _ in self._views(flat, *self.slice_form(self._group(region)))]

    def _views(self, flat: Tensor, heads: int, tokens: int) -> list[tuple[Tensor, int]]:
        """Return views of pages, [pages, K or V, heads, ...], each with its axis of tokens."""
        if not self.bits:
            return [(flat.view(-1, 2, heads, tokens, self.head_dim), 3)]
        form = CacheFormat(self.bits, heads, tokens, self.head_dim)
        panels = form.panels(flat.view(-1, form.page_bytes))
        return [(panels.codes, 3), (panels.scale, 4), (panels.minimum, 4)]

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        raise TypeError("pages of a team are taken with `take`")

    def free(self, region: Region, what: str) -> None:
        raise TypeError("pages of a team are freed with their `Regions`")
