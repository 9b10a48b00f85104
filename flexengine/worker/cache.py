"""The KV cache: page pools per tier, and for each gpu_batch the tables that every layer of a sweep shares."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheForm
from flexengine.kernels.base import Kernels, Past
from flexengine.kv.pages import Pages
from flexengine.kv.smoothing import mean_key, rotation, turned
from flexengine.lossy import EXACT, Lossy
from flexengine.model.forward import Attend
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import MEAN_KEYS, Layout
from flexengine.schedule.order import Batch, Piece, pages_for
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.base import Home
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions
from flexengine.worker.rows import Rows, rows_of, store_rows
from flexengine.worker.values import Closed, PageShape, Values

Runs = list[tuple[int, int, int]]  # (first page in the pool, first page in the buffer, pages)
Spans = list[tuple[int, int, int]]  # the same in bytes


class Prompts(NamedTuple):
    """Pieces of equal length, one after another in the batch: tokens first .. first + rows * length - 1."""

    first: int
    rows: int
    length: int
    past: int  # tokens cached before; only single pieces have any
    table: Tensor | None


class MeanKeys(NamedTuple):
    """Where the mean keys of a batch's tokens are kept. opening: (place, first token, end) of each sequence that
    begins; of: place by token, [tokens]."""

    opening: list[tuple[int, int, int]]
    of: Tensor


@dataclass
class View:
    """One gpu_batch's share of the cache during a sweep. Page numbers count in the pool, or in a buffer off the device
    unless attention is delegated: then they count in the host's pool, and the tables lie on the host.

    decode: how many of the first tokens are single ones; tables, lengths: theirs. pages, offsets: of every new token.
    load, store: runs to bring before and write after compute; keys: of which only those, and of which values are
    brought when they are chosen (`closed`). means: only where keys are kept without theirs. rows: what is written after
    compute of decoding sequences at home in RAM, instead of their pages.
    """

    decode: int
    tables: Tensor
    lengths: Tensor
    pages: Tensor
    offsets: Tensor
    prompts: list[Prompts]
    load: Runs
    store: Runs
    keys: Runs
    closed: Closed | None = None
    means: MeanKeys | None = None
    rows: tuple[Rows, ...] = ()


def packed(batch: Batch) -> list[Piece]:
    """The batch's pieces in the order their tokens are packed: single tokens first, then by length."""
    return sorted(batch.pieces, key=lambda p: (p.count > 1, p.count, p.start > 0))


class Cache:
    """Pools, buffers, and the movement between them."""

    def __init__(
        self, model: ModelFacts, layout: Layout, machine: Machine, kernels: Kernels, dtype: torch.dtype,
        lossy: Lossy = EXACT,
    ) -> None:  # fmt: skip
        self.model, self.layout, self.machine, self.kernels = model, layout, machine, kernels
        self.bits, self.topk = lossy.cache_bits, lossy.topk
        dtype = torch.bfloat16 if lossy.cache == "bf16" else dtype
        self.dtype = dtype = torch.uint8 if self.bits else dtype  # of what lies in pools
        self.layers = len(model.layers)
        self.pages = {tier: Pages(tier, pool.pages) for tier, pool in layout.pools.items()}
        self._regions = Regions(machine)
        take, size = self._regions.take, layout.cache_buffer
        self._homes = {
            tier: take(tier, self.layers * pool.pages * layout.page_bytes[tier], "KV cache", dtype)
            for tier, pool in layout.pools.items()
        }
        count = layout.policy.slots if size else 0
        self._buffers = [take("device", size, "cache buffers", dtype) for _ in range(count)]
        count = count if "disk" in layout.pools and machine.capacity.staged else 0
        self._stages = [take("host", size, "cache staging", dtype) for _ in range(count)]
        self._device = machine.device.view(self._homes["device"]).view(self.layers, *self._shape("device")) \
            if "device" in self._homes else None  # fmt: skip
        self._values = Values(layout, machine, self._regions) if layout.values else None
        self._turn = rotation(model.head_dim).to(machine.compute) if self.smooth else None
        self._places = Pages("device", layout.policy.block_size if self.smooth else 0)
        self._place: dict[int, int] = {}  # by sequence: of its mean keys
        self._means: Tensor | None = None
        if self.smooth:
            home = take("device", layout.account["device"][MEAN_KEYS], MEAN_KEYS, torch.float32)
            shape = (self.layers, layout.policy.block_size, model.kv_heads, model.head_dim)
            self._means = machine.device.view(home).view(-1)[: prod(shape)].view(shape)

    @property
    def smooth(self) -> bool:
        """Whether keys and values are smoothed before they are encoded: of 8 bits they need not be."""
        return 0 < self.bits < 8

    def _shape(self, tier: str, pages: int = -1) -> tuple[int, ...]:
        pool = self.layout.pools[tier]
        count = pool.pages if pages < 0 else pages
        if self.bits:
            return count, self.layout.page_bytes[tier]
        return count, 2, self.model.kv_heads, pool.page_tokens, self.model.head_dim

    def _form(self, tier: str) -> CacheForm | None:
        """How pages of that home are encoded."""
        if not self.bits:
            return None
        return CacheForm(self.bits, self.model.kv_heads, self.layout.pools[tier].page_tokens, self.model.head_dim)

    def _page_shape(self, home: str) -> PageShape:
        model, tokens = self.model, self.layout.pools[home].page_tokens
        return PageShape.of(self._form(home), model.kv_heads, tokens, model.head_dim * self.dtype.itemsize)

    def claim(self, sequence: Sequence, pages: int) -> None:
        """Gives the sequence pages until it has `pages`."""
        if (more := pages - len(sequence.pages)) > 0:
            sequence.pages += self.pages[sequence.home].take(more)
        if self.smooth and sequence.id not in self._place:
            self._place[sequence.id] = self._places.take(1)[0]

    def release(self, sequence: Sequence) -> None:
        if sequence.id in self._place:
            self._places.give([self._place.pop(sequence.id)])
        self.pages[sequence.home].give(sequence.pages)
        sequence.pages = []

    def view(self, batch: Batch, live: dict[int, Sequence]) -> View:
        """The tables of one batch for one sweep."""
        tokens = self.layout.pools[batch.cache_home].page_tokens
        pieces = packed(batch)
        owned = [live[p.sequence].pages[: pages_for(p.start + p.count, tokens)] for p in pieces]
        tables, load, store, keys, closed = owned, Runs(), Runs(), Runs(), None
        tokens_stored: list[tuple[int, int, int]] = []  # page in the pool, page in the buffer, place in the page
        decode = sum(p.count == 1 for p in pieces)
        if batch.cache_home != "device" and not batch.delegated:
            tables, at = [], 0
            for piece, pages in zip(pieces, owned, strict=True):
                tables.append(list(range(at, at + len(pages))))
                past, first = pages_for(piece.start, tokens), piece.start // tokens
                hollow = first if self._values and piece.count == 1 else 0  # pages that come without their values
                keys += _join(pages[:hollow], at)
                load += _join(pages[hollow:past], at + hollow)
                if piece.decodes and batch.cache_home == "host":
                    tokens_stored.append((pages[first], at + first, piece.start % tokens))
                else:
                    store += _join(pages[first:], at + first)
                at += len(pages)
        compute = self.machine.compute
        if keys:
            starts = torch.tensor([p.start // tokens * tokens for p in pieces[:decode]])
            closed = Closed(*(x.to(compute) for x in (_padded(owned[:decode]), _padded(tables[:decode]), starts)))
        on = torch.device("cpu") if batch.delegated else compute
        positions = [range(p.start, p.start + p.count) for p in pieces]
        page_ids = [t[s // tokens] for t, span in zip(tables, positions, strict=True) for s in span]
        offsets = [s % tokens for span in positions for s in span]
        return View(
            decode,
            _padded(tables[:decode]).int().to(on),
            _int32([p.start + 1 for p in pieces[:decode]], on),
            _int32(page_ids, on), _int32(offsets, on),
            _prompts(pieces[decode:], tables[decode:], decode, on), load, store, keys, closed,
            self._means_of(pieces, compute), tuple(rows_of(self._page_shape(batch.cache_home), tokens_stored, compute)),
        )  # fmt: skip

    def _means_of(self, pieces: list[Piece], on: torch.device) -> MeanKeys | None:
        if not self.smooth:
            return None
        opening, of, at = [], [], 0
        for piece in pieces:
            place = self._place[piece.sequence]
            if not piece.start:
                opening.append((place, at, at + piece.count))
            of += [place] * piece.count
            at += piece.count
        return MeanKeys(opening, torch.tensor(of).to(on))

    def _pool(self, layer: int, home: str, buffer: int) -> Tensor:
        if buffer < 0:
            assert self._device is not None
            return self._device[layer]
        room = self._room(home, buffer)
        return self.machine.device.view(room).view(self._shape(home, room.nbytes // self.layout.page_bytes[home]))

    def _room(self, home: str, buffer: int) -> Home:
        """What of a buffer whole pages of that home take."""
        page, base = self.layout.page_bytes[home], self._buffers[buffer]
        return Home(base.place, base.start, self.layout.cache_buffer // page * page, self.dtype)

    def _layer(self, layer: int, home: str) -> Home:
        """The pages of a layer where they live."""
        nbytes = self.layout.pools[home].pages * self.layout.page_bytes[home]
        return self._homes[home].part(layer * nbytes, nbytes)

    def attend(self, event: Attend, view: View, home: str, buffer: int) -> Tensor:
        """Appends the new K and V and returns attention `[1, tokens, heads, head_dim]`."""
        width, event = event.v.shape[-1], self.prepared(event, view)
        pool, form = self._pool(event.layer, home, buffer), self._form(home)
        q, k, v = (x[0].transpose(0, 1) for x in (event.q, event.k, event.v))
        self.kernels.append(k, v, pool, view.pages, view.offsets, form)
        if view.closed is not None:
            self._choose(event, q, pool, view, home, buffer)
        out = self._attend(event, (q, k, v), pool, view, form)
        return self.restored(out, width)

    def prepared(self, event: Attend, view: View) -> Attend:
        """The same attention as pages are laid out and encoded."""
        return self._smoothed(fit(event, self.model.kv_heads, self.model.head_dim), view)

    def restored(self, out: Tensor, width: int) -> Tensor:
        """The output of prepared attention as the model knows it. width: of its heads."""
        out = out if self._turn is None else turned(out, self._turn)
        return out if width == out.shape[-1] else out[..., :width]

    def on_device(self, layer: int) -> Tensor:
        """The device's pool of a layer."""
        return self._pool(layer, "device", -1)

    def on_host(self, layer: int) -> tuple[Tensor, CacheForm | None]:
        """The host's pool of a layer where it lies, and how it is encoded."""
        pool = self.machine.host.view(self._homes["host"]).view(self.layers, *self._shape("host"))
        return pool[layer], self._form("host")

    def _smoothed(self, event: Attend, view: View) -> Attend:
        """The same attention with queries, keys and values as they are to be encoded (kv.smoothing)."""
        if self._turn is None or self._means is None or view.means is None:
            return event
        q, k, v = event.q, event.k, event.v
        if event.softcap is None and event.sinks is None:
            keys, means = k[0].transpose(0, 1), self._means[event.layer]
            for place, first, end in view.means.opening:
                means[place] = mean_key(keys[first:end])
            k = (keys - means[view.means.of].to(k.dtype)).transpose(0, 1)[None]
        return event._replace(q=turned(q, self._turn), k=turned(k, self._turn), v=turned(v, self._turn))

    def _choose(self, event: Attend, q: Tensor, pool: Tensor, view: View, home: str, buffer: int) -> None:
        """Brings the values that decoding sequences are about to read, of pages that came without."""
        assert view.closed is not None
        assert self._values is not None
        assert self.topk is not None
        form, n = self._form(home), view.decode
        chosen = self.kernels.choose(q[:n], pool, view.tables, view.lengths, event.scale, self.topk, event.window,
                                     event.softcap, form)  # fmt: skip
        shape = self._page_shape(home)
        self._values.bring(chosen, view.closed, home, self._layer(event.layer, home), self._room(home, buffer), shape)

    def _attend(
        self, event: Attend, qkv: tuple[Tensor, Tensor, Tensor], pool: Tensor, view: View, form: CacheForm | None
    ) -> Tensor:
        q, k, v = qkv
        options = (event.scale, event.window, event.softcap, event.sinks)
        n = view.decode
        if n == q.shape[0]:
            return self.kernels.decode(q, pool, view.tables, view.lengths, *options, form, self.topk)[None]
        out = q.new_empty(q.shape)
        if n:
            out[:n] = self.kernels.decode(q[:n], pool, view.tables, view.lengths, *options, form, self.topk)
        for p in view.prompts:
            span = slice(p.first, p.first + p.rows * p.length)
            qs, ks, vs = (x[span].view(p.rows, p.length, *x.shape[1:]) for x in (q, k, v))
            # New keys and values are used as computed, not as rounded for the cache.
            past = None if p.table is None else Past(pool, p.table, p.past, form)
            out[span] = self.kernels.attend_prompt(qs, ks, vs, *options, past).flatten(0, 1)
        return out[None]

    def _spans(self, home: str, whole: Runs, keys: Runs | tuple[()] = ()) -> Spans:
        """What of a layer's pool and of a buffer those pages take, and the first halves of those of `keys`."""
        page = self.layout.page_bytes[home]
        found = [(first * page, at * page, count * page) for first, at, count in whole]
        halves = [(first + i, at + i) for first, at, count in keys for i in range(count)]
        return found + [(first * page, at * page, page // 2) for first, at in halves]

    def _pairs(self, layer: int, home: str, spans: Spans, where: list[Home], buffer: int) -> list[tuple[Home, Home]]:
        """(part of the pool, its place in a buffer or stage) of every span."""
        pool, base = self._layer(layer, home), where[buffer]
        return [
            (pool.part(first, nbytes), Home(base.place, base.start + at, nbytes, self.dtype))
            for first, at, nbytes in spans
        ]

    def load(self, layer: int, home: str, view: View, buffer: int, hop: int) -> None:
        """Brings the batch's cached pages of one layer one leg further: to staging, or to its device buffer."""
        staged, machine = home == "disk" and bool(self._stages), self.machine
        spans = self._spans(home, view.load, view.keys)
        if staged and hop == 1:
            self._between(spans, buffer, up=True)
            return
        where, near = (self._stages, machine.host) if staged else (self._buffers, machine.device)
        pairs = self._pairs(layer, home, spans, where, buffer)
        machine.tier(home).load_all([(far, near.view(inside)) for far, inside in pairs])

    def store(self, layer: int, home: str, view: View, buffer: int, hop: int) -> None:
        """Writes what this sweep appended one leg further: pages to staging or to their home, rows to their home."""
        staged, machine = home == "disk" and bool(self._stages), self.machine
        spans = self._spans(home, view.store)
        if staged and hop == 0:
            self._between(spans, buffer, up=False)
            return
        where, near = (self._stages, machine.host) if staged else (self._buffers, machine.device)
        pairs = self._pairs(layer, home, spans, where, buffer)
        machine.tier(home).store_all([(near.view(inside), far) for far, inside in pairs])
        for rows in view.rows:
            store_rows(machine, rows, self._room(home, buffer), self._layer(layer, home), home)

    def _between(self, spans: Spans, buffer: int, up: bool) -> None:
        """Staging to buffer (up) or buffer to staging: pages lie alike in both."""
        host, device = self.machine.host, self.machine.device
        near, far = (
            [Home(base.place, base.start + at, nbytes, self.dtype) for _, at, nbytes in spans]
            for base in (self._buffers[buffer], self._stages[buffer])
        )
        if up:
            host.load_all([(away, device.view(here)) for here, away in zip(near, far, strict=True)])
        else:
            host.store_all([(device.view(here), away) for here, away in zip(near, far, strict=True)])

    def close(self) -> None:
        """Free all memory of the pools and buffers, whatever still refers to this cache."""
        self._device = self._means = self._values = None
        for held in (self._homes, self._buffers, self._stages):
            held.clear()
        self._regions.free()


def fit(event: Attend, kv_heads: int, head_dim: int) -> Attend:
    """The same attention with that many KV heads of that width, in which all layers' pages are laid out.

    Zeros beyond a head's width add nothing to a score, and zeros to the output; a KV head may be given several times.
    """
    q, k, v = (
        x if x.shape[-1] == head_dim else torch.nn.functional.pad(x, (0, head_dim - x.shape[-1]))
        for x in (event.q, event.k, event.v)
    )
    if (copies := kv_heads // k.shape[1]) > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    return event._replace(q=q, k=k, v=v)


def _int32(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _padded(rows: list[list[int]]) -> Tensor:
    """The rows side by side, int64 [rows, at least 1]."""
    width = max((len(row) for row in rows), default=1)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64).view(-1, width)


def _join(pages: list[int], at: int) -> Runs:
    """Runs of neighbouring pool pages that go to buffer pages at, at + 1, ..."""
    runs = Runs()
    for i, page in enumerate(pages):
        if runs and runs[-1][0] + runs[-1][2] == page:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((page, at + i, 1))
    return runs


def _prompts(pieces: list[Piece], tables: list[list[int]], first: int, device: torch.device) -> list[Prompts]:
    """Groups neighbouring fresh pieces of equal length; a continued piece stands alone with its table."""
    groups: list[Prompts] = []
    for piece, table in zip(pieces, tables, strict=True):
        last = groups[-1] if groups else None
        if piece.start:
            groups.append(Prompts(first, 1, piece.count, piece.start, _int32(table, device)))
        elif last and last.table is None and last.length == piece.count:
            groups[-1] = last._replace(rows=last.rows + 1)
        else:
            groups.append(Prompts(first, 1, piece.count, 0, None))
        first += piece.count
    return groups
