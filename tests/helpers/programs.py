"""Placement problems, and their value at any point, computed without a solver."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from flexengine.plan.lp import Solution, solve
from flexengine.plan.problem import Affine, MemoryLimit, Phase, Problem
from flexengine.plan.terms import fractions

FRACTIONS = fractions()
ALL = frozenset(FRACTIONS)
WG, WC, WD, CG, CC, CD, HG, HC, HD = FRACTIONS  # weights, cache and hidden states on device, host and disk
ROUNDING = 1e-6  # relative
# All placements in steps of a tenth: [66 ** 3, 9] in the order of FRACTIONS.
TENTHS = np.array([(a, b, 10 - a - b) for a in range(11) for b in range(11 - a)]) / 10
_ONE = np.arange(len(TENTHS))
GRID = np.concatenate([TENTHS[i.ravel()] for i in np.meshgrid(_ONE, _ONE, _ONE, indexing="ij")], axis=1)
Machine = dict[str, float]


def flexgen(machine: Machine, shape: Mapping[str, int], delegate: bool) -> Problem:
    """FlexGen's cost model (appendix A.3): a model of l layers, h1, h2 wide, nh heads; s prompt, n new tokens."""
    deep, h1, h2, nh, s, n = (shape[k] for k in ("l", "h1", "h2", "nh", "s", "n"))
    gbs, bls = shape["gbs"], shape["gbs"] * shape["K"]
    weights, mean = 8 * h1 * h1 + 4 * h1 * h2, s + n / 2
    busy = {}
    for phase, t in (("prefill", s), ("decode", 1)):
        act, new_kv, prefill = 2 * t * h1 * bls, 4 * t * h1 * bls, phase == "prefill"
        kv = 0.0 if prefill else 4 * bls * mean * h1
        up = {WC: weights, WD: weights, HC: act, HD: act}
        if not delegate:
            up |= {CC: kv, CD: kv}
        down = {CC: new_kv, CD: new_kv, HC: act, HD: act}
        product = bls * t * (8 * h1 * h1 + 4 * h1 * h2) / machine["mm"]
        bmm, cpu = kv / machine["bmm"], kv / machine["cpu"]
        attention = {CG: bmm, CC: cpu, CD: cpu} if delegate else {CG: bmm, CC: bmm, CD: bmm}
        quadratic = 4 * bls * s * s * h1 / machine["bmm"] if prefill else 0.0
        busy[phase] = {
            "h2d": scaled(up, deep / machine["h2d"]),
            "d2h": scaled(down, deep / machine["d2h"]),
            "disk_read": scaled({WD: weights, CD: kv, HD: act}, deep / machine["disk_read"]),
            "disk_write": scaled({CD: new_kv, HD: act}, deep / machine["disk_write"]),
            "device": Affine(deep * (product + quadratic), {k: deep * v for k, v in attention.items() if v}),
        }
    peak, block = 4 * (s + n) * h1 * bls * deep, 2 * s * h1 * bls

    def home(place: str) -> dict[str, float]:
        return {f"weights@{place}": weights * deep, f"cache@{place}": peak, f"hidden@{place}": block}

    def work(buffer: float, cached: float) -> Affine:
        """Home on the device, two slots of streamed weights and of a batch's hidden states, and a buffer."""
        held = home("device") | {CG: peak + cached}
        held[WG] -= 2 * weights
        held[HG] -= 2 * s * h1 * gbs
        return Affine(2 * weights + 2 * s * h1 * gbs + buffer, held)

    score = gbs * (4 * s * h1 + 2 * nh * s * s)
    peaks = [(8 * gbs * s * h1, 0), (score, 0), (2 * gbs * s * (h1 + h2), 0), (0, gbs * 2 * (s + n) * h1)]
    memories = [MemoryLimit(f"device {i}", work(*p), machine["device"]) for i, p in enumerate(peaks)]
    staging = Affine(weights, {WG: -weights, **home("host")}) if delegate else Affine(0.0, home("host"))
    memories += [
        MemoryLimit("host", staging, machine["host"]),
        MemoryLimit("disk", Affine(0.0, home("disk")), machine["disk"]),
    ]
    phases = (Phase("prefill", 1, busy["prefill"], 1), Phase("decode", n - 1, busy["decode"], n - 1))
    return Problem(phases, tuple(memories), {}, True, ALL)


def scaled(nbytes: Mapping[str, float], seconds: float) -> Affine:
    return Affine(0.0, {name: n * seconds for name, n in nbytes.items() if n})


def machine_of(rng: random.Random) -> Machine:
    """A T4's figures, each times 0.1 to 10."""
    t4 = {"h2d": 12e9, "d2h": 6e9, "disk_read": 2e9, "disk_write": 1e9, "mm": 20e12, "bmm": 200e9, "cpu": 20e9,
          "device": 16e9, "host": 200e9, "disk": 1500e9}  # fmt: skip
    return {name: value * 10 ** rng.uniform(-1, 1) for name, value in t4.items()}


def shape_of(rng: random.Random) -> dict[str, int]:
    deep, h1, nh = rng.choice([(32, 4096, 32), (48, 7168, 56), (96, 12288, 96), (12, 768, 12)])
    return {"l": deep, "h1": h1, "h2": 4 * h1, "nh": nh, "s": rng.choice([32, 512, 1024]),
            "n": rng.choice([2, 32, 128]), "gbs": rng.choice([1, 8, 32, 64]), "K": rng.choice([1, 4, 16])}  # fmt: skip


def problem_of(seed: int) -> Problem:
    """A random problem of FlexGen's shape; some with crosstalk, some without overlap, some with fractions closed."""
    rng = random.Random(seed)
    problem = flexgen(machine_of(rng), shape_of(rng), delegate=rng.random() < 0.5)
    lanes = list(problem.phases[0].lanes)
    if rng.random() < 0.5:
        crosstalk = {a: {b: rng.random() for b in lanes if b != a and rng.random() < 0.5} for a in lanes}
        problem = replace(problem, crosstalk=crosstalk)
    if rng.random() < 0.3:
        problem = replace(problem, allowed=ALL - {rng.choice(FRACTIONS), HD})
    return replace(problem, overlap=rng.random() < 0.7)


def value_at(line: Affine, points: np.ndarray) -> np.ndarray:
    """[points]"""
    total = np.full(len(points), float(line.constant))
    for name, k in line.coefficients.items():
        total += k * points[:, FRACTIONS.index(name)]
    return total


def phase_at(phase: Phase, problem: Problem, points: np.ndarray) -> np.ndarray:
    """[points] seconds of one sweep"""
    busy = {lane: value_at(line, points) for lane, line in phase.lanes.items()}
    if not problem.overlap:
        return np.sum(list(busy.values()), axis=0)
    slowed = [own + sum(problem.crosstalk.get(lane, {}).get(o, 0) * busy[o] for o in busy if o != lane)
              for lane, own in busy.items()]  # fmt: skip
    return np.max(slowed, axis=0)


def seconds_at(problem: Problem, points: np.ndarray) -> np.ndarray:
    return np.sum([phase.times * phase_at(phase, problem, points) for phase in problem.phases], axis=0)


def excess_at(problem: Problem, points: np.ndarray) -> np.ndarray:
    """[memories, points] bytes too many relative to the capacity; below 0 where there is room."""
    return np.array([value_at(m.used, points) / m.capacity - 1 for m in problem.memories])


def fits_at(problem: Problem, points: np.ndarray) -> np.ndarray:
    closed = [i for i, name in enumerate(FRACTIONS) if name not in problem.allowed]
    return (excess_at(problem, points) <= 0).all(axis=0) & (points[:, closed] == 0).all(axis=1)


def as_point(fractions: Mapping[str, float]) -> np.ndarray:
    return np.array([[fractions[name] for name in FRACTIONS]])


def best(problem: Problem) -> Solution:
    found = solve(problem)
    assert found is not None
    return found


def check_feasible(problem: Problem, solution: Solution) -> None:
    point = as_point(solution.fractions)
    assert set(solution.fractions) == ALL
    assert (point >= 0).all()
    assert point.reshape(3, 3).sum(axis=1) == pytest.approx(1)
    assert all(solution.fractions[name] == 0 for name in ALL - problem.allowed)
    assert excess_at(problem, point).max() <= ROUNDING
    assert solution.seconds == pytest.approx(seconds_at(problem, point)[0])


def toy(lanes: Mapping[str, Affine], **changes: object) -> Problem:
    """One sweep, three tiers of 100 bytes each for 60 bytes of weights, 60 of cache and 30 of hidden states."""
    sizes = {"weights": 60.0, "cache": 60.0, "hidden": 30.0}
    memories = tuple(
        MemoryLimit(label, Affine(0.0, {f"{kind}@{label}": size for kind, size in sizes.items()}), 100.0)
        for label in ("device", "host", "disk")
    )
    problem = Problem((Phase("sweep", 1, lanes, 1),), memories, {}, True, ALL)
    return replace(problem, **changes)  # type: ignore[arg-type]


LANES = {"h2d": Affine(1.0, {WC: 2.0, CC: 4.0}), "device": Affine(3.0), "d2h": Affine(0.5, {CC: 1.0})}
ON_HOST = frozenset({WC, CC, HG})


def roomy(problem: Problem, capacity: float = math.inf) -> Problem:
    return replace(problem, memories=tuple(replace(m, capacity=capacity) for m in problem.memories))
