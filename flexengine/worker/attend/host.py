"""The attender of host RAM: the CPU computes attention over the pages of the host.

Per token, 2 heads + 2 kv_heads vectors of head_dim elements cross the link, however many tokens are cached.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.kernels import load
from flexengine.model.forward import Attend
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import DELEGATION, Layout
from flexengine.schedule.order import Batch
from flexengine.tier.base import Region
from flexengine.tier.machine import Machine
from flexengine.worker.attend.base import Attender
from flexengine.worker.cache import Cache, View, copy_pages
from flexengine.worker.regions import Regions


class Question(NamedTuple):
    """The question of a gpu_batch in one layer, without its tensors.

    Attributes:
        layer: number of the layer.
        tokens: tokens of the gpu_batch.
        heads: number of query heads, number of KV heads.
        width: elements of a head's output.
        dtype: dtype of the queries.
        options: scale, window, softcap and sinks; sinks are in RAM.
    """

    layer: int
    tokens: int
    heads: tuple[int, int]
    width: int
    dtype: torch.dtype
    options: tuple[float, int | None, float | None, Tensor | None]


class HostAttender(Attender):
    """Computes attention on the CPU, over pages in host RAM.

    Each gpu_batch has a part of a device buffer and a part of a host buffer. A part holds queries, then keys, then
    values. The output of attention overwrites the queries.
    """

    def __init__(self, model: ModelFacts, layout: Layout, machine: Machine, cache: Cache, dtype: torch.dtype) -> None:
        self.model, self.machine, self.cache, self.dtype = model, machine, cache, dtype
        self.kernels = load()
        self._regions = Regions(machine)
        self._device_buf, self._host_buf = (
            self._regions.take(tier, layout.delegation, DELEGATION, dtype) for tier in ("device", "host")
        )
        what = "delegation workspace"
        self._regions.keep_room("host", layout.account["host"][what], what)
        self._first: dict[int, int] = {}  # by gpu_batch: tokens before its part of a buffer
        self._asked: dict[int, Question] = {}
        self._sinks: dict[int, Tensor] = {}  # by layer

    def begin(self, batches: Mapping[int, Batch]) -> None:
        tokens, self._first, self._asked = 0, {}, {}
        for k, batch in batches.items():
            self._first[k] = tokens
            tokens += batch.tokens

    def _parts(self, region: Region, k: int) -> tuple[Region, Region]:
        """Return the parts of a buffer for a gpu_batch's question, and for its answer."""
        asked, each = self._asked[k], self.model.head_dim * self.dtype.itemsize * self._asked[k].tokens
        start = self._first[k] * self.model.sent
        heads, kv_heads = asked.heads
        return region.part(start, (heads + 2 * kv_heads) * each), region.part(start, heads * each)

    def _vectors(self, flat: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a question, each [tokens, heads, head_dim]."""
        n, dim, (heads, kv_heads) = self._asked[k].tokens, self.model.head_dim, self._asked[k].heads
        rows = flat.view(heads + 2 * kv_heads, n, dim)  # shape for splitting only
        q, keys, values = rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :]
        return q.view(n, heads, dim), keys.view(n, kv_heads, dim), values.view(n, kv_heads, dim)

    def ask(self, k: int, event: Attend, view: View) -> None:
        width, event = event.v.shape[-1], self.cache.prepared(event, view)
        heads, tokens = event.q.shape[1:3]
        if event.sinks is not None and event.layer not in self._sinks:  # weights in a slot are overwritten
            self._sinks[event.layer] = event.sinks.to("cpu", torch.float32, copy=True)
        options = (event.scale, event.window, event.softcap, self._sinks.get(event.layer))
        shape = (heads, event.k.shape[1])
        self._asked[k] = Question(event.layer, tokens, shape, width, event.q.dtype, options)
        flat = self.machine.device.view(self._parts(self._device_buf, k)[0])
        for target, source in zip(self._vectors(flat, k), (event.q, event.k, event.v), strict=True):
            target.copy_(source[0].transpose(0, 1))

    def send(self, k: int) -> None:
        on_device, on_host = (self._parts(region, k)[0] for region in (self._device_buf, self._host_buf))
        self.machine.host.store(self.machine.device.view(on_device), on_host)

    def attend(self, k: int, view: View) -> None:
        asked, cache = self._asked[k], self.cache
        question, answer = (self.machine.host.view(part) for part in self._parts(self._host_buf, k))
        q, keys, values = self._vectors(question, k)
        pool, form = cache.on_host(asked.layer)
        tables = cache.tables(view, asked.layer)
        copy_pages(pool, tables)
        self.kernels.append(keys, values, pool, tables.pages, tables.offsets, form)
        out = self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, *asked.options, form, cache.topk)
        answer.copy_(out.view(-1))

    def fetch(self, k: int) -> None:
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
        self._regions.free()
