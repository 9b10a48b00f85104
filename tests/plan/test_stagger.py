"""Pace of staggered pipelines, against the virtual clock and against all numbers of devices and gpu_batches."""

import math
import random

import pytest

from flexengine.plan.stagger import Pace, best, fastest
from flexengine.schedule.program import Op
from flexengine.schedule.simulate import simulate
from flexengine.schedule.stagger import POOL, Stagger, replica_lane, steady


def rate(batches: int, replicas: int, t_m: float, t_a: float) -> float:
    """Return gpu_batches per layer and second: the least of the three bounds."""
    return min(1 / t_a, replicas / t_m, batches / (t_m + t_a))


def test_pace_is_that_of_the_virtual_clock() -> None:
    rng = random.Random(1)
    for batches in range(1, 7):
        for replicas in range(1, 5):
            workers, t_m, t_a = rng.randrange(1, 4), rng.uniform(0.5, 2), rng.uniform(0.2, 2)
            pace = Pace(batches, replicas, workers, t_m, t_a)
            seconds = {Op.COMPUTE: t_m, Op.ATTEND: t_a / workers, Op.LEAVE: 0.0}
            spans = simulate(Stagger(batches, replicas).program(240), lambda task, s=seconds: s[task.op]).spans
            found = steady(spans, 120, 180)
            assert found.period == pytest.approx(pace.period)
            assert found.busy[POOL] == pytest.approx(pace.pool_busy)
            shares = [found.busy.get(replica_lane(r), 0.0) for r in range(replicas)]
            assert sum(shares) / replicas == pytest.approx(pace.device_busy)


@pytest.mark.parametrize("replicas", range(1, 8))
def test_fewest_gpu_batches(replicas: int) -> None:
    rng = random.Random(replicas)
    matched = fastest(replicas, 3, 2.0 * replicas, 6.0)  # attention takes t_m / replicas on three workers
    assert matched.batches == replicas + 1
    assert matched.device_busy == pytest.approx(1)
    assert matched.pool_busy == pytest.approx(1)
    assert matched.tokens_per_second(64, 40) == pytest.approx((replicas + 1) * 64 / (40 * 2.0 * (replicas + 1)))
    for _ in range(50):
        t_m, t_a = rng.uniform(0.1, 5), rng.uniform(0.1, 5)
        most = rate(1000, replicas, t_m, t_a)
        enough = next(n for n in range(1, 1000) if rate(n, replicas, t_m, t_a) > most * (1 - 1e-6))
        pace = fastest(replicas, 1, t_m, t_a)
        assert pace.batches == enough
        assert pace.batches / pace.period == pytest.approx(most)


@pytest.mark.parametrize("prices", [None, (10.0, 1.0), (1.0, 1.0), (1.0, 4.0)])
def test_best_devices(prices: tuple[float, float] | None) -> None:
    rng = random.Random(5)
    for _ in range(20):
        t_m, t_a, value = rng.uniform(0.1, 2), rng.uniform(0.1, 8), dict[tuple[int, int, int], float]()
        for replicas in range(1, 6):
            for workers in range(1, 7):
                price = replicas * prices[0] + workers * prices[1] if prices else 1.0
                for n in range(1, 30):
                    value[replicas, workers, n] = rate(n, replicas, t_m, t_a / workers) / price
        pace = best(5, 6, t_m, t_a, prices)
        most = max(value.values())
        assert value[pace.replicas, pace.workers, pace.batches] == pytest.approx(most)
        good = [key for key, found in value.items() if math.isclose(found, most, rel_tol=1e-6)]
        assert pace.replicas + pace.workers == min(r + w for r, w, _ in good)
