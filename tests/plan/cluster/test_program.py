"""The mixed-integer program against brute force over all contiguous stages and all choices of each layer."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from flexengine.plan.cluster.numbers import EXACT, PAPER, Numbers, price
from flexengine.plan.cluster.program import lower_bound, solve
from flexengine.plan.cluster.search import quick_bound
from flexengine.plan.cluster.transfer import transfer
from tests.plan.cluster.toys import random_numbers

INSTANCES = 20


def splits(units: int, stages: int) -> Iterator[list[int]]:
    """All stages of units in order; the first and the last stage are not empty."""
    for cuts in itertools.combinations_with_replacement(range(1, units), stages - 1):
        ends = [*cuts, units]
        yield [next(j for j, end in enumerate(ends) if i < end) for i in range(units)]


def cost(m: Numbers, stage_of: list[int], picked: tuple[int, ...]) -> float:
    """The cost written out with plain sums; infinite if something does not fit."""
    pre, dec, last, hop_pre, hop_dec = [], [], None, [], []
    for j in range(m.stages):
        mine = [(i, m.classes[i], picked[i]) for i in range(m.units) if stage_of[i] == j]
        if not mine:
            continue
        slots = max(m.slots[j, k, c] for _, k, c in mine)
        used = m.fixed_memory[j] + slots + sum(m.memory[j, k, c] for _, k, c in mine)
        if used > m.capacity[j] or sum(m.host[j, k, c] for _, k, c in mine) > m.host_capacity[j]:
            return math.inf
        load = sum(m.load[j, k, c] for _, k, c in mine)
        pre.append(max(load, m.fixed_prefill[j] + sum(m.prefill[j, k, c] for _, k, c in mine)))
        dec.append(max(load, m.fixed_decode[j] + sum(m.decode[j, k, c] for _, k, c in mine)))
        if last is not None:
            hop_pre.append(m.hop_prefill[last, j])
            hop_dec.append(m.hop_decode[last, j])
        last = j
    slow_pre, slow_dec = max(pre + hop_pre), max(dec + hop_dec)
    if m.form == PAPER:
        seconds = (m.prefills - 1) * slow_pre + sum(pre) + (m.cohorts - 1) * m.steps * slow_dec + sum(dec)
    else:
        step = max(m.cohorts * slow_dec, sum(dec) + sum(hop_dec) + (m.back if len(pre) > 1 else 0.0))
        seconds = (m.prefills - 1) * slow_pre + sum(pre) + sum(hop_pre) + m.steps * step
    return m.rounds * seconds + m.theta * sum(m.harm[i, picked[i]] for i in range(m.units))


def brute_force(m: Numbers) -> float:
    every = itertools.product(range(len(m.choices)), repeat=m.units)
    return min(cost(m, stages, picked) for picked in every for stages in splits(m.units, m.stages))


def instance(seed: int) -> Numbers:
    rng = np.random.default_rng(seed)
    units, stages, formats, host = ((6, 2, 2, False), (5, 3, 2, False), (4, 3, 3, False), (4, 2, 2, True))[seed % 4]
    return replace(random_numbers(rng, units, stages, formats, host), form=PAPER if seed % 5 == 4 else EXACT)


def test_brute_force_on_toy_instances() -> None:
    """Two classes of layers, unequal links, offloading, empty inner stages, both forms of the objective."""
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
