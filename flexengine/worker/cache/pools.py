"""Page pools per tier: their memory, which sequence holds which pages, and how pages are laid out."""

from itertools import accumulate

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kv.pages import Pages
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions
from flexengine.worker.values import PageShape


class Pools:
    """The pages of every tier and group of layers. A tier's pools are one region: group after group, in each layer
    after layer.

    Attributes:
        held: by sequence id, its page ids in each pool of its tier.
        copied: by sequence id and pool, the shared page whose tokens the page being filled begins with. Only sequences
            that begin such a page in the coming sweep have an entry.
        dtype: of the elements of pages; uint8 if they are encoded.
        group: by layer, the number of its group.
    """

    def __init__(
        self, model: ModelFacts, layout: Layout, machine: Machine, regions: Regions, dtype: torch.dtype, bits: int
    ) -> None:
        self.model, self.layout, self.machine, self.dtype, self.bits = model, layout, machine, dtype, bits
        places = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self._places = [places[layer] for layer in range(len(model.layers))]
        self.group = [g for g, _ in self._places]
        self.ids = {tier: [Pages(tier, pool.pages) for pool in pools] for tier, pools in layout.pools.items()}
        self.held: dict[int, list[list[int]]] = {}
        self.copied: dict[int, dict[int, int]] = {}
        self._starts: dict[str, list[int]] = {}  # bytes before each group
        self._homes: dict[str, Region] = {}
        for tier, pools in layout.pools.items():
            each = zip(pools, layout.page_bytes[tier], layout.groups, strict=True)
            sizes = [pool.pages * page * len(group.layers) for pool, page, group in each]
            self._starts[tier] = list(accumulate(sizes, initial=0))
            self._homes[tier] = regions.take(tier, sum(sizes), "KV cache", dtype)
        self._near = [self._tensor(layer, "device") for layer in range(len(self.group))] if "device" in self.ids else []

    def claim(self, sequence: Sequence, tokens: int) -> None:
        """Give the sequence the pages that it lacks to hold `tokens` tokens.

        It shares the pages of the prompt that its source computes. A shared page that it is about to write to is
        replaced by one of its own (copy on write).
        """
        pools, ids = self.layout.pools[sequence.home], self.ids[sequence.home]
        if sequence.id not in self.held:
            shared = self.held[sequence.source.id] if sequence.source else [[] for _ in pools]
            self.held[sequence.id] = [free.share(pages) for free, pages in zip(ids, shared, strict=True)]
        self.copied.pop(sequence.id, None)
        for g, (pool, free, held) in enumerate(zip(pools, ids, self.held[sequence.id], strict=True)):
            if len(held) * pool.page_tokens < tokens and (more := pool.held(tokens) - len(held)) > 0:
                held += free.take(more)
            if sequence.prompt is None or not sequence.cached:
                continue
            entry = pool.entry((tokens - 1) // pool.page_tokens)
            if free.is_shared(held[entry]):
                if sequence.cached % pool.page_tokens:
                    self.copied.setdefault(sequence.id, {})[g] = held[entry]
                free.give([held[entry]])
                held[entry : entry + 1] = free.take(1)

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's pages back."""
        self.copied.pop(sequence.id, None)
        if sequence.id in self.held:
            for free, held in zip(self.ids[sequence.home], self.held.pop(sequence.id), strict=True):
                free.give(held)

    def page_bytes(self, layer: int, tier: str) -> int:
        """Return the bytes of one page of a layer."""
        return self.layout.page_bytes[tier][self.group[layer]]

    def home(self, layer: int, tier: str) -> Region:
        """Return where the pages of a layer are."""
        group, number = self._places[layer]
        nbytes = self.layout.pools[tier][group].pages * self.layout.page_bytes[tier][group]
        return self._homes[tier].part(self._starts[tier][group] + number * nbytes, nbytes)

    def shape(self, group: int, tier: str, pages: int) -> tuple[int, ...]:
        """Return the shape of a tensor of so many pages."""
        if self.bits:
            return pages, self.layout.page_bytes[tier][group]
        return pages, 2, self.model.kv_heads, self.layout.pools[tier][group].page_tokens, self.model.head_dim

    def form(self, layer: int, tier: str) -> CacheFormat | None:
        """Return how pages of a layer are encoded there."""
        return self._form(self.group[layer], tier)

    def page_shape(self, group: int, tier: str) -> PageShape:
        """Return how pages of a group are laid out."""
        model, tokens = self.model, self.layout.pools[tier][group].page_tokens
        return PageShape.of(self._form(group, tier), model.kv_heads, tokens, model.head_dim * self.dtype.itemsize)

    def near(self, layer: int) -> Tensor:
        """Return the pages of a layer on the device."""
        return self._near[layer]

    def far(self, layer: int) -> Tensor:
        """Return the pages of a layer on the host, where they are."""
        return self._tensor(layer, "host")

    def _form(self, group: int, tier: str) -> CacheFormat | None:
        if not self.bits:
            return None
        tokens = self.layout.pools[tier][group].page_tokens
        return CacheFormat(self.bits, self.model.kv_heads, tokens, self.model.head_dim)

    def _tensor(self, layer: int, tier: str) -> Tensor:
        group = self.group[layer]
        shape = self.shape(group, tier, self.layout.pools[tier][group].pages)
        return self.machine.tier(tier).view(self.home(layer, tier)).view(shape)

    def close(self) -> None:
        """Drop all references to the memory."""
        self._near.clear()
        self._homes.clear()
