"""The best placement for one block shape: a linear program over what share of each kind of data lies in each tier.

FlexGen's program (Sheng et al. 2023, section 4.3 and appendix A.3) with what the caller's cost model puts into it:

    minimise    sum over phases p of times[p] * T[p]                                            seconds of the job
    subject to  T[p] >= busy[p][lane] + sum over others o of crosstalk[lane][o] * busy[p][o]    one row per p, lane
                T[p] >= sum over lanes of busy[p][lane]                                         or this, if no overlap
                used[m] <= capacity[m]                                                          one row per memory m
                wg + wc + wd = cg + cc + cd = hg + hc + hd = 1,  all >= 0
                sum over phases p of life[p] * T[p] <= latency limit                             if there is one

busy and used are linear in the nine fractions. `problem_text` prints a program with its numbers.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexengine.config import shown
from flexengine.errors import InvalidInput
from flexengine.plan.solver import Program, Row, Variable, optimum

KINDS = {"w": "weights", "c": "cache", "h": "hidden states"}
PLACES = {"g": "on the device", "c": "in the host", "d": "on disk"}
FRACTIONS = tuple(kind + place for kind in KINDS for place in PLACES)
_NAMES = frozenset(FRACTIONS)
GB = 1e9  # bytes
# What it costs, among equals, to hold a kind one tier further away; unequal, so that which gives way is no accident.
_TIES = {"w": 1.0, "c": 1.1, "h": 1.23}
_SPREAD = 1e-4  # least capacity a memory row is scaled by, relative to its largest coefficient
_NOISE = 1e-9  # fractions below this are rounding


@dataclass(frozen=True)
class Linear:
    """constant + sum of coefficients[name] * fraction[name], in seconds or bytes."""

    constant: float
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def value(self, fractions: Mapping[str, float]) -> float:
        """Its value at these fractions; those not named are 0."""
        return self.constant + sum(k * fractions.get(name, 0.0) for name, k in self.coefficients.items())

    def __add__(self, other: "Linear") -> "Linear":
        total = dict(self.coefficients)
        for name, k in other.coefficients.items():
            total[name] = total.get(name, 0.0) + k
        return Linear(self.constant + other.constant, total)

    def __mul__(self, factor: float) -> "Linear":
        return Linear(self.constant * factor, {name: k * factor for name, k in self.coefficients.items()})

    __rmul__ = __mul__


@dataclass(frozen=True)
class Phase:
    """Sweeps that are alike.

    label: "prefill", "decode", ... times: how many such sweeps the job has. lanes: seconds of work per lane in one.
    life: how many such sweeps a row lives through (for the latency limit).
    """

    label: str
    times: float
    lanes: Mapping[str, Linear]
    life: float = 0.0


@dataclass(frozen=True)
class Memory:
    """label: "device", "host", "disk", "RAM"; used, capacity: bytes. An infinite capacity is no limit."""

    label: str
    used: Linear
    capacity: float


@dataclass(frozen=True)
class Problem:
    """One block shape. Labels may repeat: the second phase "decode" is then called "decode 2".

    crosstalk: lane to lane: seconds that each busy second of the second adds to the first. overlap: False where the
    lanes wait for one another, so that their seconds add up. allowed: fractions that may be above 0.
    latency_limit: seconds; the sum of life * T over the phases stays below.
    """

    phases: tuple[Phase, ...]
    memories: tuple[Memory, ...]
    crosstalk: Mapping[str, Mapping[str, float]]
    overlap: bool
    allowed: frozenset[str]
    latency_limit: float | None = None

    @cached_property
    def bounds(self) -> tuple[tuple[tuple[str, Linear], ...], ...]:
        """What a sweep of each phase takes at least: labels and seconds."""
        return tuple(tuple(_bounds(phase, self)) for phase in self.phases)


@dataclass(frozen=True)
class Solution:
    """fractions: all nine, each kind summing to 1. seconds: of the job. phase_seconds: of one sweep of each phase."""

    fractions: dict[str, float]
    seconds: float
    phase_seconds: dict[str, float]


def solve(problem: Problem) -> Solution | None:
    """The placement with the fewest seconds; of equal ones, that with the most on the device, then in the host.

    Returns None where no placement fits, or none keeps the latency limit. Raises InvalidInput for numbers that are not
    finite, and NoSolver and SolverFailed as `solver.optimum`.
    """
    problem = _checked(problem)
    values = optimum(_job_program(problem))
    if values is None:
        return None
    fractions = _fractions(values)
    seconds = _seconds(problem, fractions)
    by_label = {phase.label: s for phase, s in zip(problem.phases, seconds, strict=True)}
    return Solution(fractions, sum(p.times * s for p, s in zip(problem.phases, seconds, strict=True)), by_label)


def problem_text(problem: Problem) -> str:
    """The program in rows for people: variables with symbol and unit, then what is minimised and each constraint."""
    problem = _checked(problem)
    program = _job_program(problem)
    lines = ["variables, all 0 or more"]
    lines += [f"  {v.symbol:<3} {v.meaning} [{v.unit}]" for v in program.variables]
    lines += [f"minimise {program.goal}", f"  {_sum_text({v.symbol: v.cost for v in program.variables})}", "subject to"]
    width = max(len(row.label) for row in program.rows)
    for row in program.rows:
        sign = "=" if row.equal else "<="
        lines.append(f"  {row.label:<{width}}  {_sum_text(row.terms)} {sign} {row.limit:.6g}  [{row.unit}]")
    closed = [name for name in FRACTIONS if name not in problem.allowed]
    return "\n".join([*lines, *([f"  {'not allowed':<{width}}  {' = '.join([*closed, '0'])}"] if closed else [])])


def _sum_text(terms: Mapping[str, float]) -> str:
    """3 x + y - 0.5 z"""
    text = ""
    for symbol, k in terms.items():
        if k:
            sign = (" - " if k < 0 else " + ") if text else ("-" if k < 0 else "")
            text += sign + (symbol if abs(k) == 1 else f"{abs(k):.6g} {symbol}")
    return text or "0"


def _job_program(problem: Problem) -> Program:
    times, time_rows = _time_part(problem)
    rows = [*_share_rows(problem), *time_rows, *_memory_rows(problem)]
    if problem.latency_limit is not None:
        lives = {v.symbol: phase.life for v, phase in zip(times, problem.phases, strict=True)}
        rows.append(Row("latency of a row", "s", lives, problem.latency_limit, scale=problem.latency_limit))
    return Program("seconds of the job", [*_share_variables(problem), *times], rows)


def _share_variables(problem: Problem) -> list[Variable]:
    return [
        Variable(name, f"share of the {KINDS[name[0]]} {PLACES[name[1]]}", "1", tie=_TIES[name[0]] * rank)
        for name, rank in zip(FRACTIONS, (0, 1, 2) * len(KINDS), strict=True)
        if name in problem.allowed
    ]


def _share_rows(problem: Problem) -> list[Row]:
    """Everything lies somewhere."""
    return [
        Row(f"all {what}", "1", {kind + p: 1.0 for p in PLACES if kind + p in problem.allowed}, 1.0, equal=True)
        for kind, what in KINDS.items()
    ]


def _time_part(problem: Problem) -> tuple[list[Variable], list[Row]]:
    """T1, T2, ...: seconds of one sweep of each phase, and what each is at least."""
    variables, rows = [], []
    for i, (phase, all_bounds) in enumerate(zip(problem.phases, problem.bounds, strict=True), 1):
        bounds = [(label, _open(least, problem)) for label, least in all_bounds]
        numbers = (abs(k) for _, least in bounds for k in (least.constant, *least.coefficients.values()))
        scale = max(numbers, default=0.0) or 1.0
        meaning = f"seconds of one {phase.label} sweep; the job has {phase.times:g}"
        time = Variable(f"T{i}", meaning, "s", phase.times, scale)
        variables.append(time)
        rows += [
            Row(f"{phase.label}: {label}", "s", {**least.coefficients, time.symbol: -1.0}, -least.constant, scale)
            for label, least in bounds
        ]
    return variables, rows


def _memory_rows(problem: Problem) -> list[Row]:
    rows = []
    for memory in problem.memories:
        if memory.capacity < math.inf:
            used = _open(memory.used, problem) * (1 / GB)
            largest = max((abs(k) for k in used.coefficients.values()), default=0.0)
            scale = max(memory.capacity / GB, _SPREAD * largest) or 1.0
            room = (memory.capacity - memory.used.constant) / GB
            rows.append(Row(f"{memory.label} memory", "GB", used.coefficients, room, scale))
    return rows


def _bounds(phase: Phase, problem: Problem) -> list[tuple[str, Linear]]:
    """What a sweep of the phase takes at least: a label and seconds."""
    if not problem.overlap:
        return [("all lanes", sum(phase.lanes.values(), Linear(0.0)))] if phase.lanes else []
    return [
        (lane, sum((phase.lanes[o] * share for o, share in problem.crosstalk.get(lane, {}).items()
                    if share and o != lane and o in phase.lanes), busy))
        for lane, busy in phase.lanes.items()
    ]  # fmt: skip


def _seconds(problem: Problem, fractions: Mapping[str, float]) -> list[float]:
    """Of one sweep of each phase."""
    return [max((0.0, *(least.value(fractions) for _, least in bounds))) for bounds in problem.bounds]


def _open(line: Linear, problem: Problem) -> Linear:
    """The line without the fractions that are not allowed, which are 0."""
    return Linear(line.constant, {name: k for name, k in line.coefficients.items() if name in problem.allowed})


def _fractions(values: Mapping[str, float]) -> dict[str, float]:
    """All nine fractions, without the solver's rounding: none below 0, each kind summing to 1."""
    clean = {name: value if (value := values.get(name, 0.0)) > _NOISE else 0.0 for name in FRACTIONS}
    totals = {kind: sum(clean[kind + place] for place in PLACES) for kind in KINDS}
    return {name: value / totals[name[0]] for name, value in clean.items()}


# What is given


def _checked(problem: Problem) -> Problem:
    """The problem with phases of unique labels. Raises InvalidInput naming what is no number or no fraction."""
    labels = _unique(problem.phases)
    for phase in problem.phases:
        _check_number(f"{phase.label}: times", phase.times)
        _check_number(f"{phase.label}: life", phase.life)
        for lane, busy in phase.lanes.items():
            _check_line(f"{phase.label}: {lane}", busy)
    for memory in problem.memories:
        _check_line(f"{memory.label} memory", memory.used)
        if math.isnan(memory.capacity):
            raise InvalidInput(f"{memory.label} memory: capacity is {memory.capacity}; it must be a number of bytes")
    _check_allowed(problem.allowed)
    limit = problem.latency_limit
    if limit is not None and not 0 < limit < math.inf:
        raise InvalidInput(f"latency limit is {shown(limit)}; it must be positive seconds, or None")
    if labels == [phase.label for phase in problem.phases]:
        return problem
    phases = (replace(phase, label=label) for phase, label in zip(problem.phases, labels, strict=True))
    return replace(problem, phases=tuple(phases))


def _unique(phases: Iterable[Phase]) -> list[str]:
    """Their labels; one that is taken gets a number."""
    labels: list[str] = []
    for phase in phases:
        label, number = phase.label, 2
        while label in labels:
            label, number = f"{phase.label} {number}", number + 1
        labels.append(label)
    return labels


def _check_number(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InvalidInput(f"{what} is {shown(value)}; it must be a finite number of 0 or more")


def _check_line(what: str, line: Linear) -> None:
    if unknown := line.coefficients.keys() - _NAMES:
        raise InvalidInput(f"{what} depends on {sorted(unknown)}; it may depend on {', '.join(FRACTIONS)}")
    for name, value in {"": line.constant, **line.coefficients}.items():
        if not math.isfinite(value):
            where = f" for {name} (share of the {KINDS[name[0]]} {PLACES[name[1]]})" if name else ""
            raise InvalidInput(f"{what} is {shown(value)}{where}; the number must be finite")


def _check_allowed(allowed: frozenset[str]) -> None:
    if unknown := allowed - set(FRACTIONS):
        raise InvalidInput(f"allowed names {sorted(unknown)}; it may name {', '.join(FRACTIONS)}")
    for kind, what in KINDS.items():
        if not any(kind + place in allowed for place in PLACES):
            raise InvalidInput(f"allowed has no place for the {what}; it must have one of"
                               f" {', '.join(kind + place for place in PLACES)}")  # fmt: skip
