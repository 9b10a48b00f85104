"""Measurement of a model's attention for `Hardware.attention`, with the KV cache that jobs use.

Every figure is the time of a call as on the device lane: new keys and values are appended (and encoded if the cache is
encoded), then attention is computed for decode steps or a prefill chunk.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from flexengine import kernels as available
from flexengine.activity import tick
from flexengine.errors import OutOfMemory
from flexengine.kernels.base import AttentionOptions
from flexengine.lossy import Lossy
from flexengine.measure.timing import fill, room, seconds_per_call, unnoticed
from flexengine.model.forward import Attend
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity, Table
from flexengine.plan.layout import lay_out
from flexengine.plan.sizes import page_tokens
from flexengine.plan.workload import Workload
from flexengine.policy import HOST_CACHE, NO_CACHE, Policy
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.pages import pages_for
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.machine import Machine
from flexengine.worker.cache import Cache, View
from flexengine.worker.open_model import OpenModel

LENGTHS, SEQUENCES = (128, 512, 2048), 16  # cached tokens of each decoding sequence; least number of these sequences
DECODED = 8192  # least cached tokens of all of them: with 2,048 a call's fixed cost was most of its time
PROMPTS, PASTS, PIECE = (64, 256, 1024), (512, 1536), 512  # tokens of prompts; tokens before a chunk, and of the chunk
QUICK = (512,), (256,), ()  # the same lengths for a quick measurement
UNCACHED = 64 << 20  # bytes of KV that decoding reads before it reads the same bytes again
TRIALS = 12  # caches that exist at once
LAYERS = 64  # maximum layers of a trial
WIDTH = 2048  # rows and columns of the matrix that is multiplied between two calls
QUICK_SECONDS = 0.05  # for each figure of a quick measurement
SECONDS, TURNS = 0.12, 3  # for each figure; figures take turns, so that slow moments of the machine affect all equally
TENSOR = TensorFact("w", 1, 1, 1)  # replaces the weights of a layer
MIN_CALL_SECONDS = 1e-7  # seconds; minimum of a call's time without its fixed cost

Tables = dict[str, Table]
Lengths = tuple[int, ...]
Call = Callable[[int], object]
Timed = AbstractContextManager[Call]


@dataclass(frozen=True)
class AttentionTrial:
    """Maker of attention calls to time, with activations of `dtype`."""

    facts: ModelFacts
    machine: Machine
    dtype: torch.dtype

    @contextmanager
    def call(self, sequences: int, past: int, count: int, window: int | None, home: str = "device") -> Iterator[Call]:
        """Yield a function that computes one layer's attention of one gpu_batch. past, count: cached and new tokens of
        each sequence. window: tokens that a query sees; None for all. home: tier of the cache; for the host, attention
        is computed on the host."""
        layers = max(1, self.layers(sequences, past + count, home))
        with self.cache(layers, sequences, past, count, home) as (cache, view):
            on = _on_host if home == "host" else _on_device
            yield partial(on, cache, view, self._event(sequences * count, window))

    @contextmanager
    def cache(
        self, n: int, sequences: int, past: int, count: int, home: str = "device"
    ) -> Iterator[tuple[Cache, View]]:
        """Yield a cache of n layers with random numbers, and the pages of a gpu_batch. Arguments as of `call`."""
        facts, tokens = self.facts, past + count
        model = replace(
            facts, layers=((TENSOR,),) * n, others=(), embedding=TENSOR, head=None, windows=(), states=(), choosing=()
        )
        on_host = home == "host"
        policy = Policy(sequences, 1, cache=(float(not on_host), float(on_host), 0.0), prefill_tokens=sequences * count,
                        delegate=HOST_CACHE if on_host else NO_CACHE)  # fmt: skip
        capacity = Capacity(None, None, None, self.machine.capacity.shared, self.machine.capacity.staged)
        layout = lay_out(model, policy, Workload({(tokens, 1): sequences}), capacity)
        lossy = Lossy(cache=facts.kv_form or None, sparse_attention=facts.topk)
        kernels = available.load_for(self.machine.compute)
        cache = Cache(model, layout, self.machine, kernels, self.dtype, lossy)
        try:
            live = {i: Sequence(i, tokens, 1, cached=past, home=home) for i in range(sequences)}
            size = layout.pools[home][0].page_tokens
            for number in range(pages_for(tokens, size)):  # in turns, to scatter the pages
                for sequence in live.values():
                    cache.claim(sequence, (number + 1) * size)
            for layer in range(n):
                fill(cache.pools.view(layer, home))
            batch = Batch(tuple(Piece(i, past, count, True) for i in live), home, "device", home)
            yield cache, cache.view(batch)
        finally:
            cache.close()

    def layers(self, sequences: int, tokens: int, home: str = "device") -> int:
        """Return the layers of a trial: enough to exceed the CPU's caches, limited by free memory; 0 if none fits."""
        one, left = self.layer_bytes(sequences, tokens, home), room(self.machine, home)
        return min(LAYERS, -(-UNCACHED // one), max(left // TRIALS // one, min(1, left // one)))

    def layer_bytes(self, sequences: int, tokens: int, home: str = "device") -> int:
        """Return the bytes of one layer's cache of sequences with that many tokens each."""
        page = page_tokens(self.facts, home, tokens)
        return sequences * pages_for(tokens, page) * page * self.facts.kv_token

    def _event(self, tokens: int, window: int | None) -> Attend:
        facts, on = self.facts, self.machine.compute
        shapes = [(1, heads, tokens, facts.head_dim) for heads in (facts.heads, facts.kv_heads, facts.kv_heads)]
        q, k, v = (fill(torch.empty(shape, dtype=self.dtype, device=on), 1.0) for shape in shapes)
        return Attend(0, q, k, v, facts.head_dim**-0.5, window, facts.softcap, None)


def _on_device(cache: Cache, view: View, event: Attend, number: int) -> Tensor:
    return cache.attend(event._replace(layer=number % cache.layers), view, "device", None)


def _on_host(cache: Cache, view: View, event: Attend, number: int) -> Tensor:
    """Compute call `number` for a cache on the host, as `HostAttender` does."""
    pool, form = cache.on_host(number % cache.layers)
    q, k, v = (x[0].transpose(0, 1).cpu() for x in (event.q, event.k, event.v))
    native, at = available.load(), cache.tables(view, event.layer)
    native.append(k, v, pool, at.pages, at.offsets, form)
    options = AttentionOptions(event.scale, event.window, event.softcap)
    return native.decode_attention(q, pool, at.tables, at.lengths, options, form)


@torch.no_grad()
def measure_attention(opened: OpenModel, machine: Machine, quick: bool = False) -> dict[str, Tables]:
    """Return `Hardware.attention` for every attention shape of the model. Takes about two seconds per shape, or a
    third of one if `quick`.

    Figures that do not fit in memory are left out; the planner uses the machine's general rates for a shape without
    tables. The ledgers are unchanged afterwards.
    """
    trial = AttentionTrial(opened.facts, machine, opened.dtype)
    most = opened.skeleton.context_length or max(LENGTHS)
    tables = {}
    with unnoticed(machine):
        for window in dict.fromkeys(opened.facts.attended):
            tables[opened.facts.attention_signature(window)] = _measured(trial, window, most, quick)
    return tables


def _measured(trial: AttentionTrial, window: int | None, most: int, quick: bool) -> Tables:
    """Return all tables of one shape, for contexts of at most `most` tokens; {} if the first figure does not fit."""
    figures, calls = list[tuple[str, int, float]](), list[Call]()
    with ExitStack() as stack:
        for what, x, work, call in _figures(trial, window, most, *(QUICK if quick else (LENGTHS, PROMPTS, PASTS))):
            tick()
            with suppress(OutOfMemory):
                calls.append(stack.enter_context(call))
                figures.append((what, x, work))
        if not figures or figures[0][0] != "call":
            return {}
        on, dtype = trial.machine.compute, trial.dtype
        rows, weight = (fill(torch.empty(n, WIDTH, dtype=dtype, device=on)) for n in (SEQUENCES, WIDTH))

        def product() -> object:  # like a layer's; evicts attention's data from the CPU's caches
            return functional.linear(rows, weight)

        budget = (QUICK_SECONDS if quick else SECONDS) / TURNS
        turns = [[seconds_per_call(call, budget, trial.machine, product) for call in calls]
                 for _ in range(TURNS)]  # fmt: skip
    took = [median(seconds) for seconds in zip(*turns, strict=True)]
    tables: dict[str, list[tuple[float, float]]] = defaultdict(list)
    fixed = took[0]
    for (what, x, work), whole in zip(figures, took, strict=True):
        rest = whole if what == "host" else max(MIN_CALL_SECONDS, whole - fixed)
        tables[what].append((float(x), work / rest if work else whole))
    return {what: tuple(points) for what, points in tables.items()}


def _figures(
    trial: AttentionTrial, window: int | None, most: int, lengths: Lengths, prompts: Lengths, pasts: Lengths
) -> Iterator[tuple[str, int, float, Timed]]:
    """Yield (name of a table, x in tokens, work, call to time). work: bytes or FLOP for rates, 0 for seconds. The first
    call reads almost no data, and so gives the fixed cost of a call."""
    facts = trial.facts
    yield "call", 1, 0.0, trial.call(1, 15, 1, window)
    apart = not trial.machine.capacity.shared and facts.topk is None
    for home in ("device", "host") if apart else ("device",):
        what = "decode" if home == "device" else home
        for length, count in ((n, max(SEQUENCES, DECODED // n)) for n in lengths if n <= most):
            seen = count * min(length, window or length) * facts.kv_token
            if trial.layers(count, length, home):
                yield what, length, seen, trial.call(count, length - 1, 1, window, home)
    for tokens in (n for n in prompts if n <= most):
        yield "prompt", tokens, _flop(facts, 0, tokens, window), trial.call(1, 0, tokens, window)
    for past in (n for n in pasts if n + PIECE <= most):
        yield "continued", past, _flop(facts, past, PIECE, window), trial.call(1, past, PIECE, window)


def _flop(facts: ModelFacts, past: int, count: int, window: int | None) -> float:
    """Return the FLOP of a prefill chunk: 4 per (query, key) pair and element of a query head."""
    return 4.0 * facts.heads * facts.head_dim * Piece(0, past, count, True).pairs(window)
