"""How fast attention of a model's own shape is: `Hardware.attention`, through the cache that jobs use.

Every figure is of a call as the device lane makes it: new keys and values are appended (encoded, where the cache is),
then decode steps or a piece of a prompt attend.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flexengine import kernels as available
from flexengine.errors import OutOfMemory
from flexengine.lossy import Lossy
from flexengine.measure.timing import fill, room, seconds_per_call, unnoticed
from flexengine.model.forward import Attend
from flexengine.plan.hardware import Table
from flexengine.plan.layout import Capacity, ModelFacts, TensorFact, Workload, lay_out, page_tokens
from flexengine.policy import Policy
from flexengine.schedule.order import Batch, Piece, pages_for
from flexengine.schedule.sweeps import Sequence
from flexengine.tier.machine import Machine
from flexengine.worker.cache import Cache, View
from flexengine.worker.opened import Opened

LENGTHS, SEQUENCES = (64, 512, 2048), 16  # cached tokens of the sequences that decode, and how many
PROMPTS, PASTS, PIECE = (32, 128, 512, 1024), (512, 1536), 512  # tokens of prompts; cached before a further piece
UNCACHED = 128 << 20  # bytes of KV that decoding goes through before it begins again
LAYERS = 64  # most layers of a trial
SECONDS = 0.12  # for each figure
TENSOR = TensorFact("w", 1, 1, 1)  # stands for the weights of a layer
FEW = 1e-7  # seconds at least that are left of a call, its fixed cost taken off

Tables = dict[str, Table]


@dataclass(frozen=True)
class Trial:
    """Sequences of a cache on the device, each with `past` tokens cached and `count` new ones."""

    facts: ModelFacts
    machine: Machine
    dtype: torch.dtype
    softcap: float | None

    def seconds(self, sequences: int, past: int, count: int, window: int | None, home: str = "device") -> float:
        """Return the seconds of one layer's attention of these sequences in one gpu_batch. home: tier of the cache; on
        the host they decode there."""
        with self._cache(sequences, past, count, home) as (cache, view):
            event = self._event(sequences * count, window)
            call = partial(_on_host, cache, view, event) if home == "host" else partial(_on_device, cache, view, event)
            return seconds_per_call(call, SECONDS, self.machine)

    def layers(self, sequences: int, tokens: int, home: str = "device") -> int:
        """Layers of a trial: as many as no processor caches, or as have room; 0 if not one has."""
        page = page_tokens(self.facts, home, tokens)
        one = sequences * pages_for(tokens, page) * page * self.facts.kv_token
        return min(LAYERS, -(-UNCACHED // one), room(self.machine, home) // one)

    @contextmanager
    def _cache(self, sequences: int, past: int, count: int, home: str) -> Iterator[tuple[Cache, View]]:
        """A cache in which these sequences have their pages, filled with numbers, and the view of their gpu_batch."""
        facts, n, tokens = self.facts, max(1, self.layers(sequences, past + count, home)), past + count
        model = replace(facts, layers=((TENSOR,),) * n, others=(), embedding=TENSOR, head=None, windows=())
        away = home == "host"
        policy = Policy(sequences, 1, cache=(float(not away), float(away), 0.0), prefill_tokens=sequences * count,
                        delegate=away)  # fmt: skip
        capacity = Capacity(None, None, None, self.machine.capacity.shared, self.machine.capacity.staged)
        layout = lay_out(model, policy, Workload({(tokens, 1): sequences}), capacity)
        lossy, kernels = Lossy(cache=facts.kv_form or None, topk=facts.topk), available.load_for(self.machine.compute)
        cache = Cache(model, layout, self.machine, kernels, self.dtype, lossy)
        try:
            live = {i: Sequence(i, tokens, 1, past, home=home) for i in range(sequences)}
            for number in range(pages_for(tokens, layout.pools[home].page_tokens)):  # in turn, so that pages scatter
                for sequence in live.values():
                    cache.claim(sequence, number + 1)
            for layer in range(n):
                fill(cache.on_host(layer)[0] if away else cache.on_device(layer))
            batch = Batch(tuple(Piece(i, past, count, True) for i in live), home, "device", delegated=away)
            yield cache, cache.view(batch, live)
        finally:
            cache.close()

    def _event(self, tokens: int, window: int | None) -> Attend:
        facts, on = self.facts, self.machine.compute
        shapes = [(1, heads, tokens, facts.head_dim) for heads in (facts.heads, facts.kv_heads, facts.kv_heads)]
        q, k, v = (fill(torch.empty(shape, dtype=self.dtype, device=on), 1.0) for shape in shapes)
        return Attend(0, q, k, v, facts.head_dim**-0.5, window, self.softcap, None)


def _on_device(cache: Cache, view: View, event: Attend, number: int) -> Tensor:
    """The number-th call, on the next layer."""
    return cache.attend(event._replace(layer=number % cache.layers), view, "device", -1)


def _on_host(cache: Cache, view: View, event: Attend, number: int) -> Tensor:
    """The same where the cache lies on the host, as worker.delegation attends there."""
    pool, form = cache.on_host(number % cache.layers)
    q, k, v = (x[0].transpose(0, 1).cpu() for x in (event.q, event.k, event.v))
    native = available.load()
    native.append(k, v, pool, view.pages, view.offsets, form)
    return native.decode(q, pool, view.tables, view.lengths, event.scale, event.window, event.softcap, None, form)


@torch.no_grad()
def measure_attention(opened: Opened, machine: Machine) -> dict[str, Tables]:
    """Return `Hardware.attention` for every shape of attention that the model has. Takes about two seconds each.

    Shapes that find no room are left out. The ledgers stay as they were.
    """
    text = opened.skeleton.config.get_text_config()
    softcap = getattr(text, "attn_logit_softcapping", None)
    trial = Trial(opened.facts, machine, opened.dtype, softcap)
    most = opened.skeleton.context_length or max(LENGTHS)
    found = {}
    with unnoticed(machine):
        for window in dict.fromkeys(opened.facts.windows or (None,)):
            try:
                found[opened.facts.attention_signature(window)] = _measured(trial, window, most)
            except OutOfMemory:
                continue
    return found


def _measured(trial: Trial, window: int | None, most: int) -> Tables:
    """All tables of one shape, for contexts of at most `most` tokens."""
    call = trial.seconds(1, 16, 1, window)
    found: dict[str, list[tuple[float, float]]] = {"decode": [], "prompt": [], "continued": []}
    for length in (n for n in LENGTHS if n <= most):
        if trial.layers(SEQUENCES, length):
            seen = SEQUENCES * min(length, window or length) * trial.facts.kv_token
            took = trial.seconds(SEQUENCES, length - 1, 1, window)
            found["decode"].append((float(length), seen / max(FEW, took - call)))
    for tokens in (n for n in PROMPTS if n <= most):
        took = trial.seconds(1, 0, tokens, window)
        found["prompt"].append((float(tokens), _flop(trial.facts, 0, tokens, window) / max(FEW, took - call)))
    for past in (n for n in PASTS if n + PIECE <= most):
        took = trial.seconds(1, past, PIECE, window)
        found["continued"].append((float(past), _flop(trial.facts, past, PIECE, window) / max(FEW, took - call)))
    host = _host(trial, window) if not trial.machine.capacity.shared and trial.facts.topk is None else ()
    tables = {"call": ((1.0, call),), "host": host, **{what: tuple(points) for what, points in found.items()}}
    return {what: table for what, table in tables.items() if table}


def _flop(facts: ModelFacts, past: int, count: int, window: int | None) -> float:
    """FLOP of a piece of a prompt: 4 per (query, key) pair and element of a query head."""
    return 4.0 * facts.heads * facts.head_dim * Piece(0, past, count, True).pairs(window)


def _host(trial: Trial, window: int | None) -> Table:
    """(cached tokens of a sequence, bytes of KV per second) of decode attention where the cache lies on the host."""
    facts, found = trial.facts, []
    for length in LENGTHS[:2]:
        if trial.layers(SEQUENCES, length, "host"):
            seen = SEQUENCES * min(length, window or length) * facts.kv_token
            found.append((float(length), seen / trial.seconds(SEQUENCES, length - 1, 1, window, "host")))
    return tuple(found)
