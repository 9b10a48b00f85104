"""plan.lp against a grid of all placements, FlexGen's formulas written out, and random steps."""

import ctypes
import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest

from flexengine.errors import InvalidInput
from flexengine.plan.lp import SHARES, NoSolver, Solution, SolverFailed, optimum, program, save, solve
from flexengine.plan.problem import FRACTIONS, Linear, Memory, Phase, Problem

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
            "device": Linear(deep * (product + quadratic), {k: deep * v for k, v in attention.items() if v}),
        }
    peak, block = 4 * (s + n) * h1 * bls * deep, 2 * s * h1 * bls

    def home(place: str) -> dict[str, float]:
        return {f"weights@{place}": weights * deep, f"cache@{place}": peak, f"hidden@{place}": block}

    def work(buffer: float, cached: float) -> Linear:
        """Home on the device, two slots of streamed weights and of a batch's hidden states, and a buffer."""
        held = home("device") | {CG: peak + cached}
        held[WG] -= 2 * weights
        held[HG] -= 2 * s * h1 * gbs
        return Linear(2 * weights + 2 * s * h1 * gbs + buffer, held)

    score = gbs * (4 * s * h1 + 2 * nh * s * s)
    peaks = [(8 * gbs * s * h1, 0), (score, 0), (2 * gbs * s * (h1 + h2), 0), (0, gbs * 2 * (s + n) * h1)]
    memories = [Memory("device", work(*p), machine["device"]) for p in peaks]
    staging = Linear(weights, {WG: -weights, **home("host")}) if delegate else Linear(0.0, home("host"))
    memories += [Memory("host", staging, machine["host"]), Memory("disk", Linear(0.0, home("disk")), machine["disk"])]
    phases = (Phase("prefill", 1, busy["prefill"], 1), Phase("decode", n - 1, busy["decode"], n - 1))
    return Problem(phases, tuple(memories), {}, True, ALL)


def scaled(nbytes: Mapping[str, float], seconds: float) -> Linear:
    return Linear(0.0, {name: n * seconds for name, n in nbytes.items() if n})


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


def value_at(line: Linear, points: np.ndarray) -> np.ndarray:
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
    for phase in problem.phases:
        assert solution.phase_seconds[phase.label] == pytest.approx(phase_at(phase, problem, point)[0])


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


def toy(lanes: Mapping[str, Linear], **changes: object) -> Problem:
    """One sweep, three tiers of 100 bytes each for 60 bytes of weights, 60 of cache and 30 of hidden states."""
    sizes = {"weights": 60.0, "cache": 60.0, "hidden": 30.0}
    memories = tuple(
        Memory(label, Linear(0.0, {f"{kind}@{label}": size for kind, size in sizes.items()}), 100.0)
        for label in ("device", "host", "disk")
    )
    problem = Problem((Phase("sweep", 1, lanes, 1),), memories, {}, True, ALL)
    return replace(problem, **changes)  # type: ignore[arg-type]


LANES = {"h2d": Linear(1.0, {WC: 2.0, CC: 4.0}), "device": Linear(3.0), "d2h": Linear(0.5, {CC: 1.0})}
ON_HOST = frozenset({WC, CC, HG})


def roomy(problem: Problem, capacity: float = math.inf) -> Problem:
    return replace(problem, memories=tuple(replace(m, capacity=capacity) for m in problem.memories))


def test_lanes_side_by_side_take_as_long_as_the_slowest() -> None:
    solution = best(roomy(toy(LANES, allowed=ON_HOST)))
    assert solution.seconds == pytest.approx(7)
    assert solution.phase_seconds == {"sweep": pytest.approx(7)}


def test_lanes_without_overlap_add_up_whatever_their_crosstalk() -> None:
    solution = best(roomy(toy(LANES, allowed=ON_HOST, overlap=False, crosstalk={"h2d": {"device": 0.5}})))
    assert solution.seconds == pytest.approx(7 + 3 + 1.5)


def test_crosstalk_slows_a_lane_by_a_share_of_the_others() -> None:
    crosstalk = {"h2d": {"device": 0.5, "d2h": 0.2, "h2d": 9.0, "absent": 9.0}, "device": {"h2d": 1.0}}
    solution = best(roomy(toy(LANES, allowed=ON_HOST, crosstalk=crosstalk)))
    assert solution.seconds == pytest.approx(max(7 + 0.5 * 3 + 0.2 * 1.5, 3 + 7))


def test_the_scarce_device_goes_to_what_saves_most_per_byte() -> None:
    """110 bytes of host traffic to save: 60 of cache at 4 s, then 40 of the 60 of weights at 2 s."""
    solution = best(toy({"h2d": Linear(1.0, {WC: 2.0, WD: 2.0, CC: 4.0, CD: 4.0})}))
    assert solution.seconds == pytest.approx(1 + 2 * 20 / 60)
    assert solution.fractions[CG] == pytest.approx(1)
    assert solution.fractions[WG] == pytest.approx(40 / 60)


def test_times_weigh_phases_and_repeated_labels_are_told_apart() -> None:
    phases = tuple(
        Phase("decode", times, {"device": Linear(seconds)}) for times, seconds in ((3, 5.0), (0, 7.0), (2, 1.0))
    )
    solution = best(toy({}, phases=(*phases, Phase("idle", 4, {}))))
    assert solution.seconds == pytest.approx(3 * 5 + 2 * 1)
    assert solution.phase_seconds == pytest.approx({"decode": 5, "decode 2": 7, "decode 3": 1, "idle": 0})


@pytest.mark.parametrize("seconds", [1e-6, 1.0, 1e5])
def test_ties_prefer_the_device_then_the_host(seconds: float) -> None:
    """Time that the placement does not change; room for all in the device, then for a third of it, then for none."""
    lanes = {"device": Linear(seconds), "h2d": Linear(seconds / 2, {WC: seconds / 4, WD: seconds / 4})}
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
    """Names change places, too, as columns are in the order of the names."""
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
        shares = [share for share in SHARES.values() if share in names]
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


# Latency


def two_sided() -> Problem:
    """Prefill, of which the job has much, likes the weights on the device; a row's many decode sweeps the cache."""
    lanes = [{"h2d": Linear(1.0, {WC: 2.0})}, {"h2d": Linear(1.0, {CC: 2.0})}]
    phases = (Phase("prefill", 10, lanes[0], 1), Phase("decode", 4, lanes[1], 4))
    memories = (Memory("device", Linear(0.0, {WG: 60.0, CG: 60.0}), 60.0),)
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


# What is given, and what is printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allowed": ALL - {CG, CC, CD}}, r"no place for the cache.*cache@device, cache@host, cache@disk"),
        ({"allowed": ALL | {"xg"}}, r"allowed names \['xg'\]"),
        ({"latency_limit": 0.0}, r"latency limit is 0\.0; it must be positive"),
        ({"latency_limit": math.nan}, "latency limit is nan"),
        ({"phases": (Phase("decode", -1, {}),)}, r"decode: times is -1"),
        ({"phases": (Phase("decode", 1, {}, math.inf),)}, r"decode: life is inf"),
        ({"phases": (Phase("decode", 1, {"h2d": Linear(math.nan)}),)}, r"decode: h2d is .*finite"),
        ({"phases": (Phase("decode", 1, {"h2d": Linear(0.0, {"wx": 1.0})}),)}, r"depends on \['wx'\]"),
        ({"memories": (Memory("disk", Linear(0.0, {WD: math.inf}), 1.0),)}, r"disk memory is .*finite"),
        ({"memories": (Memory("disk", Linear(0.0), math.nan),)}, r"disk memory: capacity is nan"),
    ],
)
def test_what_is_no_number_or_no_fraction_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        best(toy(LANES, **changes))


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
    phases = (Phase("prefill", 3, {"h2d": Linear(1.0, {WC: 2.0, CG: -0.5})}, 1), Phase("decode", 7, LANES, 7))
    save(toy({}, phases=phases, latency_limit=50.0, allowed=ALL - {HD}), str(tmp_path / "a.lp"))
    text = " ".join((tmp_path / "a.lp").read_text().split())  # long rows are wrapped
    for row in (
        "all_hidden_states_share: hidden_states_on_device_share + hidden_states_on_host_share = 1",
        "prefill_h2d_s: - 0.5 cache_on_device_share - prefill_sweep_s + 2 weights_on_host_share <= -1",
        "decode_d2h_s: cache_on_host_share - decode_sweep_s <= -0.5",
        "host_memory_B: 60 cache_on_host_share + 30 hidden_states_on_host_share + 60 weights_on_host_share"
        " <= 100",
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
    for name, share in SHARES.items():
        assert columns.get(share, 0.0) == pytest.approx(solution.fractions[name], abs=1e-4)


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
    lives = sum(p.life * solution.phase_seconds[p.label] for p in problem.phases)
    assert solution.latency == pytest.approx(lives)


def test_least_of_a_line() -> None:
    line = Linear(2.0, {WG: 3.0, WC: 1.0, CG: 4.0, CC: -1.0})
    assert line.least(ALL) == 2.0 + 0.0 - 1.0  # all weights on disk, all cache on the host
    assert line.least(frozenset({WG, WC, CG, HG})) == 2.0 + 1.0 + 4.0


def test_linear_is_linear() -> None:
    rng = random.Random(0)
    point = {name: rng.random() for name in FRACTIONS}
    a, b = Linear(2.0, {WG: 3.0, CC: -1.0}), Linear(0.5, {CC: 4.0, HD: 1.0})
    assert a.value(point) == pytest.approx(2 + 3 * point[WG] - point[CC])
    assert (a + b * 2.0).value(point) == pytest.approx(a.value(point) + 2 * b.value(point))
    assert (0.5 * a).value({}) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phases": (Phase("decode", 1, {"h2d": Linear(1.7e308), "d2h": Linear(1.7e308)}),), "overlap": False},
         "limit of row decode_all_lanes_ks is -inf"),
        ({"phases": (Phase("decode", 1.7e308, {"h2d": Linear(1e300)}),)}, "cost of decode_sweep_ks is inf"),
        ({"phases": (Phase("decode", 1, {n: Linear(1.0, {WD: 1.7e308}) for n in ("h2d", "d2h")}),), "overlap": False},
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
