"""plan.workload: totals of the longest sequences, by the sum over single sequences."""

import random

import numpy as np
import pytest

from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool


@pytest.mark.parametrize("seed", range(4))
def test_totals_of_the_longest_sequences(seed: int) -> None:
    rng = random.Random(seed)
    rows = [(rng.randint(1, 40), rng.randint(1, 9)) for _ in range(rng.choice((0, 1, 30)))]
    made, pool = Workload.of(rows), Pool(0, 16, None, rng.choice((None, 8)))
    prompts = sorted((p for p, _ in rows), reverse=True)
    held = [pool.held(n) for n in sorted((p + n - 1 for p, n in rows), reverse=True)]
    for count in (0, 1, 2, 17, len(rows), len(rows) + 5):
        assert made.prompt_tokens(count) == sum(prompts[:count])
        assert made.pages(count, pool) == sum(held[:count])


def test_a_total_takes_no_time_for_each_size() -> None:
    """A search asks often: arrays of another form would be copied by every `np.interp`."""
    made = Workload.of((p, 1) for p in range(1, 1000))
    made.pages(1, Pool(0, 16))
    for totals in (made._prompts, *made._pages.values()):
        for numbers in totals:
            assert numbers.dtype == np.float64
            assert numbers.flags.c_contiguous
