"""plan.lp against a grid of all placements, FlexGen's formulas written out, and random steps."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pulp
import pytest

from flexengine.plan.lp import optimum, program, share_name, solve
from flexengine.plan.problem import Affine, Phase
from flexengine.plan.terms import fractions
from tests.helpers.programs import (
    ALL,
    CC,
    CD,
    CG,
    GRID,
    HD,
    HG,
    LANES,
    ON_HOST,
    ROUNDING,
    WC,
    WD,
    WG,
    as_point,
    best,
    check_feasible,
    fits_at,
    flexgen,
    machine_of,
    phase_at,
    problem_of,
    roomy,
    seconds_at,
    shape_of,
    toy,
    value_at,
)


@pytest.mark.parametrize("seed", range(24))
def test_no_placement_on_a_grid_is_better(seed: int) -> None:
    problem = problem_of(seed)
    fits = fits_at(problem, GRID)
    solution = solve(problem)
    if solution is None:
        assert not fits.any()
        return
    check_feasible(problem, solution)
    if fits.any():
        assert solution.seconds <= seconds_at(problem, GRID[fits]).min() * (1 + ROUNDING)


@pytest.mark.parametrize("seed", range(24, 40))
def test_no_small_step_from_the_solution_is_better(seed: int) -> None:
    """The seconds are convex in the fractions: what no neighbour betters is the best."""
    problem = problem_of(seed)
    if (solution := solve(problem)) is None:
        return
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(100_000, 3, 3)) * (rng.random((100_000, 3, 3)) < 0.5)
    steps = (steps - steps.mean(axis=2, keepdims=True)) * 10 ** rng.uniform(-6, -1, size=(100_000, 1, 1))
    points = as_point(solution.fractions) + steps.reshape(-1, 9)
    points = points[(points >= 0).all(axis=1)]
    points = points[fits_at(problem, points)]
    if len(points):
        assert solution.seconds <= seconds_at(problem, points).min() * (1 + ROUNDING)


def test_random_problems_are_of_every_sort() -> None:
    """The tests above see solved and unsolvable ones, and placements in the middle as well as in the corners."""
    solutions = [solve(problem_of(seed)) for seed in range(40)]
    inner = [s for s in solutions if s and any(0.001 < f < 0.999 for f in s.fractions.values())]
    assert len(inner) >= 10
    assert solutions.count(None) >= 4


@pytest.mark.parametrize("seed", range(8))
def test_more_of_anything_is_never_slower(seed: int) -> None:
    rng = random.Random(seed)
    machine, shape, delegate = machine_of(rng), shape_of(rng), rng.random() < 0.5
    before = solve(flexgen(machine, shape, delegate))
    for name in machine:
        after = solve(flexgen(machine | {name: machine[name] * rng.uniform(1, 3)}, shape, delegate))
        if before is not None:
            assert after is not None, name
            assert after.seconds <= before.seconds * (1 + ROUNDING), name


def test_lanes_side_by_side_take_as_long_as_the_slowest() -> None:
    solution = best(roomy(toy(LANES, allowed=ON_HOST)))
    assert solution.seconds == pytest.approx(7)


def test_lanes_without_overlap_add_up_whatever_their_crosstalk() -> None:
    solution = best(roomy(toy(LANES, allowed=ON_HOST, overlap=False, crosstalk={"h2d": {"device": 0.5}})))
    assert solution.seconds == pytest.approx(7 + 3 + 1.5)


def test_crosstalk_slows_a_lane_by_a_share_of_the_others() -> None:
    crosstalk = {"h2d": {"device": 0.5, "d2h": 0.2, "h2d": 9.0, "absent": 9.0}, "device": {"h2d": 1.0}}
    solution = best(roomy(toy(LANES, allowed=ON_HOST, crosstalk=crosstalk)))
    assert solution.seconds == pytest.approx(max(7 + 0.5 * 3 + 0.2 * 1.5, 3 + 7))


def test_the_scarce_device_goes_to_what_saves_most_per_byte() -> None:
    """110 bytes of host traffic to save: 60 of cache at 4 s, then 40 of the 60 of weights at 2 s."""
    solution = best(toy({"h2d": Affine(1.0, {WC: 2.0, WD: 2.0, CC: 4.0, CD: 4.0})}))
    assert solution.seconds == pytest.approx(1 + 2 * 20 / 60)
    assert solution.fractions[CG] == pytest.approx(1)
    assert solution.fractions[WG] == pytest.approx(40 / 60)


def test_times_weigh_phases() -> None:
    cases = ((3, 5.0), (0, 7.0), (2, 1.0))
    phases = (Phase(f"decode {i}", times, {"device": Affine(s)}) for i, (times, s) in enumerate(cases))
    solution = best(toy({}, phases=(*phases, Phase("idle", 4, {}))))
    assert solution.seconds == pytest.approx(3 * 5 + 2 * 1)


@pytest.mark.parametrize("seconds", [1e-6, 1.0, 1e5])
def test_ties_prefer_the_device_then_the_host(seconds: float) -> None:
    """Time that the placement does not change; room for all in the device, then for a third of it, then for none."""
    lanes = {"device": Affine(seconds), "h2d": Affine(seconds / 2, {WC: seconds / 4, WD: seconds / 4})}
    first = best(roomy(toy(lanes)))
    assert {name for name, share in first.fractions.items() if share == 1} == {WG, CG, HG}
    tight = toy(lanes)
    tight = replace(tight, memories=(replace(tight.memories[0], capacity=50.0), *tight.memories[1:]))
    fractions = best(tight).fractions
    assert fractions[WD] + fractions[CD] + fractions[HD] == pytest.approx(0, abs=1e-6)
    assert 60 * fractions[WG] + 60 * fractions[CG] + 30 * fractions[HG] == pytest.approx(50, rel=1e-6)
    assert best(roomy(toy(lanes, allowed=ALL - {WG, CG, HG}))).fractions[WC] == 1


def test_the_same_problem_has_the_same_answer() -> None:
    problem = problem_of(3)
    assert best(problem) == best(problem)


@pytest.mark.parametrize("seed", range(40, 52))
def test_which_of_equal_optima_is_found_depends_on_no_order(seed: int) -> None:
    """The names are exchanged, too, as columns are in the order of the names."""
    made, rng = program(problem_of(seed)), random.Random(seed)
    names = [variable.name for variable in made.variables()]
    other = dict(zip(names, rng.sample(names, len(names)), strict=True))
    mixed, rows = pulp.LpProblem("mixed"), made.constraints()
    variables = {name: mixed.add_variable(other[name], 0) for name in names}

    def renamed(terms: Any) -> pulp.LpAffineExpression:
        return pulp.LpAffineExpression([(variables[variable.name], k) for variable, k in terms.items()])

    for row in rng.sample(rows, len(rows)):
        mixed.addConstraint(pulp.LpConstraint(renamed(row), row.sense, row.name, -row.constant))
    mixed.setObjective(renamed(made.objective))
    before, after = optimum(made), optimum(mixed)
    assert (before is None) == (after is None)
    if before and after:
        shares = [share for share in map(share_name, fractions()) if share in names]
        assert [after[other[share]] for share in shares] == pytest.approx([before[s] for s in shares], abs=1e-4)


# What cannot be solved
@pytest.mark.parametrize("capacity", [0.0, -5.0, 1.0])
def test_a_memory_with_no_room_takes_nothing(capacity: float) -> None:
    problem = roomy(toy(LANES))
    device, host, disk = problem.memories
    full = replace(problem, memories=(replace(device, capacity=capacity), host, disk))
    if capacity < 0:
        assert solve(full) is None
    else:
        fractions = best(full).fractions
        assert 60 * fractions[WG] + 60 * fractions[CG] + 30 * fractions[HG] <= capacity + 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_least_bytes_of_one_memory_are_those_of_the_grid(seed: int) -> None:
    """One linear function is least in a corner, and the grid has all corners."""
    problem = problem_of(seed)
    problem = replace(problem, allowed=ALL - {WD, CD, HD})
    memory = problem.memories[seed % 4]
    free = (GRID[:, [2, 5, 8]] == 0).all(axis=1)
    least = value_at(memory.used, GRID[free]).min()
    assert solve(replace(problem, memories=(replace(memory, capacity=least * 0.9999),))) is None
    check_feasible(enough := replace(problem, memories=(replace(memory, capacity=least * 1.0001),)), best(enough))


@pytest.mark.parametrize("seed", range(8))
def test_bounds_without_solving_are_below_the_optimum(seed: int) -> None:
    """Of the job's seconds and of a row's; and a problem whose memories all hold the least may be solved."""
    problem = problem_of(seed)
    fits = all(memory.used.least(problem.allowed) <= memory.capacity for memory in problem.memories)
    if (solution := solve(problem)) is None:
        return
    seconds, latency = problem.least()
    assert fits
    assert seconds <= solution.seconds * (1 + ROUNDING)
    assert latency <= solution.latency * (1 + ROUNDING)
    point = as_point(solution.fractions)
    lives = sum(p.life * phase_at(p, problem, point)[0] for p in problem.phases)
    assert solution.latency == pytest.approx(lives)


def test_least_of_a_line() -> None:
    line = Affine(2.0, {WG: 3.0, WC: 1.0, CG: 4.0, CC: -1.0})
    assert line.least(ALL) == 2.0 + 0.0 - 1.0  # all weights on disk, all cache on the host
    assert line.least(frozenset({WG, WC, CG, HG})) == 2.0 + 1.0 + 4.0
