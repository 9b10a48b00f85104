"""The attender of attention workers: other processes compute attention over pages that they hold.

Queries, keys, values and outputs cross the connection (Lamina, section 3.2: 4 e d bytes per token and layer without
grouped heads), or are in memory that both processes map. Page tables cross it once per sweep, sinks once per job.
`measure_workers` measures decode attention, connections, and seconds of a question.
"""

import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flexengine.errors import OutOfMemory, WorkerLost
from flexengine.guests.attention_workers.client import Client, PendingAnswer
from flexengine.guests.attention_workers.messages import DTYPES, WorkerQuestion, WorkerTables, merge
from flexengine.guests.attention_workers.workers import WorkerTier
from flexengine.measure.links import WHAT
from flexengine.model.forward import Attend, Query
from flexengine.plan.facts import ModelFacts
from flexengine.plan.sizes import DELEGATION, DESKS, PAGE_TOKENS
from flexengine.policy import HEADS, TOKENS
from flexengine.schedule.batches import Batch
from flexengine.tier.base import Region, aligned
from flexengine.tier.machine import Machine
from flexengine.worker.attend import Attender
from flexengine.worker.cache import Cache, View
from flexengine.worker.cache.tables import Tables

SEQUENCES, CONTEXT, TURNS = 16, 512, 5  # of a measured question; questions of which the median counts
SENT, FEW = 8 << 20, 32  # most bytes that are sent and fetched at once; of which the first are one part in so many
ENOUGH_SECONDS = 0.25  # of transfers, after which no more are measured


class Desk:
    """RAM for questions to a worker and for its answers. A worker on this machine maps the same memory."""

    def __init__(self, attender: "RemoteAttender", client: Client, tier: str, nbytes: int, what: str) -> None:
        self.client, self.handle = client, None
        if client.shares:
            attender.regions.keep_room(tier, aligned(nbytes), what)
            handle = client.allocate(nbytes, counted=False)
            if handle is None:
                raise OutOfMemory(tier, what, nbytes)
            self.handle, self.flat = handle, client.shared[handle]
        else:
            region = attender.regions.take(tier, nbytes, what)
            self.flat = attender.machine.tier(tier).view(region)

    def ask(
        self, layer: int, question: WorkerQuestion, at: int, nbytes: int, out: int, out_bytes: int
    ) -> PendingAnswer:
        """Send a question whose vectors are at byte `at`. Its answer comes to byte `out`."""
        question = question._replace(shared=self.handle, at=at, out=out)
        return self.client.ask(layer, question, self.flat[at : at + nbytes], self.flat[out : out + out_bytes])

    def add(self, pending: PendingAnswer, at: int, nbytes: int) -> None:
        """Send keys and values, which are at byte `at`, of a question whose queries went first."""
        self.client.add(pending, self.flat[at : at + nbytes], None if self.handle is None else at)


class RemoteAttender(Attender):
    """Sends questions to the workers of a place, and receives their answers. Several workers hold slices of every page:
    some heads, or some tokens."""

    def __init__(self, place: str, cache: Cache, dtype: torch.dtype) -> None:
        model, layout, machine = cache.model, cache.layout, cache.machine
        self.place, self.partition = place, layout.policy.partition
        tiers = [machine.tier(member) for member in layout.policy.team(place, layout.places)]
        self.clients = [tier.client for tier in tiers if isinstance(tier, WorkerTier)]
        self.desks: list[Desk] = []
        try:
            super().__init__(place, cache, dtype)
            if len(self.clients) > 1:
                tier = "device" if machine.capacity.shared else "host"
                for client in self.clients:
                    self.desks.append(Desk(self, client, tier, layout.desks[place], DESKS))
        except BaseException:
            self._free_desks()
            self.regions.free()
            raise
        self.row = model.sent + model.fetched + 4 * model.heads  # bytes of a token at a desk of a team
        self._told: dict[tuple[int, int], list[WorkerTables]] = {}  # tables that workers have, by gpu_batch and group
        self._sinks_told = set[int]()  # layers whose sinks the workers have
        self._views: dict[int, View] = {}  # by gpu_batch
        self._waiting: dict[int, list[PendingAnswer]] = {}  # by gpu_batch, answers to its question

    def _take(self, tier: str, nbytes: int) -> Region:
        """Return a buffer. A single worker reads the buffer in RAM itself."""
        if len(self.clients) > 1 or (tier == "device" and not self.machine.capacity.shared):
            return super()._take(tier, nbytes)
        self.desks = [Desk(self, self.clients[0], tier, nbytes, DELEGATION)]
        return Region(self.desks[0].flat, 0, nbytes, self.dtype)

    def begin(self, batches: Mapping[int, Batch]) -> None:
        super().begin(batches)
        self._told.clear()
        self._views.clear()
        self._waiting.clear()

    def ask(self, k: int, event: Attend | Query, view: View) -> None:
        super().ask(k, event, view)
        self._views[k] = view

    def send(self, k: int, added: bool = False) -> None:
        """Send the question. The worker begins as soon as it has answered earlier ones, so it does not wait for the
        lane of `attend`."""
        super().send(k, added)
        self.machine.synchronize()  # a GPU copies to RAM after the call
        if added:
            self._send_added(k)
            return
        layer, parts = self._asked[k].layer, self._tell(k)
        if len(self.desks) == 1:
            sent, answer = self._to_send(self._host_buf, k), self._parts(self._host_buf, k)[1]
            at = sent.start
            self._waiting[k] = [self.desks[0].ask(layer, self._question(k, 0), at, sent.nbytes, at, answer.nbytes)]
            return
        vectors, self._waiting[k] = self._vectors(self._in_ram(k)[0], k), []
        which = slice(0, 1) if self._asked[k].first else slice(0, 3)
        at, out, out_bytes = self._places(k)
        for number, (desk, part) in enumerate(zip(self.desks, parts, strict=True)):
            nbytes = _put(self._slice(vectors, part, number)[which], desk.flat[at:])
            self._waiting[k].append(desk.ask(layer, self._question(k, number), at, nbytes, out, out_bytes))

    def _send_added(self, k: int) -> None:
        """Send the keys and values of a question whose queries went first."""
        if len(self.desks) == 1:
            sent = self._to_send(self._host_buf, k, added=True)
            self.desks[0].add(self._waiting[k][0], sent.start, sent.nbytes)
            return
        vectors, at = self._vectors(self._in_ram(k)[0], k), self._places(k)[0]
        for number, (desk, part, pending) in enumerate(zip(self.desks, self._tell(k), self._waiting[k], strict=True)):
            queries, *added = self._slice(vectors, part, number)
            desk.add(pending, at + queries.nbytes, _put(added, desk.flat[at + queries.nbytes :]))

    def attend_cached(self, k: int) -> None:
        """Wait until the workers have computed attention over the cached tokens."""
        for pending in self._waiting[k]:
            pending.wait_cached()

    def attend(self, k: int, view: View) -> None:
        """Wait for the answers, and join them."""
        for pending in self._waiting[k]:
            pending.wait()
        del self._waiting[k]
        if len(self.desks) > 1:
            _, out, out_bytes = self._places(k)
            answers = [desk.flat[out : out + out_bytes] for desk in self.desks]
            self._in_ram(k)[1].copy_(self._joined(answers, k, self._asked[k].options.sinks).view(-1))

    def _places(self, k: int) -> tuple[int, int, int]:
        """Return the first byte of a gpu_batch's question at a desk of a team, that of its answer, and its bytes."""
        at, asked = self._first[k] * self.row, self._asked[k]
        out = asked.heads[0] * self.model.head_dim * self.dtype.itemsize  # bytes of a token's whole answer
        each = out + 4 * asked.heads[0] if self._partial else out // len(self.clients)
        return at, at + self.model.sent * asked.tokens, asked.tokens * each

    def _tell(self, k: int) -> list[WorkerTables]:
        """Send page tables and sinks that the workers do not have yet. Return the workers' page tables."""
        layer, sinks = self._asked[k].layer, self._asked[k].options.sinks
        group = self.cache.pools.group[layer]
        if (k, group) not in self._told:
            tables, pool = self.cache.tables(self._views[k], layer), self.cache.pools.pool(layer, self.place)
            count = len(self.clients)
            parts = (
                by_tokens(tables, pool.page_tokens, pool.window, count) if self._partial else [whole(tables)] * count
            )
            for client, part in zip(self.clients, parts, strict=True):
                client.tables(k, group, part)
            self._told[k, group] = parts
        if sinks is not None and layer not in self._sinks_told and not self._partial:
            self._sinks_told.add(layer)
            for number, client in enumerate(self.clients):
                client.sinks(layer, self._heads(sinks[None], number)[0].contiguous())
        return self._told[k, group]

    @property
    def _partial(self) -> bool:
        return self.partition == TOKENS and len(self.clients) > 1

    def _heads(self, vectors: Tensor, number: int) -> Tensor:
        if self.partition != HEADS:
            return vectors
        share = vectors.shape[1] // len(self.clients)
        return vectors[:, number * share : (number + 1) * share]

    def _slice(self, vectors: tuple[Tensor, ...], part: WorkerTables, number: int) -> list[Tensor]:
        """Return a worker's queries, keys and values. It gets the keys and values of tokens that it will hold."""
        q, *new = vectors
        if self._partial:
            return [q, *(x[part.rows.long()] for x in new)]
        return [self._heads(x, number) for x in vectors]

    def _joined(self, answers: Sequence[Tensor], k: int, sinks: Tensor | None) -> Tensor:
        asked, dim = self._asked[k], self.model.head_dim
        n, heads = asked.tokens, asked.heads[0]
        if not self._partial:
            return torch.cat([x.view(self.dtype).view(n, -1, dim) for x in answers], 1)
        cut = n * heads * dim * self.dtype.itemsize
        outs = [x[:cut].view(self.dtype).view(n, heads, dim) for x in answers]
        return merge(outs, [x[cut:].view(torch.float32).view(n, heads) for x in answers], sinks)

    def _question(self, k: int, number: int) -> WorkerQuestion:
        asked, pools = self._asked[k], self.cache.pools
        pool, region = pools.pool(asked.layer, self.place), pools.region(asked.layer, self.place)
        (heads, kv_heads), page_tokens = asked.heads, pool.page_tokens
        if (team := pools.teams.get(self.place)) is not None:
            heads //= kv_heads
            kv_heads, page_tokens = team.slice_form(pools.group[asked.layer])
            heads, region = heads * kv_heads, team.slices(region)[number]
        scale, window, softcap, sinks, topk, _ = asked.options  # workers answer tokens of decoding only
        return WorkerQuestion(
            handle=region.place, start=region.start, pages=pool.pages, page_tokens=page_tokens, heads=heads,
            kv_heads=kv_heads, head_dim=self.model.head_dim, bits=pools.bits, pool_dtype=DTYPES.index(pools.dtype),
            dtype=DTYPES.index(self.dtype), batch=k, group=pools.group[asked.layer], window=window,
            sinks=sinks is not None and not self._partial, partial=self._partial, first=asked.first, scale=scale,
            softcap=softcap, topk=topk,
        )  # fmt: skip

    def drain(self, lost: str) -> None:
        for waiting in self._waiting.values():
            for desk, pending in zip(self.desks, waiting, strict=False):  # a sweep may break off between two questions
                try:
                    desk.client.drain(pending)
                except WorkerLost as error:
                    if error.place != lost:
                        raise
        self._waiting.clear()

    def close(self) -> None:
        self._free_desks()
        super().close()

    def _free_desks(self) -> None:
        for desk in self.desks:
            desk.flat = torch.empty(0, dtype=torch.uint8)
            if desk.handle is not None:
                desk.client.free(desk.handle)


def _put(pieces: Sequence[Tensor], target: Tensor) -> int:
    """Copy tensors one after the other to the first bytes of a tensor. Return the number of bytes."""
    done = 0
    for piece in pieces:
        target[done : done + piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        done += piece.nbytes
    return done


def whole(tables: Tables) -> WorkerTables:
    """Return the page tables of a worker that holds all tokens."""
    lengths, copies = tables.lengths, torch.tensor(tables.copies, dtype=torch.int32).view(-1, 2)
    rows = torch.arange(len(lengths), dtype=torch.int32)
    return WorkerTables(tables.tables, lengths, lengths, tables.pages, tables.offsets, rows, copies)


def by_tokens(tables: Tables, page_tokens: int, window: int | None, workers: int) -> list[WorkerTables]:
    """Return the page tables of workers that hold slices of every page's tokens. tables: of whole pages, of page_tokens
    tokens. window: tokens that a query sees; None for all."""
    share, parts, everything = page_tokens // workers, list[WorkerTables](), whole(tables)
    for number in range(workers):

        def held(tokens: Tensor, first: int = number * share) -> Tensor:
            """Return how many of the first tokens of each sequence the worker holds."""
            return tokens // page_tokens * share + (tokens % page_tokens - first).clamp(0, share)

        lengths = held(tables.lengths)
        unseen = 0 if window is None else held((tables.lengths - window).clamp(min=0))
        new = torch.nonzero(tables.offsets // share == number).flatten()
        parts.append(
            everything._replace(
                lengths=lengths,
                seen=lengths - unseen,
                pages=tables.pages[new],
                offsets=tables.offsets[new] % share,
                rows=everything.rows[new],
            )
        )
    return parts


def measure_workers(machine: Machine, model: ModelFacts, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of `Hardware` about attention workers.

    Takes about 0.1 s per worker, and for each engine that shares it, as one engine measures at a time. Each of these
    engines gets an equal part of the rates, as if all used the worker all the time. Pages hold any numbers in the
    compute dtype: attention over encoded pages is about as fast per token.

    Raises:
        WorkerLost: a worker has died.
    """
    rates, links, fixed = dict[str, float](), dict[str, float](), list[float]()
    local, cores = dict[str, float](), len(os.sched_getaffinity(0))
    for tier in machine.workers:
        assert isinstance(tier, WorkerTier)
        with tier.client.alone():
            whole, little = (_seconds(tier, model, dtype, tokens) for tokens in (CONTEXT, 1))
            links[tier.name] = _link_rate(tier) / tier.engines
        nbytes = SEQUENCES * CONTEXT * 2 * model.kv_heads * model.head_dim * dtype.itemsize
        rates[tier.name] = nbytes / max(whole - little, 1e-6) * model.kv_token / (nbytes / SEQUENCES / CONTEXT)
        if tier.client.pages == "file":  # the pages of this measurement were still in memory
            rates[tier.name] = min(rates[tier.name], tier.client.rate)
        elif tier.client.rate > 0:  # of a device, whose seconds are too few beside those of the connection
            rates[tier.name] = tier.client.rate * model.kv_token / (nbytes / SEQUENCES / CONTEXT)
        rates[tier.name] /= tier.engines
        fixed.append(little * tier.engines)
        if tier.client.threads and tier.client.pages != "device":
            local[tier.name] = min(1.0, tier.client.threads / cores)
    return {
        "worker_attention": rates,
        "worker_links": links,
        "worker_seconds": max(fixed, default=0.0),
        "worker_cores": local,
    }


def _link_rate(tier: WorkerTier) -> float:
    """Return the bytes per second of a worker's connection: bytes sent to its memory, and fetched again. Few bytes go
    first, so that a slow connection takes no longer."""
    room = tier.ledger.capacity
    data = torch.zeros(SENT if room is None else min(SENT, max(1, room // 2)), dtype=torch.uint8)
    region, rates, began = tier.allocate(len(data), WHAT), list[float](), time.perf_counter()
    try:
        for part in (data[: -(-len(data) // FEW)], *[data] * TURNS):
            start = time.perf_counter()
            tier.client.write(region.place, region.start, part)
            tier.client.read(region.place, region.start, part).wait()
            rates.append(2 * len(part) / (time.perf_counter() - start))
            if time.perf_counter() - began > ENOUGH_SECONDS:
                break
    finally:
        tier.free(region, WHAT)
    return median(rates[1:] or rates)


def _seconds(tier: WorkerTier, model: ModelFacts, dtype: torch.dtype, tokens: int) -> float:
    """Return the seconds of a question about sequences of as many tokens."""
    kv_heads, dim, pages = model.kv_heads, model.head_dim, -(-tokens // PAGE_TOKENS)
    page = 2 * kv_heads * PAGE_TOKENS * dim * dtype.itemsize
    fitting = max(1, min(SEQUENCES * pages, (tier.ledger.capacity or 0) // page - 1))  # pages in the worker's memory
    table = (torch.arange(SEQUENCES * pages, dtype=torch.int32) % fitting).view(SEQUENCES, pages)
    lengths = torch.full((SEQUENCES,), tokens, dtype=torch.int32)
    offsets = torch.full((SEQUENCES,), (tokens - 1) % PAGE_TOKENS, dtype=torch.int32)
    last, none = table[:, -1].contiguous(), torch.empty(0, 2, dtype=torch.int32)
    rows, number = torch.arange(SEQUENCES, dtype=torch.int32), DTYPES.index(dtype)
    vectors = torch.zeros(SEQUENCES * (model.heads + 2 * kv_heads) * dim, dtype=dtype).view(torch.uint8)
    target, seconds = torch.empty(SEQUENCES * model.heads * dim, dtype=dtype).view(torch.uint8), list[float]()
    region = tier.allocate(fitting * page, WHAT, dtype)
    try:
        tier.client.tables(0, 0, WorkerTables(table, lengths, lengths, last, offsets, rows, none))
        question = WorkerQuestion(
            handle=region.place, start=0, pages=fitting, page_tokens=PAGE_TOKENS, heads=model.heads, kv_heads=kv_heads,
            head_dim=dim, scale=dim**-0.5, bits=0, pool_dtype=number, dtype=number, batch=0, group=0,
        )  # fmt: skip
        for _ in range(TURNS + 1):  # the first one is not counted
            began = time.perf_counter()
            tier.client.ask(0, question, vectors, target).wait()
            seconds.append(time.perf_counter() - began)
    finally:
        tier.free(region, WHAT)
    return median(seconds[1:])
