"""Page pools per tier: memory, page ids of every sequence, layout of pages, and copies between pools, host staging and
device buffers."""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.schedule.frame import num_buffers
from flexengine.schedule.pages import pages_for
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.cache.states import Pages, SequenceState
from flexengine.worker.cache.tables import Runs, Tables
from flexengine.worker.mover import Mover, Transfer
from flexengine.worker.regions import Regions
from flexengine.worker.rows import PageShape, store_rows

Spans = list[tuple[int, int, int]]  # (byte in the pool, byte in the buffer, bytes)


class Shared(NamedTuple):
    """Page ids of a sequence before shared pages that the next sweep writes to were replaced (copy on write)."""

    tokens: int  # tokens that these pages hold
    ids: list[list[int]]  # page ids in each pool of the sequence's tier


class Pools(SequenceState):
    """Pages of every tier and group of layers, and the buffers that pages of other tiers pass through on the device.

    A tier's pools are one region, ordered by group, then by layer. A layer in no group has no pages.

    Attributes:
        shared: by sequence id; only for sequences with pages that the next sweep copies on write.
        dtype: dtype of page elements; uint8 for encoded pages.
    """

    def __init__(
        self, model: ModelFacts, layout: Layout, machine: Machine, regions: Regions, dtype: torch.dtype, bits: int
    ) -> None:
        self.model, self.layout, self.machine, self.dtype, self.bits = model, layout, machine, dtype, bits
        numbered = enumerate(layout.groups)
        self._places = {layer: (g, i) for g, group in numbered for i, layer in enumerate(group.layers)}
        self.group = {layer: g for layer, (g, _) in self._places.items()}  # by layer, the number of its group
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

                parts = zip(self._starts[tier], layout.page_bytes[tier], pools, strict=False)
                groups = [Group(start, page, pool.page_tokens) for start, page, pool in parts]
                team = Team(machine, members, layout.policy.partition, groups, model.kv_heads, model.head_dim, bits)
                self.teams[tier] = team
                self._by_tier[tier] = team.take(regions, sum(sizes), "KV cache", dtype)
            else:
                self._by_tier[tier] = regions.take(tier, sum(sizes), "KV cache", dtype)
        self._on_device = {layer: self._tensor(layer, "device") for layer in self.group if "device" in self.ids}
        size, self._mover = layout.cache_buffer, Mover(machine, self.teams)
        count = num_buffers(layout.policy.slots) if size else 0
        self._buffers = [regions.take("device", size, "cache buffers", dtype) for _ in range(count)]
        count = count if any(place_of(home).staged for home in layout.pools) and machine.capacity.staged else 0
        self._stages = [regions.take("host", size, "cache staging", dtype) for _ in range(count)]

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

    def region(self, layer: int, tier: str) -> Region:
        """Return the region of a layer's pages."""
        group, number = self._places[layer]
        nbytes = self.layout.pools[tier][group].pages * self.layout.page_bytes[tier][group]
        return self._by_tier[tier].part(self._starts[tier][group] + number * nbytes, nbytes)

    def form(self, layer: int, tier: str) -> CacheFormat | None:
        """Return the format of a layer's pages on a tier; None if pages are not encoded."""
        return self._form(self.group[layer], tier)

    def page_shape(self, group: int, tier: str) -> PageShape:
        """Return the layout of a group's pages on a tier."""
        model, tokens = self.model, self.layout.pools[tier][group].page_tokens
        return PageShape.of(self._form(group, tier), model.kv_heads, tokens, model.head_dim * self.dtype.itemsize)

    def on_device(self, layer: int) -> Tensor:
        """Return the pages of a layer on the device."""
        return self._on_device[layer]

    def on_host(self, layer: int) -> Tensor:
        """Return the pages of a layer in host RAM, as a view."""
        return self._tensor(layer, "host")

    def room(self, layer: int, home: str, buffer: int) -> Region:
        """Return the part of a buffer that holds whole pages of the layer."""
        page, base = self.page_bytes(layer, home), self._buffers[buffer]
        return Region(base.place, base.start, self.layout.cache_buffer // page * page, self.dtype)

    def in_buffer(self, layer: int, home: str, buffer: int) -> Tensor:
        """Return the pages of a layer in a buffer."""
        room, group = self.room(layer, home, buffer), self.group[layer]
        shape = self._shape(group, home, room.nbytes // self.page_bytes(layer, home))
        return self.machine.device.view(room).view(shape)

    def load(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy the cached pages of one layer one leg toward the device buffer; see `Mover.load`."""
        spans = self._spans(layer, home, tables.load, tables.keys)
        self._mover.load(home, hop, self._parts(layer, home, spans, buffer))

    def store(self, layer: int, home: str, tables: Tables, buffer: int, hop: int) -> None:
        """Copy new pages one leg from the device buffer; see `Mover.store`. Rows have one leg."""
        spans = self._spans(layer, home, tables.store)
        self._mover.store(home, hop, self._parts(layer, home, spans, buffer))
        for rows in tables.rows:
            store_rows(self.machine, rows, self.room(layer, home, buffer), self.region(layer, home), home)

    def _spans(self, layer: int, home: str, whole: Runs, keys: Runs | tuple[()] = ()) -> Spans:
        """Return the bytes of pages in a layer's pool and in a buffer. whole: whole pages. keys: pages without values,
        whose keys are the first half."""
        page = self.page_bytes(layer, home)
        spans = [(source * page, target * page, count * page) for source, target, count in whole]
        halves = [(source + i, target + i) for source, target, count in keys for i in range(count)]
        return spans + [(source * page, target * page, page // 2) for source, target in halves]

    def _parts(self, layer: int, home: str, spans: Spans, buffer: int) -> list[Transfer]:
        """Return the spans as parts. A page has the same offset in the buffer and in its staging."""
        pool, device = self.region(layer, home), self._buffers[buffer]
        stage = self._stages[buffer] if place_of(home).staged and self._stages else None
        return [
            Transfer([pool.part(first, nbytes)], self._part(stage, start, nbytes) if stage else None,
                 self._part(device, start, nbytes))
            for first, start, nbytes in spans
        ]  # fmt: skip

    def _part(self, base: Region, start: int, nbytes: int) -> Region:
        return Region(base.place, base.start + start, nbytes, self.dtype)

    def _form(self, group: int, tier: str) -> CacheFormat | None:
        if not self.bits:
            return None
        tokens = self.layout.pools[tier][group].page_tokens
        return CacheFormat(self.bits, self.model.kv_heads, tokens, self.model.head_dim)

    def _shape(self, group: int, tier: str, pages: int) -> tuple[int, ...]:
        if self.bits:
            return pages, self.layout.page_bytes[tier][group]
        return pages, 2, self.model.kv_heads, self.layout.pools[tier][group].page_tokens, self.model.head_dim

    def _tensor(self, layer: int, tier: str) -> Tensor:
        group = self.group[layer]
        shape = self._shape(group, tier, self.layout.pools[tier][group].pages)
        return self.machine.tier(tier).view(self.region(layer, tier)).view(shape)

    def close(self) -> None:
        """Drop all references to the memory."""
        for held in (self._on_device, self._by_tier, self._buffers, self._stages):
            held.clear()
