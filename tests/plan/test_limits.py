"""plan.lp: limits of latency, what is refused, and the program that is saved."""

import ctypes
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pulp
import pytest

from flexengine.plan.lp import NoSolver, SolverFailed, optimum, save, share_name, solve
from flexengine.plan.problem import Affine, MemoryLimit, Phase, Problem
from flexengine.plan.terms import fractions
from tests.helpers.programs import (
    ALL,
    CC,
    CG,
    GRID,
    HD,
    HG,
    LANES,
    ROUNDING,
    WC,
    WD,
    WG,
    as_point,
    best,
    fits_at,
    phase_at,
    problem_of,
    roomy,
    seconds_at,
    toy,
)


# Latency
def two_sided() -> Problem:
    """Prefill, of which the job has much, likes the weights on the device; a row's many decode sweeps the cache."""
    lanes = [{"h2d": Affine(1.0, {WC: 2.0})}, {"h2d": Affine(1.0, {CC: 2.0})}]
    phases = (Phase("prefill", 10, lanes[0], 1), Phase("decode", 4, lanes[1], 4))
    memories = (MemoryLimit("device", Affine(0.0, {WG: 60.0, CG: 60.0}), 60.0),)
    return Problem(phases, memories, {}, True, frozenset({WG, WC, CG, CC, HG}))


def test_without_a_limit_the_job_decides() -> None:
    """WG = x, CG = 1 - x: the job takes 10 (3 - 2x) + 4 (1 + 2x), a row (3 - 2x) + 4 (1 + 2x)."""
    solution = best(two_sided())
    assert solution.fractions[WG] == pytest.approx(1)
    assert solution.seconds == pytest.approx(10 + 12)


def test_a_latency_limit_binds() -> None:
    """7 + 6x <= 10 holds up to x = 1/2."""
    solution = best(replace(two_sided(), latency_limit=10.0))
    assert solution.fractions[WG] == pytest.approx(0.5)
    assert solution.seconds == pytest.approx(10 * 2 + 4 * 2)


def test_an_impossible_limit_has_no_solution() -> None:
    """A row takes 7 s at least."""
    assert solve(replace(two_sided(), latency_limit=6.999)) is None
    assert best(replace(two_sided(), latency_limit=7.001)).fractions[WG] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_limits_of_random_problems_bind_and_cost(seed: int) -> None:
    """Against the grid: none within the limit is better."""
    problem = problem_of((1, 3, 5, 9)[seed])
    free = solve(problem)
    if free is None:
        return
    lives = tuple(replace(p, life=p.times * (40 if p.label == "prefill" else 1)) for p in problem.phases)
    problem = replace(problem, phases=lives)
    inside = GRID[fits_at(problem, GRID)]
    latency = np.sum([p.life * phase_at(p, problem, inside) for p in problem.phases], axis=0)
    limit = float(np.quantile(latency, 0.05)) if len(inside) else 1e9
    solution = best(replace(problem, latency_limit=limit))
    point = as_point(solution.fractions)
    assert sum(p.life * phase_at(p, problem, point)[0] for p in problem.phases) <= limit * (1 + ROUNDING)
    assert solution.seconds >= free.seconds * (1 - ROUNDING)
    if len(inside):
        assert solution.seconds <= seconds_at(problem, inside[latency <= limit]).min() * (1 + ROUNDING)


# What is printed
def test_without_the_solver_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda solver: False)
    with pytest.raises(NoSolver, match="needs highspy, which is not installed; pip install highspy"):
        best(toy(LANES))


def test_solving_is_quiet_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows go to stdout; a library's lines would stand among them."""
    monkeypatch.chdir(tmp_path)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path))
    best(toy(LANES))
    assert solve(roomy(toy(LANES), 10.0)) is None
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_the_saved_program_has_every_name_and_unit(tmp_path: Path) -> None:
    phases = (Phase("prefill", 3, {"h2d": Affine(1.0, {WC: 2.0, CG: -0.5})}, 1), Phase("decode", 7, LANES, 7))
    save(toy({}, phases=phases, latency_limit=50.0, allowed=ALL - {HD}), str(tmp_path / "a.lp"))
    text = " ".join((tmp_path / "a.lp").read_text().split())  # long rows are wrapped
    for row in (
        "all_hidden_states_share: hidden_states_on_device_share + hidden_states_on_host_share = 1",
        "prefill_h2d_s: - 0.5 cache_on_device_share - prefill_sweep_s + 2 weights_on_host_share <= -1",
        "decode_d2h_s: cache_on_host_share - decode_sweep_s <= -0.5",
        "host_memory_B: 60 cache_on_host_share + 30 hidden_states_on_host_share + 60 weights_on_host_share <= 100",
        "latency_of_a_row_s: 7 decode_sweep_s + prefill_sweep_s <= 50",
    ):
        assert f" {row} " in text
    assert "hidden_states_on_disk" not in text


@pytest.mark.parametrize("seed", range(8))
def test_whoever_reads_the_saved_program_finds_the_same(tmp_path: Path, seed: int) -> None:
    """HiGHS itself reads the file: the same shares, and the job's seconds in the unit that the objective names."""
    highspy = pytest.importorskip("highspy")
    problem = problem_of(seed)
    save(problem, str(tmp_path / "a.lp"))
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(tmp_path / "a.lp")) != highspy.HighsStatus.kError
    highs.run()
    if (solution := solve(problem)) is None:
        assert highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        return
    unit = re.search(r"^job_(\w+):", (tmp_path / "a.lp").read_text(), re.MULTILINE)
    assert unit
    scale = {"ks": 1e3, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit[1]]
    assert highs.getObjectiveValue() * scale == pytest.approx(solution.seconds, rel=1e-5)
    columns = dict(zip(highs.getLp().col_names_, highs.getSolution().col_value, strict=True))
    for name, share in ((name, share_name(name)) for name in fractions()):
        assert columns.get(share, 0.0) == pytest.approx(solution.fractions[name], abs=1e-4)


def test_linear_is_linear() -> None:
    rng = random.Random(0)
    point = {name: rng.random() for name in fractions()}
    a, b = Affine(2.0, {WG: 3.0, CC: -1.0}), Affine(0.5, {CC: 4.0, HD: 1.0})
    assert a.value(point) == pytest.approx(2 + 3 * point[WG] - point[CC])
    assert (a + b * 2.0).value(point) == pytest.approx(a.value(point) + 2 * b.value(point))
    assert (0.5 * a).value({}) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"latency_limit": math.nan}, "limit of row latency_of_a_row_ns is nan"),
        ({"phases": (Phase("decode", 1, {"h2d": Affine(math.nan)}),)}, "row decode_h2d_.* is nan"),
        ({"memories": (MemoryLimit("disk", Affine(0.0, {WD: math.inf}), 1.0),)}, "share in row disk_memory"),
        ({"phases": (Phase("decode", 1, {"h2d": Affine(1.7e308), "d2h": Affine(1.7e308)}),), "overlap": False},
         "limit of row decode_all_lanes_ks is -inf"),
        ({"phases": (Phase("decode", 1.7e308, {"h2d": Affine(1e300)}),)}, "cost of decode_sweep_ks is inf"),
        ({"phases": (Phase("decode", 1, {n: Affine(1.0, {WD: 1.7e308}) for n in ("h2d", "d2h")}),), "overlap": False},
         "coefficient of weights_on_disk_share in row decode_all_lanes_ks is inf"),
    ],
)  # fmt: skip
def test_numbers_that_become_none_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SolverFailed, match=said):
        solve(toy({}, **changes))


def test_statuses_of_the_solver() -> None:
    """Infeasible is an answer; anything else but an optimum is a failure with its status."""
    contradiction, endless = pulp.LpProblem("contradiction"), pulp.LpProblem("endless")
    x, y = contradiction.add_variable("x", 0), contradiction.add_variable("y", 0)
    contradiction += x
    contradiction += x + y <= -1
    assert optimum(contradiction) is None
    endless += -x
    endless += x - y <= 1
    with pytest.raises(SolverFailed, match="stopped with status Unbounded"):
        optimum(endless)
