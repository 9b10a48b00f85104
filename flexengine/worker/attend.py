"""Attenders: an attender computes the decode attention of gpu_batches in one place off the device.

Queries, keys and values of new tokens (the question) are copied to the place of the KV cache: per token, 2 heads +
2 kv_heads vectors of head_dim elements, however many tokens are cached. The output of attention (the answer) is copied
back. FlexGen calls this CPU computation (section 4.2), Lamina attention offloading.

One layer of one gpu_batch has five calls, one per task of `schedule.program`. `Routes.attend` names the lanes of three
of these tasks, by place.

| call | task | lane |
|---|---|---|
| ask | PROJECT, after the layer's part before attention | device |
| send | SEND | Routes.attend[place][0] |
| attend | ATTEND | Routes.attend[place][1] |
| fetch | FETCH | Routes.attend[place][2] |
| answer | FINISH, before the rest of the layer | device |

If queries go first (`Batch.queries_first`), `ask` gets them alone, and three more calls follow `send`. Keys and values
are sent while the place computes attention over cached tokens. Only attention workers have these calls.

| call | task | lane |
|---|---|---|
| add | PROJECT_KEYS, after the layer's part before attention | device |
| send(added=True) | SEND_KEYS | Routes.attend[place][0] |
| attend_cached | ATTEND_CACHED | Routes.attend[place][1] |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine import kernels
from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import AttentionOptions
from flexengine.model.forward import Attend, Query
from flexengine.places import HOST, WORKERS, place_of
from flexengine.plan.sizes import DELEGATION
from flexengine.schedule.batches import Batch
from flexengine.schedule.tasks import Delegate
from flexengine.tier.base import Region
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


class Attender(ABC):
    """Computes the decode attention of the gpu_batches whose `Batch.attention` is its place.

    Questions are copied to host RAM, and answers to the device. Subclasses compute attention between. Each gpu_batch
    has a part of a device buffer and a part of a host buffer. A part holds queries, then keys, then values. The output
    of attention overwrites the queries. Without a GPU, RAM is the device, and the buffers are one.

    The edges of the program order the calls:

    - The five calls of one gpu_batch in one layer have the order of the table. The next layer's `ask` follows `answer`.
      The work of a call, also work that the call queues on a GPU, starts after the work of the previous call has ended.
    - `add`, `send(added=True)` and `attend` have this order, and `send`, `attend_cached` and `attend`.
    - Calls for different gpu_batches overlap in any order, so each gpu_batch needs its own buffers.

    Every implementation must keep these rules:

    - `ask` copies all tensors of the event. The model's tensors, sinks among them, may be overwritten after the call.
    - Keys and values of earlier tokens are in pages of tier `Batch.cache_home`. STORE_CACHE tasks write keys and values
      of prompts, and `attend` appends keys and values of every later token. Pages of a disk are loaded to host staging
      before `attend_staged`, and stored after it.
    - Page numbers are valid for one sweep. `Cache.tables(view, layer)` returns page numbers in the pool of this tier,
      as int32 tensors in RAM.
    - A lane whose tasks read or write RAM with the CPU must not queue them (`places.Lane.queues`). On a GPU its tasks
      then start after earlier copies have ended (`runtime.lane.new_lane`).
    - The constructor takes no more memory than `plan.layout` books. If the constructor raises, it frees what it took.
    - Errors are raised where they occur. The lane passes them on.

    Args:
        place: place that computes attention.
    """

    def __init__(self, place: str, cache: Cache, dtype: torch.dtype) -> None:
        self.model, self.machine, self.cache, self.dtype = cache.model, cache.machine, cache, dtype
        self.regions, nbytes = Regions(cache.machine), cache.layout.delegation[place]
        self._in_ram_already = cache.machine.capacity.shared
        self._device_buf = self._take("device", nbytes)
        self._host_buf = self._device_buf if self._in_ram_already else self._take("host", nbytes)
        self._first: dict[int, int] = {}  # by gpu_batch: tokens before its part of a buffer
        self._asked: dict[int, LayerQuestion] = {}
        self._sinks: dict[int, Tensor] = {}  # by layer

    def _take(self, tier: str, nbytes: int) -> Region:
        return self.regions.take(tier, nbytes, DELEGATION, self.dtype)

    def begin(self, batches: Mapping[int, Batch]) -> None:
        """Prepare for a sweep. No task of an earlier sweep is left.

        Args:
            batches: by number in the sweep, the gpu_batches whose attention is computed here. Each piece is one token.
        """
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
        """Return the part of a buffer that `send` sends."""
        whole, queries = self._parts(region, k)
        if added:
            return whole.part(queries.nbytes, whole.nbytes - queries.nbytes)
        return queries if self._asked[k].first else whole

    def _in_ram(self, k: int) -> tuple[Tensor, Tensor]:
        """Return a gpu_batch's question and its answer in RAM, as flat tensors that share memory."""
        tier = self.machine.device if self._in_ram_already else self.machine.host
        question, answer = self._parts(self._host_buf, k)
        return tier.view(question), tier.view(answer)

    def _vectors(self, flat: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a question, each [tokens, heads, head_dim]."""
        n, dim, (heads, kv_heads) = self._asked[k].tokens, self.model.head_dim, self._asked[k].heads
        rows = flat.view(heads + 2 * kv_heads, n, dim)  # shape for splitting only
        q, keys, values = rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :]
        return q.view(n, heads, dim), keys.view(n, kv_heads, dim), values.view(n, kv_heads, dim)

    def ask(self, k: int, event: Attend | Query, view: View) -> None:
        """Copy queries, keys and values of gpu_batch k to a device buffer, for `send`. Of a Query, copy queries alone.

        Args:
            k: number of the gpu_batch in the sweep.
            event: on the device; q [1, heads, tokens, head_dim], k [1, kv_heads, tokens, head_dim], v [1, kv_heads,
                tokens, value_dim]; tokens in the order of `packed(batch)`. Heads and widths may differ by layer: see
                `Cache.prepared`.
            view: page tables of the gpu_batch.
        """
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
        """Copy the keys and values of gpu_batch k, whose queries went first, to a device buffer, for `send`."""
        self._put(k, self.cache.prepared(event, view), slice(1, 3))

    def _put(self, k: int, event: Attend, which: slice) -> None:
        flat = self.machine.device.view(self._parts(self._device_buf, k)[0])
        sources = (event.q, event.k, event.v)
        for target, source in zip(self._vectors(flat, k)[which], sources[which], strict=True):
            target.copy_(source[0].transpose(0, 1))

    def send(self, k: int, added: bool = False) -> None:
        """Copy the question of gpu_batch k to the place. added: its keys and values, if its queries went first."""
        if self._in_ram_already:
            return
        on_device, on_host = (self._to_send(region, k, added) for region in (self._device_buf, self._host_buf))
        self.machine.host.store(self.machine.device.view(on_device), on_host)

    def attend_cached(self, k: int) -> None:
        """Compute attention of the queries of gpu_batch k over the cached tokens. `attend` adds the new tokens."""
        raise NotImplementedError

    def perform(self, task: Delegate, view: View) -> None:
        """Execute an ATTEND task: `attend`, or `attend_staged` if its pages are in staging."""
        if task.buffer is None:
            self.attend(task.cell.batch, view)
        else:
            self.attend_staged(task.cell.batch, view, task.home, task.buffer)

    def attend_staged(self, k: int, view: View, home: str, stage: int) -> None:
        """Attend as `attend`, over pages of a disk that a LOAD_CACHE task has read. Only the host has this call.

        Args:
            home: the disk.
            stage: number of the host staging that holds the pages.
        """
        raise NotImplementedError

    @abstractmethod
    def attend(self, k: int, view: View) -> None:
        """Append the new keys and values to the pages, and compute attention of the queries over all tokens seen.

        Pages in `Tables.copies` are copied first. Attention uses scale, window, softcap and sinks of the event, and
        reads the fraction `Cache.topk` of the values.

        Args:
            k: number of the gpu_batch in the sweep.
            view: as in `ask`.
        """

    def fetch(self, k: int) -> None:
        """Copy the answer of gpu_batch k to the device."""
        if self._in_ram_already:
            return
        on_device, on_host = (self._parts(region, k)[1] for region in (self._device_buf, self._host_buf))
        self.machine.host.load(on_host, self.machine.device.view(on_device))

    def answer(self, k: int) -> Tensor:
        """Return attention of gpu_batch k on the device, [1, tokens, heads, value_dim] in the dtype of the queries.

        The tensor is valid until the next `ask` for gpu_batch k.
        """
        asked = self._asked[k]
        out = self.machine.device.view(self._parts(self._device_buf, k)[1])
        out = out.view(1, asked.tokens, asked.heads[0], self.model.head_dim).to(asked.dtype)
        return self.cache.restored(out, asked.width)

    def drain(self, lost: str) -> None:  # noqa: B027 - an attender in this process has no answers under way
        """Wait for the answers of a sweep that broke off, so that buffers and pages can be used again. lost: place of a
        lost attention worker, whose answers do not come.

        Raises:
            WorkerLost: another worker is lost.
        """

    def close(self) -> None:
        """Free all memory, even if other objects still refer to this one. No call follows."""
        self._device_buf = self._host_buf = Region(None, 0, 0, self.dtype)
        self._sinks.clear()
        self.regions.free()


class HostAttender(Attender):
    """Computes attention on the CPU, over pages in host RAM, or read from a disk to host staging."""

    def __init__(self, place: str, cache: Cache, dtype: torch.dtype) -> None:
        super().__init__(place, cache, dtype)
        self.kernels, what = kernels.load(), "delegation workspace"
        self.regions.keep_room("host", cache.layout.account["host"][what], what)

    def attend(self, k: int, view: View) -> None:
        self._attend(k, view, *self.cache.on_host(self._asked[k].layer))

    def attend_staged(self, k: int, view: View, home: str, stage: int) -> None:
        layer, pools = self._asked[k].layer, self.cache.pools
        self._attend(k, view, pools.in_stage(layer, home, stage), pools.form(layer, home))

    def _attend(self, k: int, view: View, pool: Tensor, form: CacheFormat | None) -> None:
        asked = self._asked[k]
        question, answer = self._in_ram(k)
        q, keys, values = self._vectors(question, k)
        tables = self.cache.tables(view, asked.layer)
        copy_pages(pool, tables)
        self.kernels.append(keys, values, pool, tables.pages, tables.offsets, form)
        out = self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, asked.options, form)
        answer.copy_(out.view(-1))


# By kind of place, a class, or its module:name, which is imported on first use. Its first argument is the place.
ATTENDERS: dict[str, str | Callable[..., Attender]] = {
    HOST: HostAttender,
    WORKERS: "flexengine.guests.attention_workers.attender:RemoteAttender",
}


def attender_of(place: str) -> Callable[[Cache, torch.dtype], Attender]:
    """Return the class of a place's attender. Each attention worker is a place."""
    attender = ATTENDERS[WORKERS if place_of(place).worker else place]
    return partial(resolve_name(attender) if isinstance(attender, str) else attender, place)
