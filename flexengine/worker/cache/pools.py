"""Memory that each sequence has while it lives: KV pages, and records of fixed size (docs/architecture.md 7).

Pages have pools on every tier, and are copied between pools, host staging and device buffers.
"""

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.errors import OutOfMemory
from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import MEAN_KEYS, Layout
from flexengine.schedule.frame import num_buffers
from flexengine.schedule.pages import Pool, pages_for
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.cache.tables import PageShape, Runs, Tables, store_rows
from flexengine.worker.regions import Mover, Regions, Transfer

# Kinds of state beside KV pages (`pools.Pools`), by their name in the account of a layout's device, which books their
# bytes: a class as module:name, which is imported for jobs that have the state. `Cache` makes it of model, layout,
# machine and regions.
STATES = {MEAN_KEYS: "flexengine.worker.cache.smoothing:Smoothing"}


class SequenceState(ABC):
    """One kind of state, of all sequences. A sweep may be repeated: claims of what is held already change nothing."""

    @abstractmethod
    def claim(self, sequence: Sequence, tokens: int) -> None:
        """Take memory for the sequence until it can hold `tokens` tokens. It shares the state of its source."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Give the sequence's memory back, also if it has none."""


class Pages:
    """Ids 0 .. count-1 of one pool. The page freed last is handed out first, so that warm memory is reused. Sequences
    may share a page; the page is free when the last of them has given it back."""

    def __init__(self, tier: str, count: int) -> None:
        self.tier, self.count = tier, count
        self._free = list(range(count - 1, -1, -1))
        self._more: dict[int, int] = {}  # by page that several sequences hold: how many beside the first

    @property
    def used(self) -> int:
        """Number of pages that some sequence holds."""
        return self.count - len(self._free)

    def take(self, n: int) -> list[int]:
        """Return n free pages, now held once. Raise OutOfMemory if there are fewer: admission by forecast makes that a
        fault of the schedule."""
        if n > len(self._free):
            raise OutOfMemory(self.tier, f"{n} KV pages (counted in pages)", n, self.used, self.count)
        return [self._free.pop() for _ in range(n)]

    def share(self, pages: list[int]) -> list[int]:
        """Return the same pages, each held once more."""
        for page in pages:
            self._more[page] = self._more.get(page, 0) + 1
        return list(pages)

    def is_shared(self, page: int) -> bool:
        """Return whether several sequences hold a page."""
        return page in self._more

    def give(self, pages: list[int]) -> None:
        """Give pages back, each held once less. Those that no sequence holds any more are free."""
        for page in reversed(pages):
            if more := self._more.pop(page, 0):
                if more > 1:
                    self._more[page] = more - 1
            else:
                self._free.append(page)


class SequenceRecords(SequenceState):
    """A record of fixed size for each sequence: a page that never fills. A sequence shares the record of its source, so
    a record must not change after the first piece; a state that does needs a copy."""

    def __init__(self, tier: str, count: int) -> None:
        self._free = Pages(tier, count)
        self.number: dict[int, int] = {}  # by sequence id: number of its record

    def claim(self, sequence: Sequence, tokens: int) -> None:
        if sequence.id not in self.number:
            source = sequence.source
            (number,) = self._free.share([self.number[source.id]]) if source else self._free.take(1)
            self.number[sequence.id] = number

    def release(self, sequence: Sequence) -> None:
        if sequence.id in self.number:
            self._free.give([self.number.pop(sequence.id)])


class Shared(NamedTuple):
    """Page ids of a sequence before shared pages that the next sweep writes to were replaced (copy on write)."""

    tokens: int  # tokens that these pages hold
    ids: list[list[int]]  # page ids in each pool of the sequence's tier


class Pools(SequenceState):
    """Pages of every tier and group of layers, and the buffers that pages of other tiers pass through on the device.

    A tier's pools are one region, ordered by group, then by layer. A layer in no group has no pages. Number ~j stands
    for the states of layer j; their records are pages of bytes.

    Attributes:
        shared: by sequence id; only for sequences with pages that the next sweep copies on write.
        dtype: dtype of page elements; uint8 for encoded pages.
    """

    def __init__(
        self, model: ModelFacts, layout: Layout, machine: Machine, regions: Regions, dtype: torch.dtype, bits: int
    ) -> None:
        self.model, self.layout, self.machine, self.dtype, self.bits = model, layout, machine, dtype, bits
        # By layer, the number of its group, and its number in the group.
        self.group = {layer: g for g, group in enumerate(layout.groups) for layer in group.layers}
        self._number = {layer: i for group in layout.groups for i, layer in enumerate(group.layers)}
        self.ids = {tier: [Pages(tier, pool.pages) for pool in pools] for tier, pools in layout.pools.items()}
        self.held: dict[int, list[list[int]]] = {}  # by sequence id, the page ids in each pool of the sequence's tier
        self.shared: dict[int, Shared] = {}
        self._starts: dict[str, list[int]] = {}  # bytes before each group
        self._by_tier: dict[str, Region] = {}  # by tier
        self.teams: dict[str, Any] = {}  # by tier, the attention workers that hold slices of its pages
        for tier, pools in layout.pools.items():
            each = zip(pools, layout.page_bytes[tier], layout.groups, strict=True)
            sizes = [pool.pages * page * len(group.layers) for pool, page, group in each]
            self._starts[tier] = list(accumulate(sizes, initial=0))
            if len(members := layout.policy.team(tier, layout.places)) > 1:
                from flexengine.worker.cache.teams import Group, Team  # not without attention workers

                starts = zip(self._starts[tier], pools, strict=False)
                groups = [Group(start, pool.page_tokens) for start, pool in starts]
                team = Team(machine, members, layout.policy.partition, groups, model.kv_heads, model.head_dim, bits)
                self.teams[tier] = team
                self._by_tier[tier] = team.take(regions, sum(sizes), "KV cache", dtype)
            else:
                self._by_tier[tier] = regions.take(tier, sum(sizes), "KV cache", dtype)
        # By tier and group, the format of pages; None if pages are not encoded.
        self._forms = {
            tier: [
                CacheFormat(bits, model.kv_heads, p.page_tokens, model.head_dim) if bits and not p.is_record else None
                for p in pools
            ]
            for tier, pools in layout.pools.items()
        }
        self._views: dict[tuple[int, str], Tensor] = {}  # by layer and tier
        size, self._mover = layout.cache_buffer, Mover(machine, self.teams)
        count = num_buffers(layout.policy.slots) if size else 0
        self._buffers = [regions.take("device", size, "cache buffers", dtype) for _ in range(count)]
        staged = layout.cache_stage
        self._stages = [regions.take("host", staged, "cache staging", dtype) for _ in range(count if staged else 0)]

    def claim(self, sequence: Sequence, tokens: int) -> None:
        """Take pages for the sequence until it can hold `tokens` tokens.

        It shares the pages of its source. Shared pages that the next sweep writes to are replaced by new
        pages (copy on write).
        """
        pools, ids = self.layout.pools[sequence.home], self.ids[sequence.home]
        if sequence.id not in self.held:
            shared = self.held[sequence.source.id] if sequence.source else [[] for _ in pools]
            self.held[sequence.id] = [free.share(pages) for free, pages in zip(ids, shared, strict=True)]
        self.shared.pop(sequence.id, None)
        owned = self.held[sequence.id]
        for pool, free, held in zip(pools, ids, owned, strict=True):
            if len(held) * pool.page_tokens < tokens and (more := pool.held(tokens) - len(held)) > 0:
                held += free.take(more)
            if sequence.source is None:
                continue
            for entry in pool.entries(range(sequence.cached // pool.page_tokens, pages_for(tokens, pool.page_tokens))):
                if free.is_shared(held[entry]):
                    self.shared.setdefault(sequence.id, Shared(sequence.cached, [list(ids) for ids in owned]))
                    free.give([held[entry]])
                    (held[entry],) = free.take(1)

    def release(self, sequence: Sequence) -> None:
        self.shared.pop(sequence.id, None)
        if sequence.id in self.held:
            for free, held in zip(self.ids[sequence.home], self.held.pop(sequence.id), strict=True):
                free.give(held)

    def page_bytes(self, layer: int, tier: str) -> int:
        """Return the bytes of one page of a layer."""
        return self.layout.page_bytes[tier][self.group[layer]]

    def pool(self, layer: int, tier: str) -> Pool:
        """Return the pool in which a layer has its pages."""
        return self.layout.pools[tier][self.group[layer]]

    def region(self, layer: int, tier: str) -> Region:
        """Return the region of a layer's pages."""
        group, nbytes = self.group[layer], self.pool(layer, tier).pages * self.page_bytes(layer, tier)
        part = self._by_tier[tier].part(self._starts[tier][group] + self._number[layer] * nbytes, nbytes)
        return part if layer >= 0 else Region(part.place, part.start, nbytes, torch.uint8)

    def _dtype(self, layer: int) -> torch.dtype:
        return self.dtype if layer >= 0 else torch.uint8

    def form(self, layer: int, tier: str) -> CacheFormat | None:
        """Return the format of a layer's pages on a tier; None if pages are not encoded."""
        return self._forms[tier][self.group[layer]]

    def page_shape(self, group: int, tier: str) -> PageShape:
        """Return the layout of a group's pages on a tier."""
        model, tokens = self.model, self.layout.pools[tier][group].page_tokens
        return PageShape.of(self._forms[tier][group], model.kv_heads, tokens, model.head_dim * self.dtype.itemsize)

    def view(self, layer: int, tier: str) -> Tensor:
        """Return the pages of a layer on the device or in host RAM."""
        if (layer, tier) not in self._views:
            flat = self.machine.tier(tier).view(self.region(layer, tier))
            self._views[layer, tier] = flat.view(-1, *self._page(layer, tier))
        return self._views[layer, tier]

    def room(self, layer: int, home: str, buffer: int) -> Region:
        """Return the part of a buffer that holds whole pages of the layer."""
        page, base, first = self.page_bytes(layer, home), self._buffers[buffer], self._first(layer)
        nbytes = (self.layout.cache_buffer - first) // page * page
        return Region(base.place, base.start + first, nbytes, self._dtype(layer))

    def _first(self, layer: int) -> int:
        """Return the offset of a layer's pages in buffers."""
        return 0 if layer >= 0 else self.layout.beside

    def in_buffer(self, layer: int, home: str, buffer: int) -> Tensor:
        """Return the pages of a layer in a buffer."""
        return self.machine.device.view(self.room(layer, home, buffer)).view(-1, *self._page(layer, home))

    def in_stage(self, layer: int, home: str, buffer: int) -> Tensor:
        """Return the pages of a layer in a buffer's host staging."""
        page = self.page_bytes(layer, home)
        whole = self._stages[buffer].part(0, self.layout.cache_stage // page * page)
        return self.machine.host.view(whole).view(-1, *self._page(layer, home))

    def _page(self, layer: int, tier: str) -> tuple[int, ...]:
        """Return the shape of a page."""
        if self.bits or layer < 0:
            return (self.page_bytes(layer, tier),)
        return 2, self.model.kv_heads, self.pool(layer, tier).page_tokens, self.model.head_dim

    def load(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy the cached pages of one layer one leg toward the device buffer; see `Mover.load`."""
        self._mover.load(home, hop, self._parts(layer, home, buffer, tables.load, tables.keys))

    def store(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy new pages one leg from the device buffer; see `Mover.store`. Rows have one leg."""
        self._mover.store(home, hop, self._parts(layer, home, buffer, tables.store))
        for rows in tables.rows:
            store_rows(self.machine, rows, self.room(layer, home, buffer), self.region(layer, home), home)

    def _parts(self, layer: int, home: str, buffer: int, whole: Runs, keys: Runs | tuple[()] = ()) -> list[Transfer]:
        """Return what is copied between a layer's pool and a buffer. whole: whole pages. keys: pages without values,
        whose keys are the first half. A page has the same offset in the buffer and in its staging."""
        page, pool, device = self.page_bytes(layer, home), self.region(layer, home), self._buffers[buffer]
        stage = self._stages[buffer] if place_of(home).staged and self._stages else None
        dtype, before = self._dtype(layer), self._first(layer)

        def part(base: Region, start: int, nbytes: int) -> Region:
            return Region(base.place, base.start + before + start, nbytes, dtype)

        spans = [(source * page, target * page, count * page) for source, target, count in whole]
        for source, target, count in keys:
            spans += [((source + i) * page, (target + i) * page, page // 2) for i in range(count)]
        return [
            Transfer([pool.part(first, n)], stage and part(stage, start, n), part(device, start, n))
            for first, start, n in spans
        ]

    def close(self) -> None:
        """Drop all references to the memory."""
        for held in (self._views, self._by_tier, self._buffers, self._stages):
            held.clear()
