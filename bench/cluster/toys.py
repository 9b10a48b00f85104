"""Random small cases of the cluster planner, and brute force over all of their assignments."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from flexengine.plan.cluster.case_costs import CaseCosts, UnitChoice
from flexengine.plan.cluster.job import Format

INSTANCES = 20
MIXED: tuple[Format, ...] = (None, "int8", "int4")


def splits(units: int, stages: int) -> Iterator[list[int]]:
    """Yield all stages of units in order; the first and the last stage are not empty."""
    for cuts in itertools.combinations_with_replacement(range(1, units), stages - 1):
        ends = [*cuts, units]
        yield [next(j for j, end in enumerate(ends) if i < end) for i in range(units)]


def cost(m: CaseCosts, stage_of: list[int], picked: tuple[int, ...]) -> float:
    """Return the cost, written out with plain sums; infinite if something does not fit."""
    pre, dec, hop_pre, hop_dec = list[float](), list[float](), list[float](), list[float]()
    last: int | None = None
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
    step = max(m.cohorts * slow_dec, sum(dec) + sum(hop_dec) + (m.back if len(pre) > 1 else 0.0))
    seconds = (m.prefills - 1) * slow_pre + sum(pre) + sum(hop_pre) + m.steps * step
    return float(m.rounds * seconds + m.theta * sum(m.harm[i, picked[i]] for i in range(m.units)))


def brute_force(m: CaseCosts) -> float:
    """Return the least cost of all assignments; infinite if none fits."""
    every = itertools.product(range(len(m.choices)), repeat=m.units)
    return min(cost(m, stages, picked) for picked in every for stages in splits(m.units, m.stages))


def instance(seed: int) -> CaseCosts:
    """Return a random case of one of four shapes."""
    rng = np.random.default_rng(seed)
    units, stages, formats, host = ((6, 2, 2, False), (5, 3, 2, False), (4, 3, 3, False), (4, 2, 2, True))[seed % 4]
    return random_numbers(rng, units, stages, formats, host)


def random_numbers(rng: np.random.Generator, units: int, stages: int, formats: int, host: bool) -> CaseCosts:
    """Return a random case: two classes of units, links of unequal speed, memory that just suffices."""
    choices = tuple(UnitChoice(form, on) for on in ((False, True) if host else (False,)) for form in MIXED[:formats])
    size = (stages, 2, len(choices))
    on_host = np.array([c.host for c in choices])
    nbytes = np.array([{None: 16.0, "int8": 8.0, "int4": 4.0}[c.form] for c in choices]) * 1e9
    bulk = nbytes * rng.uniform(0.8, 1.2, (1, 2, 1))
    speed = rng.uniform(0.3, 3.0, (stages, 1, 1))
    noise = rng.uniform(0.9, 1.1, size)
    classes = tuple(int(x) for x in rng.integers(0, 2, units))
    cached = rng.uniform(0.2, 2.0) * 1e9
    need = 12e9 * units / stages
    hops = rng.uniform(0.0, 0.3, (2, stages, stages))
    cohorts = int(rng.integers(1, 5))
    harm = np.array([{None: 0.0, "int8": 0.05, "int4": 1.0}[c.form] for c in choices])
    return CaseCosts(
        choices, classes if len(set(classes)) == 2 else (0, 1, *classes[2:]),
        prefill=(0.5 + 0.03 * bulk / 1e9) / speed * noise, decode=(0.02 + 0.01 * bulk / 1e9) / speed * noise,
        load=np.where(on_host, bulk / 2e10, 0.0) * np.ones(size),
        memory=cached + np.where(on_host, 0.0, bulk) * np.ones(size),
        host=np.where(on_host, bulk, 0.0) * np.ones(size), slots=np.where(on_host, 2 * bulk, 0.0) * np.ones(size),
        fixed_prefill=rng.uniform(0, 0.1, stages), fixed_decode=rng.uniform(0, 0.01, stages),
        fixed_memory=rng.uniform(0, 1e9, stages), capacity=need * rng.uniform(0.6, 2.0, stages),
        host_capacity=need * rng.uniform(0.0, 1.0, stages), hop_prefill=hops[0], hop_decode=0.1 * hops[1],
        back=float(rng.uniform(0, 0.02)),
        harm=harm * rng.uniform(0.5, 3, (units, 1)),
        theta=float(rng.choice([0.0, 0.1, 1.0, 10.0])), prefills=cohorts * int(rng.integers(1, 4)), cohorts=cohorts,
        steps=int(rng.integers(1, 40)), rounds=int(rng.integers(1, 3)),
    )  # fmt: skip
