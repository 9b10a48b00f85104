"""What the planner asks of a linear program: how long the lanes work and how full the memories are, as functions of
what share of each kind of data lies in each tier."""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexengine.config import shown
from flexengine.errors import InvalidInput

KINDS = {"w": "weights", "c": "cache", "h": "hidden states"}
PLACES = {"g": "on the device", "c": "in the host", "d": "on disk"}
FRACTIONS = tuple(kind + place for kind in KINDS for place in PLACES)
_NAMES = frozenset(FRACTIONS)


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


def _bounds(phase: Phase, problem: Problem) -> list[tuple[str, Linear]]:
    """What a sweep of the phase takes at least: a label and seconds."""
    if not problem.overlap:
        return [("all lanes", sum(phase.lanes.values(), Linear(0.0)))] if phase.lanes else []
    return [
        (lane, sum((phase.lanes[o] * share for o, share in problem.crosstalk.get(lane, {}).items()
                    if share and o != lane and o in phase.lanes), busy))
        for lane, busy in phase.lanes.items()
    ]  # fmt: skip


def checked(problem: Problem) -> Problem:
    """The problem with phases of unique labels. Raises InvalidInput naming what is no number or no fraction."""
    labels: list[str] = []
    for phase in problem.phases:
        labels.append(unique(phase.label, labels))
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


def unique(label: str, taken: Container[str]) -> str:
    """The label, with a number if it is taken."""
    found, number = label, 2
    while found in taken:
        found, number = f"{label} {number}", number + 1
    return found


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
