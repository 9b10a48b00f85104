"""Decide whether attention is faster on the host, beside its KV cache, than on the device.

FlexGen's release delegates from 512 cached tokens on, because moving the cache costs 4 b s h1 bytes, but queries and
outputs cost 4 b h1 bytes. For any model, these are the seconds of one layer of one gpu_batch (names as in `Rule`, n
sequences of s cached tokens each):

    on_device   n (s read + page / 2) kv / up  +  n page kv / down  +  n s kv read / device  +  computing
    on_host     n sent / down  +  n s kv read / host  +  n fetched / up  +  fixed  +  computing

Delegate if on_host < on_device. If lanes overlap, the longest lane replaces the sum: pages move while the device
computes other layers, and the host attends for one gpu_batch while the device computes others. With a single gpu_batch,
the lanes of `on_host` cannot overlap, so their sum counts.
"""

import math
from dataclasses import dataclass
from itertools import pairwise, product

from flexengine.plan.facts import ModelFacts

Line = tuple[float, float]  # seconds at 0 cached tokens, and per token


@dataclass(frozen=True)
class Rule:
    """Sizes and rates of one layer of one gpu_batch of decoding sequences.

    Attributes:
        kv: bytes of a cached token.
        sent: bytes of one token's queries, key and value, sent to the host.
        fetched: bytes of one token's attention output, fetched from the host.
        up, down: bytes per second of the links to the device and from the device.
        host, device: bytes of KV per second of attention on the host and on the device.
        read: share of `kv` that attention reads and that is loaded. Below 1 (`topk`), the device waits for the values.
        page: tokens of a page.
        sequences: number of sequences in the gpu_batch.
        computing: seconds of the layer on the device without its attention.
        fixed: seconds that delegating adds for any number of bytes (handing over tasks).
        latency: seconds that each transfer takes besides its bytes. On the device there is one load per gpu_batch and
            one store per sequence; on the host one send and one fetch per gpu_batch.
        batches: number of gpu_batches in a sweep.
        overlap: False if tasks run one after the other.
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
    def on_device(self) -> list[Line]:
        """Return lines of seconds by cached tokens if pages move to the device. The largest line counts."""
        kv = self.sequences * self.kv
        load = (self.latency + kv * self.page / 2 / self.up, kv * self.read / self.up)
        store = (self.sequences * self.latency * (self.page > 0) + kv * self.page / self.down, 0.0)
        waits = kv * (self.read - 0.5) / self.up if self.read < 1 and self.overlap else 0.0
        device = (self.computing, kv * self.read / self.device + waits)
        return [load, store, device] if self.overlap else [_sum(load, store, device)]

    @property
    def on_host(self) -> list[Line]:
        """Return lines of seconds by cached tokens if attention is delegated. The largest line counts."""
        n = self.sequences
        send = (self.latency + n * self.sent / self.down, 0.0)
        fetch = (self.latency + n * self.fetched / self.up, 0.0)
        host, device = (0.0, n * self.kv * self.read / self.host), (self.computing + self.fixed, 0.0)
        return [send, fetch, host, device] if self.overlap and self.batches > 1 else [_sum(send, fetch, host, device)]

    def delegates(self, cached: float) -> bool:
        """Return whether delegation is faster for sequences of `cached` tokens."""
        return _largest(self.on_host, cached) < _largest(self.on_device, cached)

    @property
    def crossover(self) -> float:
        """Return the cached tokens from which on delegation is faster: 0 if always, infinite if never.

        Without overlap, the crossover is the intersection of the two lines. With overlap, it is the last point where
        the longest lanes of both sides are equally long.
        """
        meet = {0.0}
        for (a, x), (b, y) in product(self.on_device, self.on_host):
            if x != y and (b - a) / (x - y) > 0:
                meet.add((b - a) / (x - y))
        points = sorted(meet)  # between two neighbouring points the faster side stays the same
        if not self.delegates(2 * points[-1] + 1):
            return math.inf
        return max((high for low, high in pairwise(points) if not self.delegates((low + high) / 2)), default=0.0)


def _sum(*lines: Line) -> Line:
    return sum(a for a, _ in lines), sum(x for _, x in lines)


def _largest(lines: list[Line], cached: float) -> float:
    return max(a + x * cached for a, x in lines)


def read_share(topk: float | None, group: float = 1.0) -> float:
    """Return the share of the KV bytes that attention reads: all keys, and the chosen values.

    Query heads are assumed to choose values at random.

    Args:
        topk: share of the values that each query head chooses, None for all.
        group: query heads per kv head.
    """
    return 1.0 if topk is None else (2.0 - (1.0 - topk) ** group) / 2.0


def rule_of(model: ModelFacts, topk: float | None = None, **rates: float | int | bool) -> Rule:
    """Return the rule of a model.

    Args:
        topk: share of the values that each query head chooses, None for all.
        rates: the other fields of Rule.
    """
    return Rule(model.kv_token, model.sent, model.fetched, read=read_share(topk, model.heads / model.kv_heads), **rates)  # type: ignore[arg-type]
