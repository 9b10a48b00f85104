"""When attention is quicker where its KV cache lives than where everything else is computed.

FlexGen delegates from 512 cached tokens on (its release), because moving the cache costs 4 b s h1 bytes and moving
queries and outputs 4 b h1. In general (systems 1.4, "delegate iff"), of one gpu_batch in one layer, with every literal
a function of the model:

    moved   n (s read + page / 2) kv / up  +  n page kv / down  +  n s kv read / device  +  computing
    there   n sent / down  +  n s kv read / host  +  n fetched / up  +  fixed       +  computing

delegate iff there < moved. Where lanes overlap, only the longest lane counts: pages move while other layers are
computed, and the host attends for one gpu_batch while the device computes others. A single gpu_batch has nobody to
overlap with: its attention there is a chain still.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, product

from flexengine.plan.facts import ModelFacts

Line = tuple[float, float]  # seconds at 0 cached tokens, and per token


@dataclass(frozen=True)
class Rule:
    """One layer of one gpu_batch of `sequences` decoding sequences.

    kv: bytes a cached token takes; sent, fetched: bytes of queries and new K and V, and of attention, of a token; read:
    share of `kv` that attention reads, and that is moved for it: below 1 all keys and, when the device has chosen and
    waits for them, some values; page: tokens that move together. up, down: bytes per second of the links to the device
    and from it; host, device: bytes of KV per second of attention there. computing: seconds of the layer on the device
    without its attention; fixed: seconds that delegating adds, whatever moves (tasks handed over); latency: seconds
    that each transfer takes besides its bytes (one loads, one stores for every sequence; one goes either way where
    attention is delegated). batches: how many gpu_batches take turns; overlap: False where tasks run one after the
    other.
    """

    kv: float
    sent: float
    fetched: float
    up: float
    down: float
    host: float
    device: float = math.inf
    read: float = 1.0
    page: int = 0
    sequences: int = 1
    computing: float = 0.0
    fixed: float = 0.0
    latency: float = 0.0
    batches: int = 1
    overlap: bool = False

    @property
    def moved(self) -> list[Line]:
        """Seconds by cached tokens where pages move: the largest of these lines."""
        kv = self.sequences * self.kv
        load = (self.latency + kv * self.page / 2 / self.up, kv * self.read / self.up)
        store = (self.sequences * self.latency * (self.page > 0) + kv * self.page / self.down, 0.0)
        waits = kv * (self.read - 0.5) / self.up if self.read < 1 and self.overlap else 0.0
        device = (self.computing, kv * self.read / self.device + waits)
        return [load, store, device] if self.overlap else [_sum(load, store, device)]

    @property
    def there(self) -> list[Line]:
        """The same where attention is delegated."""
        n = self.sequences
        send = (self.latency + n * self.sent / self.down, 0.0)
        fetch = (self.latency + n * self.fetched / self.up, 0.0)
        host, device = (0.0, n * self.kv * self.read / self.host), (self.computing + self.fixed, 0.0)
        return [send, fetch, host, device] if self.overlap and self.batches > 1 else [_sum(send, fetch, host, device)]

    def delegates(self, cached: float) -> bool:
        """Whether delegation is quicker at so many cached tokens."""
        return _most(self.there, cached) < _most(self.moved, cached)

    @property
    def crossover(self) -> float:
        """Cached tokens from which on delegation is quicker: 0 if it always is, infinite if it never is.

        Without overlap that is (there(0) - moved(0)) / (moved per token - there per token); with it, the last point
        where the longest lanes of both are equally long.
        """
        meet = {0.0}
        for (a, x), (b, y) in product(self.moved, self.there):
            if x != y and (b - a) / (x - y) > 0:
                meet.add((b - a) / (x - y))
        points = sorted(meet)  # between two of these neither overtakes the other
        if not self.delegates(2 * points[-1] + 1):
            return math.inf
        return max((high for low, high in pairwise(points) if not self.delegates((low + high) / 2)), default=0.0)


def _sum(*lines: Line) -> Line:
    return sum(a for a, _ in lines), sum(x for _, x in lines)


def _most(lines: list[Line], cached: float) -> float:
    return max(a + x * cached for a, x in lines)


def read_share(topk: float | None, group: float = 1.0) -> float:
    """Share of the KV bytes that attention reads if it takes this share of the values: all keys, and the values that
    some of the `group` query heads of a kv head wants, if they choose by chance."""
    return 1.0 if topk is None else (2.0 - (1.0 - topk) ** group) / 2.0


def rule_of(model: ModelFacts, topk: float | None = None, **rates: float | int | bool) -> Rule:
    """The rule of a model: q and the output are heads * head_dim wide, K and V kv_heads * head_dim each (GQA), cached
    tokens as wide as their codec makes them. rates: the other fields of Rule."""
    return Rule(model.kv_token, model.sent, model.fetched, read=read_share(topk, model.heads / model.kv_heads), **rates)  # type: ignore[arg-type]


def projection_share(model: ModelFacts, layer: int) -> float:
    """Share of a layer's products that comes before its attention: q, k and v."""
    active = model.active or 1
    products = sum(t.elements * min(1.0, active / t.experts) if t.experts else t.elements
                   for t in model.layers[layer] if t.matrix)  # fmt: skip
    before = model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    return min(1.0, before / products) if products else 0.5
