"""The mixed-integer program of one case: layers to stages, formats to layers (LLM-PQ, section 4.3, corrected).

Decided for units i, stages j (in the order of the case), choices c (format, and home on device or host):

    y[i,j]  binary   unit i is in stage j or an earlier one; contiguity in the tight form:
                     y[i,j] <= y[i,j+1]  and  y[i+1,j] <= y[i,j]; unit i is in stage j if y[i,j] - y[i,j-1] = 1
    n[j,k,c] integer number of units of class k with choice c in stage j
    z[i,j,c] real    whether unit i is in stage j with choice c; only if units of a class differ in harm
    w[j]    binary   whether stage j has units; the first and the last stage have some
    h[j,c]  binary   whether stage j streams units with choice c from the host

    minimise rounds * ((prefills - 1) Tmax_pre + T_pre + steps * R) + theta * harm                          seconds
    with     T_pre = sum of stages and hops,  Tmax_pre >= every stage and hop
             R >= cohorts * Tmax_dec,  R >= T_dec         a sequence's next token needs its last one
             stage >= compute, stage >= load              streaming overlaps computing
             hop into j >= hop[k,j] (w_k + w_j - 1 - stages with units between)
             bytes of device and host <= capacity

Given integer n and y, the z form a transportation problem, whose vertices are integral: so z need not be binary, and
the solver branches on few variables. Which layer gets which format is decided at the end by assignment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

import numpy as np
import pulp
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from flexengine.plan.cluster.case_costs import Array, CaseCosts
from flexengine.plan.lp import SolverFailed, run_highs

GB = 1e9
Expression: TypeAlias = pulp.LpAffineExpression
Terms = list[tuple[pulp.LpVariable, float]]
_EXTREME = (
    "HiGHS found no stages of the pipeline, and {}; if seconds of layers, head and links, and theta times"
    " harm, differ by too many powers of ten, bring extreme rates of the cluster file, or --theta, nearer to"
    " the others"
)


@dataclass(frozen=True)
class Assignment:
    """The optimum of a case."""

    stage_of: tuple[int, ...]  # stage of each unit
    choice_of: tuple[int, ...]  # choice of each unit
    bound: float  # lower bound of the cost of every assignment, as the solver proved it


@dataclass
class _StagesProgram:
    """A program under construction."""

    numbers: CaseCosts  # the case
    # whether all variables are real, units are in no order, and only links of neighbours count: a lower bound
    relaxed: bool = False
    quality: bool = False  # whether only harm counts, not seconds
    anywhere: bool = False  # whether the first and the last stage may be empty, too
    lp: pulp.LpProblem = field(default_factory=lambda: pulp.LpProblem("stages"))

    def __post_init__(self) -> None:
        m = self.numbers
        self.per_class = np.bincount(m.classes, minlength=m.prefill.shape[1])
        self.allowed = np.isfinite(m.prefill) & np.isfinite(m.decode)
        whole = [(j, k, c) for j, k, c in product(*map(range, m.prefill.shape)) if self.allowed[j, k, c]]
        self.n = {key: self._variable("n_{}_{}_{}".format(*key), float(self.per_class[key[1]])) for key in whole}
        inner = range(m.stages) if self.anywhere else range(1, m.stages - 1)
        self.w = {j: self._variable(f"w_{j}", 1) for j in inner}
        self._units()
        tables = (("pre", m.prefill, m.fixed_prefill), ("dec", m.decode, m.fixed_decode))
        stages = [] if self.quality else [self._stages(*table) for table in tables]
        self._memory()
        seconds = self._seconds(*stages) if stages else Expression()
        self.lp.setObjective(seconds * m.rounds + self._harm() * (1.0 if self.quality else m.theta))

    def _variable(self, name: str, most: float | None, whole: bool = True) -> pulp.LpVariable:
        kind = pulp.LpInteger if whole and not self.relaxed else pulp.LpContinuous
        return self.lp.add_variable(name, 0, most, kind)

    def add(self, terms: Expression | Terms, sense: int, limit: float, name: str) -> None:
        """Add the row: terms <= limit (sense -1), == (0) or >= (1)."""
        self.lp.addConstraint(pulp.LpConstraint(Expression(terms), sense, name, limit))

    def _used(self, j: int) -> Expression:
        """Return whether stage j has units."""
        return Expression([(self.w[j], 1.0)]) if j in self.w else Expression(constant=1.0)

    def _units(self) -> None:
        """Add the rows that put each unit into one stage, in order."""
        m = self.numbers
        for j in range(m.stages):
            count = [(n, 1.0) for (stage, _, _), n in self.n.items() if stage == j]
            if j in self.w:
                self.add([*count, (self.w[j], -float(m.units))], -1, 0.0, f"only_if_used_{j}")
                self.add([*count, (self.w[j], -1.0)], 1, 0.0, f"used_{j}")
            else:
                self.add(count, 1, 1.0, f"used_{j}")
        for k, number in enumerate(self.per_class):
            terms = [(n, 1.0) for (_, kind, _), n in self.n.items() if kind == k]
            self.add(terms, 0, float(number), f"all_units_{k}")
        self.y: dict[tuple[int, int], pulp.LpVariable] = {}
        kinds = np.array(m.classes)
        uneven = any(np.any(np.ptp(m.harm[kinds == k], axis=0) > 0) for k in range(len(self.per_class)))
        self.by_unit = uneven and (m.theta > 0 or self.quality)
        if self.relaxed or (len(self.per_class) == 1 and not self.by_unit):
            return  # numbers of units are enough
        last = m.stages - 1
        self.y = {(i, j): self._variable(f"y_{i}_{j}", 1) for i in range(m.units) for j in range(last)}
        for (i, j), y in self.y.items():
            if j + 1 < last:
                self.add([(y, 1.0), (self.y[i, j + 1], -1.0)], -1, 0.0, f"later_stage_{i}_{j}")
            if i + 1 < m.units:
                self.add([(self.y[i + 1, j], 1.0), (y, -1.0)], -1, 0.0, f"later_unit_{i}_{j}")
        for j, k in product(range(m.stages), range(len(self.per_class))):
            inside = [term for i in range(m.units) if m.classes[i] == k for term in self._inside(i, j)[0]]
            constant = sum(self._inside(i, j)[1] for i in range(m.units) if m.classes[i] == k)
            count = [(n, -1.0) for (stage, kind, _), n in self.n.items() if (stage, kind) == (j, k)]
            self.add([*inside, *count], 0, -constant, f"units_of_stage_{j}_{k}")

    def _inside(self, i: int, j: int) -> tuple[Terms, float]:
        """Return whether unit i is in stage j, as terms and a constant: 1 if the program has no variables y."""
        terms = [(self.y[i, j], 1.0)] if (i, j) in self.y else []
        if j > 0:
            terms.append((self.y[i, j - 1], -1.0))
        return terms, 0.0 if (i, j) in self.y else 1.0

    def _sum(self, table: Array, j: int, unit: float = 1.0) -> Terms:
        return [(n, float(table[key]) / unit) for key, n in self.n.items() if key[0] == j and table[key]]

    def _stages(self, name: str, table: Array, fixed: Array) -> list[pulp.LpVariable]:
        """Return the seconds of each stage in a phase."""
        times = []
        for j in range(self.numbers.stages):
            time = self._variable(f"{name}_{j}", None, whole=False)
            computed = Expression([*self._sum(table, j), (time, -1.0)]) + self._used(j) * fixed[j]
            self.add(computed, -1, 0.0, f"compute_{name}_{j}")
            if load := self._sum(self.numbers.load, j):
                self.add([*load, (time, -1.0)], -1, 0.0, f"load_{name}_{j}")
            times.append(time)
        return times

    def _hops(self, name: str, table: Array) -> list[pulp.LpVariable]:
        """Return the seconds of the hop into each stage but the first."""
        hops = []
        for j in range(1, self.numbers.stages):
            hop = self._variable(f"hop_{name}_{j}", None, whole=False)
            for k in range(j - 1 if self.relaxed else 0, j):
                between = sum((self._used(x) for x in range(k + 1, j)), Expression())
                passing = self._used(k) + self._used(j) - 1.0 - between
                self.add(passing * float(table[k, j]) - hop, -1, 0.0, f"hop_{name}_{k}_{j}")
            hops.append(hop)
        return hops

    def _seconds(self, prefill: list[pulp.LpVariable], decode: list[pulp.LpVariable]) -> Expression:
        """Return the seconds of one round."""
        m = self.numbers
        hops = self._hops("pre", m.hop_prefill), self._hops("dec", m.hop_decode)
        slow = [self._variable(f"slowest_{name}", None, whole=False) for name in ("pre", "dec")]
        for longest, times, sent in zip(slow, (prefill, decode), hops, strict=True):
            for part in (*times, *sent):
                self.add([(part, 1.0), (longest, -1.0)], -1, 0.0, f"{longest.name}_{part.name}")
        first = Expression([(slow[0], m.prefills - 1.0), *((t, 1.0) for t in prefill)])
        step = self._variable("step", None, whole=False)
        self.add([(slow[1], float(m.cohorts)), (step, -1.0)], -1, 0.0, "all_cohorts")
        through = Expression([*((t, 1.0) for t in (*decode, *hops[1])), (step, -1.0)])
        self.add(through, -1, -(m.back if m.stages > 1 else 0.0), "through_the_pipeline")
        return first + Expression([*((t, 1.0) for t in hops[0]), (step, float(m.steps))])

    def _memory(self) -> None:
        """Add the rows of device and host memory."""
        m = self.numbers
        hosts = [c for c, choice in enumerate(m.choices) if choice.host]
        for j in range(m.stages):
            used = Expression(self._sum(m.memory, j, GB)) + self._used(j) * (m.fixed_memory[j] / GB)
            streams = [key for key in self.n if key[0] == j and key[2] in hosts]
            if streams:
                slot = self._variable(f"slots_{j}", None, whole=False)
                used = used + slot
                self.add(self._sum(m.host, j, GB), -1, m.host_capacity[j] / GB, f"host_memory_{j}")
                for _, k, c in streams:
                    on = self._variable(f"streams_{j}_{k}_{c}", 1)
                    self.add([(self.n[j, k, c], 1.0), (on, -float(self.per_class[k]))], -1, 0.0, f"if_{j}_{k}_{c}")
                    self.add([(on, m.slots[j, k, c] / GB), (slot, -1.0)], -1, 0.0, f"slot_{j}_{k}_{c}")
            self.add(used, -1, m.capacity[j] / GB, f"memory_{j}")

    def _harm(self) -> Expression:
        """Return the harm of all units. Relaxed, every unit could have the choice of any stage: a lower bound."""
        m = self.numbers
        if not self.by_unit:
            least = np.array([m.harm[np.array(m.classes) == k].min(axis=0) for k in range(len(self.per_class))])
            return Expression([(n, float(least[k, c])) for (_, k, c), n in self.n.items() if least[k, c]])
        allowed = np.logical_or.reduce(self.allowed, axis=0, keepdims=True) if self.relaxed else self.allowed
        stages, kinds, choices = map(range, allowed.shape)
        z: dict[tuple[int, int, int], pulp.LpVariable] = {}
        for i, j, c in product(range(m.units), stages, choices):
            if allowed[j, m.classes[i], c]:
                z[i, j, c] = self._variable(f"z_{i}_{j}_{c}", 1, whole=False)
        for i, j in product(range(m.units), stages):
            terms, constant = self._inside(i, j)
            picked = [(z[i, j, c], 1.0) for c in choices if (i, j, c) in z]
            self.add([*picked, *((y, -k) for y, k in terms)], 0, constant, f"one_choice_{i}_{j}")
        for j, k, c in product(stages, kinds, choices):
            if allowed[j, k, c]:
                same = [(z[i, j, c], 1.0) for i in range(m.units) if m.classes[i] == k]
                counted = range(m.stages) if self.relaxed else (j,)
                number = [(self.n[stage, k, c], -1.0) for stage in counted if self.allowed[stage, k, c]]
                self.add([*same, *number], 0, 0.0, f"number_{j}_{k}_{c}")
        return Expression([(v, float(m.harm[i, c])) for (i, _, c), v in z.items() if m.harm[i, c]])


def solve(
    numbers: CaseCosts, gap: float = 1e-4, seconds: float | None = None, below: float | None = None,
    quality: bool = False,
) -> Assignment | None:  # fmt: skip
    """Return the best assignment, or None if there is none (below `below`), or none was found in time.

    Args:
        numbers: the case.
        gap: relative gap at which the solver stops.
        seconds: most seconds; None for no limit.
        below: only assignments of less cost are searched.
        quality: minimise harm alone: the start of the bit transfer ("adabits").

    Raises:
        NoSolver: highspy is not installed.
        SolverFailed: HiGHS stopped with an error.
    """
    program = _StagesProgram(numbers, quality=quality)
    if below is not None:
        program.add(program.lp.objective.copy(), -1, below, "better_than_the_best")
    solver = pulp.HiGHS(msg=False, gapRel=gap, timeLimit=seconds)
    status = _run(program.lp, solver)
    highs = program.lp.solverModel
    info = highs.getInfo()
    if status not in ("Optimal", "Time limit reached") or info.primal_solution_status != 2:
        return None
    counts = np.zeros(numbers.prefill.shape, dtype=np.int64)
    for key, n in program.n.items():
        counts[key] = round(n.varValue or 0.0)
    stage_of = tuple(np.repeat(np.arange(numbers.stages), counts.sum(axis=(1, 2))).tolist())  # units are in order
    bound = info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else -math.inf
    return Assignment(stage_of, spread(numbers, stage_of, numbers.classes, counts), bound)


def lower_bound(numbers: CaseCosts, anywhere: bool = False) -> float:
    """Return a lower bound of the cost of a case: the program without whole numbers, infinite if that has no solution.

    Args:
        numbers: the case.
        anywhere: whether the first and the last stage may be empty, too.
    """
    program = _StagesProgram(numbers, relaxed=True, anywhere=anywhere)
    status = _run(program.lp, pulp.HiGHS(msg=False))
    return math.inf if status == "Infeasible" else float(pulp.value(program.lp.objective) or 0.0)


def _run(lp: pulp.LpProblem, solver: pulp.HiGHS) -> str:
    """Solve, and return HiGHS's status."""
    try:
        status = run_highs(lp, solver)
    except IndexError as error:  # PuLP reads results of rows that HiGHS refused for their numbers
        raise SolverFailed(_EXTREME.format("refused rows of its program")) from error
    if status == "Primal infeasible or unbounded":  # no variable and no cost is negative, so it is bounded
        status = "Infeasible"
    if status not in ("Optimal", "Infeasible", "Time limit reached"):
        raise SolverFailed(_EXTREME.format(f"stopped with status {status}"))
    return status


def spread(
    numbers: CaseCosts, stage_of: Sequence[int], kinds: Sequence[int], counts: NDArray[np.int64]
) -> tuple[int, ...]:
    """Return the choice of each unit with the least harm.

    Args:
        numbers: the case.
        stage_of: stage of each unit.
        kinds: kind of each unit; units of one kind in a stage may exchange their choices.
        counts: [stages, kinds, choices] number of units.
    """
    stages, of_kind = np.asarray(stage_of), np.asarray(kinds)
    choice_of = np.zeros(numbers.units, dtype=np.int64)
    for j, k in np.argwhere(counts.sum(axis=2)):
        units = np.flatnonzero((stages == j) & (of_kind == k))
        places = np.repeat(np.arange(counts.shape[2]), counts[j, k])
        if len(set(places)) > 1:
            rows, columns = linear_sum_assignment(numbers.harm[np.ix_(units, places)])
            units, places = units[rows], places[columns]
        choice_of[units] = places
    return tuple(map(int, choice_of))
