"""The mixed-integer program against brute force over all contiguous stages and all choices of each layer."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.cluster.toys import INSTANCES, brute_force, cost, instance, random_numbers
from flexengine.plan.cluster.case_costs import price
from flexengine.plan.cluster.program import lower_bound, solve
from flexengine.plan.cluster.search import quick_bound
from flexengine.plan.cluster.transfer import transfer


def test_brute_force_on_toy_instances() -> None:
    """Two classes of layers, unequal links, offloading, empty inner stages."""
    solved, heuristic = 0, []
    for seed in range(INSTANCES):
        m = instance(seed)
        best, answer = brute_force(m), solve(m, gap=0.0)
        if math.isinf(best):
            assert answer is None
            assert transfer(m) is None
            continue
        assert answer is not None, seed
        priced = price(m, answer.stage_of, answer.choice_of)
        assert priced.fits
        assert priced.cost == pytest.approx(best, rel=1e-6), seed
        assert priced.cost == pytest.approx(cost(m, list(answer.stage_of), answer.choice_of), rel=1e-9)
        assert answer.bound == pytest.approx(best, rel=1e-5)
        assert lower_bound(m) <= best * (1 + 1e-6)
        assert quick_bound(m) <= best * (1 + 1e-6)
        solved += 1
        moved = transfer(m)
        if moved is not None:
            heuristic.append(price(m, moved.stage_of, moved.choice_of).cost / best)
    assert solved >= 15
    assert min(heuristic) >= 1 - 1e-9
    assert float(np.median(heuristic)) < 1.15


def test_less_than_a_cost_is_not_found_below_the_best() -> None:
    m = instance(0)
    answer = solve(m, gap=0.0)
    assert answer is not None
    best = price(m, answer.stage_of, answer.choice_of).cost
    assert solve(m, gap=0.0, below=best * 0.999) is None
    found = solve(m, gap=0.0, below=best * 1.001)
    assert found is not None
    assert price(m, found.stage_of, found.choice_of).cost == pytest.approx(best)


def test_a_device_without_kernels_gets_no_layers() -> None:
    m = random_numbers(np.random.default_rng(3), 6, 3, 2, False)
    decode = m.decode.copy()
    decode[1] = np.inf
    answer = solve(replace(m, decode=decode, capacity=m.capacity * 10), gap=0.0)
    assert answer is not None
    assert 1 not in answer.stage_of


def test_quality_alone() -> None:
    """The start of the bit transfer: least harm in the given memory, whatever the seconds."""
    m = random_numbers(np.random.default_rng(5), 4, 2, 3, False)
    answer = solve(m, gap=0.0, quality=True)
    assert answer is not None
    assert price(m, answer.stage_of, answer.choice_of).fits
    slow = replace(m, prefill=0 * m.prefill, decode=0 * m.decode, hop_prefill=0 * m.hop_prefill, back=0.0,
                   hop_decode=0 * m.hop_decode, fixed_prefill=0 * m.fixed_prefill, fixed_decode=0 * m.fixed_decode,
                   theta=1.0)  # fmt: skip
    assert price(m, answer.stage_of, answer.choice_of).harm == pytest.approx(brute_force(slow))
