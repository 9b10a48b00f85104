"""Measurement of attention workers: decode attention, their connections, and seconds of a question."""

import os
import time
from statistics import median
from typing import Any

import torch

from flexengine.guests.attention_workers.messages import DTYPES, WorkerQuestion
from flexengine.guests.attention_workers.tables import WorkerTables
from flexengine.guests.attention_workers.tier import WorkerTier
from flexengine.measure.links import WHAT
from flexengine.plan.facts import ModelFacts
from flexengine.plan.pages import PAGE_TOKENS
from flexengine.tier.machine import Machine

SEQUENCES, TOKENS, TURNS = 16, 512, 5  # of a question; questions of which the median counts
SENT, FEW = 8 << 20, 32  # most bytes that are sent and fetched at once; of which the first are one part in so many
ENOUGH_SECONDS = 0.25  # of transfers, after which no more are measured


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
            whole, little = (_seconds(tier, model, dtype, tokens) for tokens in (TOKENS, 1))
            links[tier.name] = _link_rate(tier) / tier.engines
        nbytes = SEQUENCES * TOKENS * 2 * model.kv_heads * model.head_dim * dtype.itemsize
        rates[tier.name] = nbytes / max(whole - little, 1e-6) * model.kv_token / (nbytes / SEQUENCES / TOKENS)
        if tier.client.file_rate:  # the pages of this measurement were still in memory
            rates[tier.name] = min(rates[tier.name], tier.client.file_rate)
        rates[tier.name] /= tier.engines
        fixed.append(little * tier.engines)
        if tier.client.threads:
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
