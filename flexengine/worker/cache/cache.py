"""The KV cache of a job, and attention over it."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import AttentionOptions, Kernels, Past, PromptCall
from flexengine.kernels.paged import PagedAttention, PagedTokens, PromptPieces
from flexengine.kernels.recycled import Recycled
from flexengine.lossy import EXACT, Lossy
from flexengine.model.forward import Attend
from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import MEAN_KEYS, Layout
from flexengine.schedule.batches import Batch
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.machine import Machine
from flexengine.worker.cache.pools import STATES, Pools, SequenceState
from flexengine.worker.cache.tables import Tables, View, copy_pages, packed, tables_of
from flexengine.worker.regions import Regions

if TYPE_CHECKING:
    from flexengine.worker.cache.smoothing import Smoothing

RECORDS = "flexengine.model.mixers:StateRecords"  # imported if layers have states
CHOSEN = "flexengine.worker.cache.chosen"  # imported if tokens see chosen keys only
VALUES_ON_DEMAND = "flexengine.worker.on_demand:Values"  # imported if attention reads a fraction of the values


class Cache:
    """Pools and buffers of KV pages, and attention over pages.

    Attributes:
        states: kinds of state that each sequence has; the first one is `pools`.
        pools: pages of every tier.
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
        kinds = [name for name in STATES if name in layout.account.get("device", {})]
        others: dict[str, Any] = {n: resolve_name(STATES[n])(model, layout, machine, self._regions) for n in kinds}
        self._smoothing: Smoothing | None = others.get(MEAN_KEYS)
        self.states: tuple[SequenceState, ...] = (self.pools, *others.values())
        self._values = resolve_name(VALUES_ON_DEMAND)(layout, machine, self._regions) if layout.values else None
        self._results = Recycled()  # of attention
        self._memory: Tensor | None = None  # scratch memory of attention, which cells use one after the other

    def claim(self, sequence: Sequence, tokens: int) -> None:
        """Take pages and records for the sequence until it can hold `tokens` tokens."""
        for state in self.states:
            state.claim(sequence, tokens)

    def release(self, sequence: Sequence) -> None:
        """Give back all that the sequence holds."""
        for state in self.states:
            state.release(sequence)

    def view(self, batch: Batch) -> View:
        """Return the page tables of a gpu_batch for the next sweep."""
        tier, pieces, compute = batch.cache_home, packed(batch), self.machine.compute
        held = self.pools.held
        shared = {i: pages for i, p in enumerate(pieces) if (pages := self.pools.shared.get(p.sequence))}
        groups = (
            tables_of(batch, pieces, pool, [held[p.sequence][g] for p in pieces],
                      {i: (tokens, ids[g]) for i, (tokens, ids) in shared.items()}, self.pools.page_shape(g, tier),
                      compute, self._values is not None and not batch.delegated and not place_of(tier).worker)
            for g, pool in enumerate(self.layout.pools[tier])
        )  # fmt: skip
        means = self._smoothing.of(pieces) if self._smoothing else None
        return View(sum(p.single for p in pieces), tuple(groups), means)

    def tables(self, view: View, layer: int) -> Tables:
        """Return the part of a view that belongs to a layer."""
        return view.groups[self.pools.group[layer]]

    def records(
        self, layer: int, view: View, home: str, buffer: int | None, pages: Callable[[], Any] | None = None
    ) -> Any:
        """Return the records of a gpu_batch in a layer: `model.mixers.StateRecords`. Arguments as in `attend`. pages:
        `index_pages`, if the layer has an indexer, too."""
        tables, records = self.tables(view, ~layer), self._pool(~layer, home, buffer)
        copy_pages(records, tables)
        return resolve_name(RECORDS)(records, tables.pages.long(), view.decode, tables.prompts, pages and pages())

    def index_pages(self, layer: int, view: View, home: str, buffer: int | None, prompts: list[int]) -> Any:
        """Return where keys of an indexer are: `adapters.sparse.IndexPages`. prompts: tokens of each piece's prompt;
        other arguments as in `attend`."""
        tables, pool = self.tables(view, layer), self._pool(layer, home, buffer)
        copy_pages(pool, tables)
        return resolve_name(f"{CHOSEN}:index_pages")(pool, tables, prompts)

    def attend(self, event: Attend, view: View, home: str, buffer: int | None) -> Tensor:
        """Append the new K and V and return attention `[1, tokens, heads, head_dim]`.

        Tokens of prompts are appended after attention, as they may overwrite pages that the piece's queries see.

        Args:
            home: tier of the pages.
            buffer: number of the device buffer; None if the pages are on the device.
        """
        layer, tables, n = event.layer, self.tables(view, event.layer), view.decode
        width, event = event.v.shape[-1], self.prepared(event, view)
        pool, form = self._pool(layer, home, buffer), self.pools.form(layer, home)
        options = AttentionOptions(event.scale, event.window, event.softcap, event.sinks, self.topk, self.model.rounded)
        qkv = q, k, v = tuple(x[0].transpose(0, 1) for x in (event.q, event.k, event.v))
        copy_pages(pool, tables)
        if event.choice is not None and (function := event.choice.attends):
            return self.restored(resolve_name(function)(self.kernels, options, qkv, pool, tables, event.choice), width)
        if n:
            self.kernels.append(k[:n], v[:n], pool, tables.pages[:n], tables.offsets[:n], form)
        if tables.closed is not None:  # load the values that decoding sequences read
            assert buffer is not None
            assert self._values is not None
            chosen = self.kernels.choose(q[:n], pool, tables.tables, tables.lengths, options, form)
            source, target = self.pools.region(layer, home), self.pools.room(layer, home, buffer)
            shape = self.pools.page_shape(self.pools.group[layer], home)
            self._values.bring(chosen, tables.closed, home, source, target, shape)
        out = self._attend(options, qkv, pool, tables, form)
        if n < len(k):
            k, v = (x[n:] if tables.kept is None else x[tables.kept] for x in (k, v))
            self.kernels.append(k, v, pool, tables.pages[n:], tables.offsets[n:], form)
        return self.restored(out, width)

    def paged(
        self, layers: range, windows: Mapping[int, int | None], view: View, home: str, buffer: int | None
    ) -> list[PagedAttention]:
        """Return what calls for whole layers need in place of `attend`, up to a layer that needs `attend`, or that has
        other page tables or another window than the first layer. Pages in a buffer are those of the first layer.
        windows: by layer, tokens that a query sees; None for all."""
        if not layers or self.topk is not None or self._smoothing:
            return []
        calls, window, tables = list[PagedAttention](), windows[layers.start], self.tables(view, layers.start)
        if tables.copies or tables.closed or tables.kept is not None:
            return []
        for layer in layers if buffer is None else layers[:1]:
            if windows[layer] != window or self.tables(view, layer) is not tables:
                break
            pool, found = self._pool(layer, home, buffer), tables.paged
            if found is None or found.window != window or found.pool.shape != pool.shape:
                tokens = PagedTokens(tables.tables, tables.lengths, tables.pages, tables.offsets, tables.prompts)
                form = self.pools.form(layer, home)
                more = form, self._memory, self.model.rounded
                found = tables.paged = self.kernels.paged(self.model.heads, pool, tokens, window, *more)
                self._memory = None if found is None else found.memory
            if found is None:
                break
            calls.append(found._replace(pool=pool))
        return calls

    def _pool(self, layer: int, home: str, buffer: int | None) -> Tensor:
        """Return the pages of a layer, or the buffer that they pass through."""
        return self.pools.view(layer, "device") if buffer is None else self.pools.in_buffer(layer, home, buffer)

    def prepared(self, event: Attend, view: View) -> Attend:
        """Return the event with q, k, v in the layout of all layers' pages, smoothed if pages are encoded in few bits.

        Heads are padded with zeros, which do not change scores, and add zeros to the output. KV heads are repeated.
        """
        dim = self.model.head_dim
        q, k, v = (
            x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
            for x in (event.q, event.k, event.v)
        )
        if (copies := self.model.kv_heads // k.shape[1]) > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        event = event._replace(q=q, k=k, v=v)
        return self._smoothing.smoothed(event, view.means) if self._smoothing and view.means else event

    def restored(self, out: Tensor, width: int) -> Tensor:
        """Return the output of attention of a `prepared` event in the layout of the model.

        Args:
            out: [..., head_dim of pages].
            width: elements of a head's output in the model.
        """
        out = self._smoothing.turned(out) if self._smoothing else out
        return out if width == out.shape[-1] else out[..., :width]

    def on_host(self, layer: int) -> tuple[Tensor, CacheFormat | None]:
        """Return the pages of a layer in host RAM, and their format; None if they are not encoded."""
        return self.pools.view(layer, "host"), self.pools.form(layer, "host")

    def _attend(
        self, options: AttentionOptions, qkv: tuple[Tensor, ...], pool: Tensor, tables: Tables, form: CacheFormat | None
    ) -> Tensor:
        (q, k, v), n = qkv, len(tables.lengths)
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
        self._smoothing = self._values = self._memory = None
        self.states = ()
        self._results.release()
        self.pools.close()
        self._regions.free()


def _of(prompts: PromptPieces, x: Tensor) -> Tensor:
    """Return the tokens of prompts, [rows, length, ...], of x [tokens, ...]."""
    tokens = x[prompts.first : prompts.first + prompts.rows * prompts.length]
    return tokens.view(prompts.rows, prompts.length, *x.shape[1:])
