"""The KV cache of a job, and attention over it."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import AttentionOptions, Kernels, Past, PromptCall
from flexengine.kernels.paged import PagedAttention, PagedTokens, PromptPieces
from flexengine.kernels.recycled import Recycled
from flexengine.kv.free_pages import Pages
from flexengine.kv.smoothing import mean_key, rotation, turned
from flexengine.lossy import EXACT, Lossy
from flexengine.model.forward import Attend
from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import MEAN_KEYS, Layout
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.machine import Machine
from flexengine.worker.cache.movement import Movement
from flexengine.worker.cache.pools import Pools
from flexengine.worker.cache.tables import MeanKeys, Tables, View, packed, tables_of
from flexengine.worker.regions import Regions
from flexengine.worker.values import Values


class Cache:
    """Pools and buffers of KV pages, and attention over pages.

    Attributes:
        pools: pages of every tier.
        movement: copies between pools and device buffers.
        bits: bits of an encoded element; 0 if pages are not encoded.
        topk: fraction of the values that attention reads; None for all.
    """

    def __init__(
        self, model: ModelFacts, layout: Layout, machine: Machine, kernels: Kernels, dtype: torch.dtype,
        lossy: Lossy = EXACT,
    ) -> None:  # fmt: skip
        self.model, self.layout, self.machine, self.kernels = model, layout, machine, kernels
        self.bits, self.topk = lossy.cache_bits, lossy.sparse_attention
        dtype = torch.bfloat16 if lossy.cache == "bf16" else dtype
        dtype = torch.uint8 if self.bits else dtype  # of the elements of pages
        self.layers = len(model.layers)
        self._regions = Regions(machine)
        self.pools = Pools(model, layout, machine, self._regions, dtype, self.bits)
        self.movement = Movement(layout, machine, self._regions, self.pools, dtype)
        self._values = Values(layout, machine, self._regions) if layout.values else None
        self._rotation = rotation(model.head_dim).to(machine.compute) if self.smooth else None
        self._free_means = Pages("device", layout.policy.block_size if self.smooth else 0)
        self._mean: dict[int, int] = {}  # by sequence: index of its mean keys
        self._results = Recycled()  # of attention
        self._memory: Tensor | None = None  # scratch memory of attention, which cells use one after the other
        self._means: Tensor | None = None  # [layers, sequences, kv_heads, head_dim]
        if self.smooth:
            region = self._regions.take("device", layout.account["device"][MEAN_KEYS], MEAN_KEYS, torch.float32)
            shape = (self.layers, layout.policy.block_size, model.kv_heads, model.head_dim)
            self._means = machine.device.view(region).view(-1)[: prod(shape)].view(shape)

    @property
    def smooth(self) -> bool:
        """Whether keys and values are smoothed before they are encoded. With 8 bits, smoothing is not needed."""
        return 0 < self.bits < 8

    def claim(self, sequence: Sequence, tokens: int) -> None:
        """Take pages for the sequence until it can hold `tokens` tokens."""
        self.pools.claim(sequence, tokens)
        if self.smooth and sequence.id not in self._mean:
            source = sequence.source
            (index,) = self._free_means.share([self._mean[source.id]]) if source else self._free_means.take(1)
            self._mean[sequence.id] = index

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages to the pools."""
        if sequence.id in self._mean:
            self._free_means.give([self._mean.pop(sequence.id)])
        self.pools.release(sequence)

    def view(self, batch: Batch) -> View:
        """Return the page tables of a gpu_batch for the next sweep."""
        tier, pieces, compute = batch.cache_home, packed(batch), self.machine.compute
        held = self.pools.held
        shared = {i: pages for i, p in enumerate(pieces) if (pages := self.pools.shared.get(p.sequence))}
        groups = (
            tables_of(batch, pieces, pool, [held[p.sequence][g] for p in pieces],
                      {i: (tokens, ids[g]) for i, (tokens, ids) in shared.items()}, self.pools.page_shape(g, tier),
                      compute, self._values is not None and not place_of(tier).worker)
            for g, pool in enumerate(self.layout.pools[tier])
        )  # fmt: skip
        return View(sum(p.single for p in pieces), tuple(groups), self._means_of(pieces, compute))

    def tables(self, view: View, layer: int) -> Tables:
        """Return the part of a view that belongs to a layer."""
        return view.groups[self.pools.group[layer]]

    def load(self, layer: int, home: str, view: View, buffer: int, hop: int) -> None:
        """Copy the batch's cached pages of one layer one leg toward a device buffer; see `Mover.load`."""
        self.movement.load(layer, home, self.tables(view, layer), buffer, hop)

    def store(self, layer: int, home: str, view: View, buffer: int, hop: int) -> None:
        """Copy pages and rows that this sweep appended one leg toward their tier; see `Mover.store`."""
        self.movement.store(layer, home, self.tables(view, layer), buffer, hop)

    def attend(self, event: Attend, view: View, home: str, buffer: int | None) -> Tensor:
        """Append the new K and V and return attention `[1, tokens, heads, head_dim]`.

        Tokens of prompts are appended after attention, as they may overwrite pages that the piece's queries see.

        Args:
            event: on the device.
            view: page tables of the gpu_batch.
            home: tier of the pages.
            buffer: number of the device buffer; None if the pages are on the device.
        """
        layer, tables, n = event.layer, self.tables(view, event.layer), view.decode
        width, event = event.v.shape[-1], self.prepared(event, view)
        pool, form = self._pool(layer, home, buffer), self.pools.form(layer, home)
        qkv = q, k, v = tuple(x[0].transpose(0, 1) for x in (event.q, event.k, event.v))
        copy_pages(pool, tables)
        if n:
            self.kernels.append(k[:n], v[:n], pool, tables.pages[:n], tables.offsets[:n], form)
        if tables.closed is not None:
            self._choose(event, q[:n], pool, tables, home, buffer)
        out = self._attend(event, qkv, pool, tables, form)
        if n < len(k):
            k, v = (x[n:] if tables.kept is None else x[tables.kept] for x in (k, v))
            self.kernels.append(k, v, pool, tables.pages[n:], tables.offsets[n:], form)
        return self.restored(out, width)

    def paged(
        self, layers: range, windows: Mapping[int, int | None], view: View, home: str, buffer: int | None
    ) -> list[PagedAttention]:  # fmt: skip
        """Return what calls for whole layers need in place of `attend`, up to a layer that needs `attend`, or that has
        other page tables or another window than the first layer. Pages in a buffer are those of the first layer.

        Args:
            layers: numbers of the layers.
            windows: by layer, tokens that a query sees; None for all.
            view, home, buffer: as in `attend`.
        """
        found, first = list[PagedAttention](), layers.start
        for layer in layers if buffer is None else layers[:1]:
            if windows[layer] != windows[first] or self.tables(view, layer) is not self.tables(view, first):
                break
            if (paged := self._paged(layer, windows[layer], view, home, buffer)) is None:
                break
            found.append(paged)
        return found

    def _paged(
        self, layer: int, window: int | None, view: View, home: str, buffer: int | None
    ) -> PagedAttention | None:
        tables = self.tables(view, layer)
        if tables.copies or tables.closed or tables.kept is not None or self.topk is not None or self.smooth:
            return None
        pool, found = self._pool(layer, home, buffer), tables.paged
        if found is None or found.window != window or found.pool.shape != pool.shape:
            tokens = PagedTokens(tables.tables, tables.lengths, tables.pages, tables.offsets, tables.prompts)
            form = self.pools.form(layer, home)
            found = self.kernels.paged(self.model.heads, pool, tokens, window, form, self._memory)
            tables.paged, self._memory = found, None if found is None else found.memory
        return None if found is None else found._replace(pool=pool)

    def _pool(self, layer: int, home: str, buffer: int | None) -> Tensor:
        """Return the pages of a layer, or the buffer that they pass through."""
        return self.pools.on_device(layer) if buffer is None else self.movement.tensor(layer, home, buffer)

    def prepared(self, event: Attend, view: View) -> Attend:
        """Return the event with q, k, v in the layout of pages, and smoothed if pages are encoded in few bits."""
        return self._smoothed(fit(event, self.model.kv_heads, self.model.head_dim), view)

    def restored(self, out: Tensor, width: int) -> Tensor:
        """Return the output of attention of a `prepared` event in the layout of the model.

        Args:
            out: [..., head_dim of pages].
            width: elements of a head's output in the model.
        """
        out = out if self._rotation is None else turned(out, self._rotation)
        return out if width == out.shape[-1] else out[..., :width]

    def on_device(self, layer: int) -> Tensor:
        """Return the pages of a layer on the device."""
        return self.pools.on_device(layer)

    def on_host(self, layer: int) -> tuple[Tensor, CacheFormat | None]:
        """Return the pages of a layer in host RAM, and their format; None if they are not encoded."""
        return self.pools.on_host(layer), self.pools.form(layer, "host")

    def _means_of(self, pieces: list[Piece], device: torch.device) -> MeanKeys | None:
        if not self.smooth:
            return None
        opening, by_token, first = [], [], 0
        for piece in pieces:
            index = self._mean[piece.sequence]
            if not piece.start:
                opening.append((index, first, first + piece.count))
            by_token += [index] * piece.count
            first += piece.count
        return MeanKeys(opening, torch.tensor(by_token).to(device))

    def _smoothed(self, event: Attend, view: View) -> Attend:
        """Return the event with smoothed q, k, v (kv.smoothing)."""
        if self._rotation is None or self._means is None or view.means is None:
            return event
        q, k, v = event.q, event.k, event.v
        if event.softcap is None and event.sinks is None:
            keys, means = k[0].transpose(0, 1), self._means[event.layer]
            for index, first, end in view.means.opening:
                means[index] = mean_key(keys[first:end])
            k = (keys - means[view.means.by_token].to(k.dtype)).transpose(0, 1)[None]
        q, k, v = (turned(x, self._rotation) for x in (q, k, v))
        return event._replace(q=q, k=k, v=v)

    def _choose(self, event: Attend, q: Tensor, pool: Tensor, tables: Tables, home: str, buffer: int | None) -> None:
        """Load the values that decoding sequences read, of pages that were loaded without values.

        Args:
            event: attention of the whole gpu_batch.
            q: [decode, heads, head_dim], queries of the decoding sequences.
            pool: pages of the buffer.
            tables: page tables of the layer.
            home: tier of the pages.
            buffer: number of the device buffer.
        """
        assert tables.closed is not None
        assert buffer is not None
        assert self._values is not None
        layer, options = event.layer, AttentionOptions(event.scale, event.window, event.softcap, None, self.topk)
        form = self.pools.form(layer, home)
        chosen = self.kernels.choose(q, pool, tables.tables, tables.lengths, options, form)
        shape = self.pools.page_shape(self.pools.group[layer], home)
        source, target = self.pools.region(layer, home), self.movement.room(layer, home, buffer)
        self._values.bring(chosen, tables.closed, home, source, target, shape)

    def _attend(
        self, event: Attend, qkv: tuple[Tensor, ...], pool: Tensor, tables: Tables, form: CacheFormat | None
    ) -> Tensor:
        q, k, v = qkv
        options = AttentionOptions(event.scale, event.window, event.softcap, event.sinks, self.topk)
        n = len(tables.lengths)
        if n == q.shape[0]:
            return self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, options, form)[None]
        out = q.new_empty(q.shape) if q.is_cuda else self._results.empty(q.shape, q.dtype)
        if n:
            out[:n] = self.kernels.decode_attention(q[:n], pool, tables.tables, tables.lengths, options, form)
        calls = list[PromptCall]()
        for p in tables.prompts:
            # New keys and values are used as computed, without encoding.
            past = None if p.table is None else Past(pool, p.table, p.past, form)
            calls.append(PromptCall(_of(p, q), _of(p, k), _of(p, v), _of(p, out), past))
        self.kernels.attend_prompts(calls, options)
        return out[None]

    def close(self) -> None:
        """Free all memory of the pools and buffers, even if other objects still refer to this cache."""
        self._means = self._values = self._memory = None
        self._results.release()
        self.pools.close()
        self.movement.close()
        self._regions.free()


def _of(prompts: PromptPieces, x: Tensor) -> Tensor:
    """Return the tokens of prompts, [rows, length, ...], of x [tokens, ...]."""
    tokens = x[prompts.first : prompts.first + prompts.rows * prompts.length]
    return tokens.view(prompts.rows, prompts.length, *x.shape[1:])


def copy_pages(pool: Tensor, tables: Tables) -> None:
    """Copy the shared pages of a layer that the sweep writes to (copy on write)."""
    for source, target in tables.copies:
        pool[target].copy_(pool[source])


def fit(event: Attend, kv_heads: int, head_dim: int) -> Attend:
    """Return the event with `kv_heads` KV heads of `head_dim` elements, the layout of all layers' pages.

    Heads are padded with zeros, which do not change scores, and add zeros to the output. KV heads are repeated.
    """
    q, k, v = (
        x if x.shape[-1] == head_dim else torch.nn.functional.pad(x, (0, head_dim - x.shape[-1]))
        for x in (event.q, event.k, event.v)
    )
    if (copies := kv_heads // k.shape[1]) > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    return event._replace(q=q, k=k, v=v)
