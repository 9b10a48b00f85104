"""Pace of a staggered pipeline (`schedule/stagger.py`), and the devices that give most tokens, or most for the money.

With n gpu_batches, R replicas, W attention workers that share each question, t_m seconds of a slice and t_a seconds of
attention on one worker, the seconds per layer of all gpu_batches are

    period = max(n t_a / W, n t_m / R, t_m + t_a / W)

The workers are busy, or the replicas are, or each gpu_batch waits for nothing but its own slice and attention. This
holds for every order whose slices take turns on the replicas: rotational and interleaved with n = R + 1, and fixed with
n = R, 2 R, ... More gpu_batches than make the last term the smallest add nothing.
"""

import math
from dataclasses import dataclass
from itertools import product

ROUNDING = 1e-9  # relative; of quotients that are whole numbers


@dataclass(frozen=True)
class Pace:
    """Pace of a pipeline between filling and draining.

    Attributes:
        batches: number of gpu_batches in flight.
        replicas: number of devices, each with the model or with its layers.
        workers: number of attention workers.
        slice_seconds: seconds of one slice of a gpu_batch on a replica.
        attention_seconds: seconds of one attention of a gpu_batch on a single worker.
    """

    batches: int
    replicas: int
    workers: int
    slice_seconds: float
    attention_seconds: float

    @property
    def period(self) -> float:
        """Seconds per layer of all gpu_batches."""
        attention = self.attention_seconds / self.workers
        each = self.batches * self.slice_seconds / self.replicas
        return max(self.batches * attention, each, self.slice_seconds + attention)

    @property
    def device_busy(self) -> float:
        """Share of the time in which a replica computes."""
        return self.batches * self.slice_seconds / (self.replicas * self.period)

    @property
    def pool_busy(self) -> float:
        """Share of the time in which the workers compute."""
        return self.batches * self.attention_seconds / (self.workers * self.period)

    def tokens_per_second(self, batch_size: int, layers: int) -> float:
        """Return the tokens per second of gpu_batches of `batch_size` sequences in a model of `layers` layers."""
        return self.batches * batch_size / (layers * self.period)


def fastest(replicas: int, workers: int, slice_seconds: float, attention_seconds: float) -> Pace:
    """Return the pace with the fewest gpu_batches that no larger number exceeds: (t_m + t_a) / max(t_a, t_m / R).

    If attention takes t_m / R on all workers, there are R + 1 gpu_batches, and all devices are always busy.
    """
    attention = attention_seconds / workers
    least = (slice_seconds + attention) / max(attention, slice_seconds / replicas)
    return Pace(math.ceil(least * (1 - ROUNDING)), replicas, workers, slice_seconds, attention_seconds)


def best(
    replicas: int, workers: int, slice_seconds: float, attention_seconds: float,
    prices: tuple[float, float] | None = None,
) -> Pace:  # fmt: skip
    """Return the best pace of all numbers of devices. Of equal ones, the one with fewest devices, then gpu_batches.

    Args:
        replicas: most replicas.
        workers: most workers.
        slice_seconds, attention_seconds: as in Pace.
        prices: of a replica and of a worker, in one currency. The best pace has then most slices per second and price;
            without prices, most slices per second.
    """

    def value(pace: Pace) -> float:
        price = 1.0 if prices is None else pace.replicas * prices[0] + pace.workers * prices[1]
        return pace.batches / pace.period / price

    paces = [fastest(r, w, slice_seconds, attention_seconds)
             for r, w in product(range(1, replicas + 1), range(1, workers + 1))]  # fmt: skip
    most = max(map(value, paces)) * (1 - ROUNDING)
    return min((pace for pace in paces if value(pace) >= most), key=lambda p: (p.replicas + p.workers, p.batches))
