"""The fastest placement for one block shape: a linear program over the fraction of each kind of data on each tier.

FlexGen's program (Sheng et al. 2023, section 4.3 and appendix A.3), with coefficients of the caller's cost model:

    minimise    sum over phases p of times[p] * T[p]                                            seconds of the job
    subject to  T[p] >= busy[p][lane] + sum over others o of crosstalk[lane][o] * busy[p][o]    one row per p, lane
                T[p] >= sum over lanes of busy[p][lane]                                         or this, if no overlap
                used[m] <= capacity[m]                                                          one row per memory m
                weights@device + weights@host + weights@disk + ... = 1, cache and hidden likewise, all >= 0
                sum over phases p of life[p] * T[p] <= latency limit                             if there is one

busy and used are linear in the fractions. PuLP represents the program, HiGHS solves it. The name of every variable and
row ends in its unit. Units are chosen so that numbers are near 1, as HiGHS compares with absolute tolerances.

Another program chooses bits per layer: the formats of least harm whose bytes fit a budget. It is LLM-PQ's adabits
(arXiv 2403.01136, section 4.3), for one place that holds all layers:

    minimise    sum over layers i, formats b of harm[i, b] * z[i, b]
    subject to  sum over i, b of bytes[i, b] * z[i, b] <= budget
                sum over b of z[i, b] = 1                           one row per layer
                z[i, b] in {0, 1}
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import pulp

from flexengine.errors import FlexError
from flexengine.plan.problem import Affine, Problem
from flexengine.plan.terms import CACHE, HIDDEN, KINDS, WEIGHTS, fractions, kind_of

Terms = list[tuple[pulp.LpVariable, float]]
Format = str | None  # None: the checkpoint's own numbers
# Extra cost of a kind of data per place away from the device. It decides between placements of equal seconds.
_TIES = {WEIGHTS: 1.0, CACHE: 1.1, HIDDEN: 1.23}
_TIE = 1e-9  # unit of _TIES, relative to the job's seconds
_COST = 1e4  # smallest job cost, in its unit; ties are then larger than the solver's tolerance of 1e-7
_SPREAD = 1e-4  # smallest capacity to choose a memory's unit by, relative to the largest coefficient
_HARM = 1e3  # largest harm in the program of bits; harms of 8 bits are a thousandth of those of 3 bits
_NOISE = 1e-9  # smaller fractions count as 0
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]")
_SECONDS = {"ks": 1e3, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


class NoSolver(FlexError):
    """The solver is not installed."""


class SolverFailed(FlexError):
    """The solver found no optimum, although the program may be feasible."""


@dataclass(frozen=True)
class Solution:
    """The optimum."""

    fractions: dict[str, float]  # fraction of every kind on every place; each kind sums to 1
    seconds: float  # seconds of the job
    latency: float  # seconds of an average row


def solve(problem: Problem) -> Solution | None:
    """Return the fastest placement; of equal ones, the one with most on the device, then on the host.

    Return None if no placement fits into the memories and keeps the latency limit.

    Raises:
        NoSolver: as `optimum`.
        SolverFailed: as `optimum`, or a number is not finite in its unit.
    """
    values = optimum(program(problem))
    if values is None:
        return None
    solved = {name: values.get(share_name(name), 0.0) for name in fractions(problem.places)}
    clean = {name: value if value > _NOISE else 0.0 for name, value in solved.items()}
    totals = {kind: sum(value for name, value in clean.items() if kind_of(name) == kind) for kind in KINDS}
    shares = {name: value / totals[kind_of(name)] for name, value in clean.items()}
    seconds = [max((0.0, *(bound.value(shares) for _, bound in bounds))) for bounds in problem.bounds]
    return Solution(shares, *problem.over(seconds))


@lru_cache
def share_name(name: str) -> str:
    """Return the name of a fraction's variable."""
    kind, _, place = name.partition("@")
    return f"{KINDS[kind]} on {place} share".replace(" ", "_")


def save(problem: Problem, path: str) -> None:
    """Write the program to a file in CPLEX's LP format, which most solvers read. Raise OSError if the file cannot
    be written."""
    program(problem).writeLP(path, max_length=255)


def program(problem: Problem) -> pulp.LpProblem:
    """Return the program of a problem. Raise SolverFailed if a number is not finite in its unit."""
    lp, places = pulp.LpProblem("placement"), problem.places
    shares = {name: lp.add_variable(share_name(name), 0) for name in fractions(places) if name in problem.allowed}

    def terms(line: Affine, scale: float = 1.0) -> Terms:
        """Return the line's terms with allowed fractions; the others are 0."""
        return [(shares[name], k / scale) for name, k in line.coefficients.items() if name in shares]

    for kind, what in KINDS.items():
        placed = [(share, 1.0) for name, share in shares.items() if kind_of(name) == kind]
        _add(lp, f"all {what} share", placed, 1.0, equal=True)
    times = []  # by phase: the time of one sweep, and the seconds of its unit
    for phase, bounds in zip(problem.phases, problem.bounds, strict=True):
        numbers = (abs(k) for _, bound in bounds for k in (bound.constant, *(k for _, k in terms(bound))))
        unit, scale = _unit(_SECONDS, max(numbers, default=0.0))
        times.append((lp.add_variable(_named(f"{phase.label} sweep {unit}"), 0), scale))
        for lane, bound in bounds:
            row = [*terms(bound, scale), (times[-1][0], -1.0)]
            _add(lp, f"{phase.label} {lane} {unit}", row, -bound.constant / scale)
    for memory in problem.memories:
        if memory.capacity < math.inf:
            largest = max((abs(k) for _, k in terms(memory.used)), default=0.0)
            unit, scale = _unit(_BYTES, max(memory.capacity, _SPREAD * largest))
            limit = (memory.capacity - memory.used.constant) / scale
            _add(lp, f"{memory.label} memory {unit}", terms(memory.used, scale), limit)
    if problem.latency_limit is not None:
        unit, scale = _unit(_SECONDS, problem.latency_limit)
        lives = [(time, phase.life * s / scale) for (time, s), phase in zip(times, problem.phases, strict=True)]
        _add(lp, f"latency of a row {unit}", lives, problem.latency_limit / scale)
    seconds = [(time, phase.times * s) for (time, s), phase in zip(times, problem.phases, strict=True)]
    ranks = [(share, places.index(name.partition("@")[2]) * _TIES[kind_of(name)]) for name, share in shares.items()]
    total = sum(k for _, k in seconds)
    unit, scale = _unit(_SECONDS, total / _COST)
    for time, k in seconds:
        _check_finite(k / scale, f"cost of {time.name}")
    tie = _TIE * (total / scale or _COST)
    ties = [(share, tie * rank) for share, rank in ranks if rank]
    lp.setObjective(pulp.LpAffineExpression([*((time, k / scale) for time, k in seconds), *ties]))
    lp.objective.name = _named(f"job {unit}")
    return lp


def _add(lp: pulp.LpProblem, label: str, terms: Terms, limit: float, equal: bool = False) -> None:
    """Add the row: sum of terms <= limit, or == limit if `equal`. label: its last word is the limit's unit."""
    name = _named(label)
    for variable, k in terms:
        _check_finite(k, f"coefficient of {variable.name} in row {name}")
    _check_finite(limit, f"limit of row {name}")
    sense = pulp.LpConstraintEQ if equal else pulp.LpConstraintLE
    lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, limit))


def optimum(lp: pulp.LpProblem, presolve: bool = False) -> dict[str, float] | None:
    """Return the optimal values by name of the variable, or None if the program is infeasible.

    Args:
        presolve: simplify the program first. For a small linear program, this takes longer than solving it. With whole
            numbers, HiGHS may find no optimum without it.

    Raises:
        NoSolver: highspy is not installed.
        SolverFailed: the program is unbounded, or HiGHS stopped for another reason, such as a numerical error. The
            message has the status.
    """
    status = run_highs(lp, pulp.HiGHS(msg=False, presolve="on" if presolve else "off"))
    if status == "Infeasible":
        return None
    if status != "Optimal":
        raise SolverFailed(f"HiGHS found no optimum of the program '{lp.name}', and stopped with status {status}")
    return {variable.name: variable.varValue for variable in lp.variables()}


def run_highs(lp: pulp.LpProblem, solver: pulp.HiGHS) -> str:
    """Solve a program, and return HiGHS's status. Raise NoSolver if highspy is not installed."""
    if not solver.available():
        raise NoSolver("the planner needs highspy, which is not installed; pip install highspy")
    lp.solve(solver)
    return str(lp.solverModel.modelStatusToString(lp.solverModel.getModelStatus()))


def _named(label: str) -> str:
    return _NOT_IN_NAMES.sub("_", label)


def _unit(units: Mapping[str, float], size: float) -> tuple[str, float]:
    """Return the largest unit up to `size`, or the smallest unit, and its seconds or bytes. units: descending."""
    return next(((unit, scale) for unit, scale in units.items() if scale <= size), list(units.items())[-1])


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise SolverFailed(f"the {what} is {value:g} in its unit; the numbers of a linear program must be finite")


class Option(NamedTuple):
    """One format of one layer."""

    nbytes: int  # bytes of the layer's weights in this format
    harm: float  # damage of this format to the model's results, in a unit that all layers share; at least 0


Layer = Mapping[Format, Option]


def adabits(layers: Sequence[Layer], budget: int) -> tuple[Format, ...] | None:
    """Return the format of each layer: the least sum of harms within the budget. None if no choice fits.

    Args:
        layers: the formats that each layer may have, at least one.
        budget: most bytes of all layers.

    Raises:
        NoSolver, SolverFailed: as `optimum`.
    """
    smallest = tuple(min(layer, key=lambda b: (layer[b].nbytes, layer[b].harm)) for layer in layers)
    least, limit, step = total(layers, smallest).nbytes, budget, 0
    if least > budget:
        return None
    while limit > least and (values := optimum(bits_program(layers, limit), presolve=True)) is not None:
        chosen = tuple(max(layer, key=lambda b: values[_variable(i, b)]) for i, layer in enumerate(layers))
        if (over := total(layers, chosen).nbytes - budget) <= 0:
            return chosen
        step = max(over, 2 * step)  # the solver keeps a limit with a relative tolerance only
        limit -= step
    return smallest


def bits_program(layers: Sequence[Layer], budget: int) -> pulp.LpProblem:
    """Return the program. Harms are in units of the largest by _HARM, and bytes by the budget: the solver's tolerances
    are absolute."""
    made = pulp.LpProblem("bits_per_layer")
    most = max((option.harm for layer in layers for option in layer.values()), default=0.0) or 1.0
    harms, sizes = [], []
    for i, layer in enumerate(layers):
        chosen = {b: made.add_variable(_variable(i, b), 0, 1, pulp.LpInteger) for b in layer}
        one = pulp.LpAffineExpression([(z, 1.0) for z in chosen.values()])
        made.addConstraint(pulp.LpConstraint(one, pulp.LpConstraintEQ, f"layer_{i}", 1))
        harms += [(chosen[b], _HARM * option.harm / most) for b, option in layer.items()]
        sizes += [(chosen[b], option.nbytes / max(1, budget)) for b, option in layer.items()]
    made.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(sizes), pulp.LpConstraintLE, "budget", 1.0))
    made.setObjective(pulp.LpAffineExpression(harms))
    return made


def _variable(layer: int, format: Format) -> str:
    return f"layer_{layer}_{format or 'exact'}"


def total(layers: Sequence[Layer], formats: Sequence[Format]) -> Option:
    """Return the bytes and the harm of all layers in these formats."""
    chosen = [layer[b] for layer, b in zip(layers, formats, strict=True)]
    return Option(sum(option.nbytes for option in chosen), sum(option.harm for option in chosen))
