"""The part that all attenders share, questions and answers in buffers on the device and in host RAM; and that of the
CPU.

Per token, 2 heads + 2 kv_heads vectors of head_dim elements cross the link, however many tokens are cached.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine import kernels
from flexengine.kernels.base import AttentionOptions
from flexengine.model.forward import Attend, Query
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.plan.sizes import DELEGATION
from flexengine.schedule.batches import Batch
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.attend import Attender
from flexengine.worker.cache import Cache, View, copy_pages
from flexengine.worker.regions import Regions


class LayerQuestion(NamedTuple):
    """The question of a gpu_batch in one layer, without its tensors."""

    layer: int
    tokens: int  # tokens of the gpu_batch
    heads: tuple[int, int]  # number of query heads, number of KV heads
    width: int  # elements of a head's output
    dtype: torch.dtype
    options: AttentionOptions  # of attention; sinks are in RAM
    first: bool = False  # whether queries go first, without keys and values


class BufferedAttender(Attender):
    """Copies questions to host RAM, and answers to the device. Subclasses compute attention between.

    Each gpu_batch has a part of a device buffer and a part of a host buffer. A part holds queries, then keys, then
    values. The output of attention overwrites the queries. Without a GPU, RAM is the device, and the buffers are one.

    Args:
        place: place that computes attention.
    """

    def __init__(
        self, place: str, model: ModelFacts, layout: Layout, machine: Machine, cache: Cache, dtype: torch.dtype
    ) -> None:
        self.model, self.machine, self.cache, self.dtype = model, machine, cache, dtype
        self.regions = Regions(machine)
        self._in_ram_already = machine.capacity.shared
        self._device_buf = self._take("device", layout.delegation[place])
        self._host_buf = self._device_buf
        if not self._in_ram_already:
            self._host_buf = self._take("host", layout.delegation[place])
        self._first: dict[int, int] = {}  # by gpu_batch: tokens before its part of a buffer
        self._asked: dict[int, LayerQuestion] = {}
        self._sinks: dict[int, Tensor] = {}  # by layer

    def _take(self, tier: str, nbytes: int) -> Region:
        return self.regions.take(tier, nbytes, DELEGATION, self.dtype)

    def begin(self, batches: Mapping[int, Batch]) -> None:
        tokens, self._first, self._asked = 0, {}, {}
        for k, batch in batches.items():
            self._first[k] = tokens
            tokens += batch.tokens

    def _parts(self, region: Region, k: int) -> tuple[Region, Region]:
        """Return the parts of a buffer for a gpu_batch's question, and for its answer, which has the place of the
        queries."""
        asked, each = self._asked[k], self.model.head_dim * self.dtype.itemsize * self._asked[k].tokens
        start = self._first[k] * self.model.sent
        heads, kv_heads = asked.heads
        return region.part(start, (heads + 2 * kv_heads) * each), region.part(start, heads * each)

    def _to_send(self, region: Region, k: int, added: bool = False) -> Region:
        """Return the part of a buffer that `send` sends, or `send_added`."""
        whole, queries = self._parts(region, k)
        if added:
            return whole.part(queries.nbytes, whole.nbytes - queries.nbytes)
        return queries if self._asked[k].first else whole

    def _in_ram(self, k: int) -> tuple[Tensor, Tensor]:
        """Return a gpu_batch's question and its answer in RAM, as flat tensors that share memory."""
        tier = self.machine.device if self._in_ram_already else self.machine.host
        question, answer = map(tier.view, self._parts(self._host_buf, k))
        return question, answer

    def _vectors(self, flat: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a question, each [tokens, heads, head_dim]."""
        n, dim, (heads, kv_heads) = self._asked[k].tokens, self.model.head_dim, self._asked[k].heads
        rows = flat.view(heads + 2 * kv_heads, n, dim)  # shape for splitting only
        q, keys, values = rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :]
        return q.view(n, heads, dim), keys.view(n, kv_heads, dim), values.view(n, kv_heads, dim)

    def ask(self, k: int, event: Attend | Query, view: View) -> None:
        first, event = isinstance(event, Query), event.attend if isinstance(event, Query) else event
        width, event = event.v.shape[-1], self.cache.prepared(event, view)
        heads, tokens = event.q.shape[1:3]
        if event.sinks is not None and event.layer not in self._sinks:  # weights in a slot are overwritten
            self._sinks[event.layer] = event.sinks.to("cpu", torch.float32, copy=True)
        sinks = self._sinks.get(event.layer)
        options = AttentionOptions(event.scale, event.window, event.softcap, sinks, self.cache.topk)
        shape = (heads, event.k.shape[1])
        self._asked[k] = LayerQuestion(event.layer, tokens, shape, width, event.q.dtype, options, first)
        self._put(k, event, slice(0, 1) if first else slice(0, 3))

    def add(self, k: int, event: Attend, view: View) -> None:
        self._put(k, self.cache.prepared(event, view), slice(1, 3))

    def _put(self, k: int, event: Attend, which: slice) -> None:
        flat = self.machine.device.view(self._parts(self._device_buf, k)[0])
        sources = (event.q, event.k, event.v)
        for target, source in zip(self._vectors(flat, k)[which], sources[which], strict=True):
            target.copy_(source[0].transpose(0, 1))

    def send(self, k: int) -> None:
        self._send(k, added=False)

    def send_added(self, k: int) -> None:
        self._send(k, added=True)

    def _send(self, k: int, added: bool) -> None:
        if self._in_ram_already:
            return
        on_device, on_host = (self._to_send(region, k, added) for region in (self._device_buf, self._host_buf))
        self.machine.host.store(self.machine.device.view(on_device), on_host)

    def fetch(self, k: int) -> None:
        if self._in_ram_already:
            return
        on_device, on_host = (self._parts(region, k)[1] for region in (self._device_buf, self._host_buf))
        self.machine.host.load(on_host, self.machine.device.view(on_device))

    def answer(self, k: int) -> Tensor:
        asked = self._asked[k]
        out = self.machine.device.view(self._parts(self._device_buf, k)[1])
        out = out.view(1, asked.tokens, asked.heads[0], self.model.head_dim).to(asked.dtype)
        return self.cache.restored(out, asked.width)

    def close(self) -> None:
        self._device_buf = self._host_buf = Region(None, 0, 0, self.dtype)
        self._sinks.clear()
        self.regions.free()


class HostAttender(BufferedAttender):
    """Computes attention on the CPU, over pages in host RAM."""

    def __init__(
        self, place: str, model: ModelFacts, layout: Layout, machine: Machine, cache: Cache, dtype: torch.dtype
    ) -> None:
        super().__init__(place, model, layout, machine, cache, dtype)
        self.kernels = kernels.load()
        what = "delegation workspace"
        self.regions.keep_room("host", layout.account["host"][what], what)

    def attend(self, k: int, view: View) -> None:
        asked, cache = self._asked[k], self.cache
        question, answer = self._in_ram(k)
        q, keys, values = self._vectors(question, k)
        pool, form = cache.on_host(asked.layer)
        tables = cache.tables(view, asked.layer)
        copy_pages(pool, tables)
        self.kernels.append(keys, values, pool, tables.pages, tables.offsets, form)
        out = self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, asked.options, form)
        answer.copy_(out.view(-1))
