"""Input of the linear program: seconds of lanes and bytes of memories, as linear functions of the fraction of each kind
of data on each tier."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from flexengine.config import shown
from flexengine.errors import InvalidInput
from flexengine.places import TIERS
from flexengine.plan.fractions import KINDS, fractions, kind_of


@lru_cache(maxsize=256)
def _by_kind(names: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of fractions of each kind of data."""
    return tuple(tuple(name for name in names if kind_of(name) == kind) for kind in KINDS)


@dataclass(frozen=True)
class Affine:
    """constant + sum of coefficients[name] * fraction[name], in seconds or bytes."""

    constant: float
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def value(self, fractions: Mapping[str, float]) -> float:
        """Return the value at these fractions; fractions that are not named are 0."""
        return self.constant + sum(k * fractions.get(name, 0.0) for name, k in self.coefficients.items())

    def fixed(self, fractions: Mapping[str, float]) -> "Affine":
        """Return the line with these fractions fixed: their terms become part of the constant."""
        held = {name: k for name, k in self.coefficients.items() if name not in fractions}
        moved = sum(k * fractions[name] for name, k in self.coefficients.items() if name in fractions)
        return Affine(self.constant + moved, held)

    def least(self, allowed: frozenset[str]) -> float:
        """Return the smallest value if only the allowed fractions may be above 0."""
        total, coefficients = self.constant, self.coefficients
        for names in _by_kind(allowed):
            total += min((coefficients.get(name, 0.0) for name in names), default=0.0)
        return total

    def __add__(self, other: "Affine") -> "Affine":
        total = dict(self.coefficients)
        for name, k in other.coefficients.items():
            total[name] = total.get(name, 0.0) + k
        return Affine(self.constant + other.constant, total)

    def __mul__(self, factor: float) -> "Affine":
        return Affine(self.constant * factor, {name: k * factor for name, k in self.coefficients.items()})

    __rmul__ = __mul__


@dataclass(frozen=True)
class Phase:
    """Sweeps of one kind.

    Attributes:
        label: "prefill", "decode", ...
        times: number of these sweeps in the job.
        lanes: seconds of work per lane in one sweep.
        life: number of these sweeps while an average row is alive (for the latency limit).
    """

    label: str
    times: float
    lanes: Mapping[str, Affine]
    life: float = 0.0

    def fixed(self, fractions: Mapping[str, float]) -> "Phase":
        """Return the phase with these fractions fixed, without lanes that then have no work."""
        lanes = {lane: line.fixed(fractions) for lane, line in self.lanes.items()}
        return replace(self, lanes={lane: line for lane, line in lanes.items() if line.coefficients or line.constant})


@dataclass(frozen=True)
class MemoryLimit:
    """A memory constraint.

    Attributes:
        label: "device", "host", "disk", "RAM".
        used: bytes.
        capacity: bytes; infinite for no limit.
    """

    label: str
    used: Affine
    capacity: float


@dataclass(frozen=True)
class Problem:
    """The linear program of one block shape. If labels repeat, the second phase "decode" is called "decode 2".

    Attributes:
        phases: kinds of sweeps.
        memories: memory constraints.
        crosstalk: `crosstalk[a][b]`: seconds that a busy second of lane b adds to lane a.
        overlap: whether lanes work at the same time; else their seconds add up.
        allowed: names of the fractions that may be above 0.
        latency_limit: most seconds of an average row, the sum of life * T over phases; None for no limit.
        places: places of the machine, from near to far.
    """

    phases: tuple[Phase, ...]
    memories: tuple[MemoryLimit, ...]
    crosstalk: Mapping[str, Mapping[str, float]]
    overlap: bool
    allowed: frozenset[str]
    latency_limit: float | None = None
    places: tuple[str, ...] = TIERS

    @cached_property
    def bounds(self) -> tuple[tuple[tuple[str, Affine], ...], ...]:
        """By phase, labels and lower bounds in seconds of a sweep."""
        return tuple(tuple(_bounds(phase, self)) for phase in self.phases)

    def least(self) -> tuple[float, float]:
        """Return lower bounds of the job's seconds and of a row's seconds, without solving the program."""
        sweeps = [max((line.least(self.allowed) for _, line in bounds), default=0.0) for bounds in self.bounds]
        return self.over(sweeps)

    def over(self, sweeps: Sequence[float]) -> tuple[float, float]:
        """Return the job's seconds and an average row's seconds. sweeps: seconds of a sweep, by phase."""
        pairs = list(zip(self.phases, sweeps, strict=True))
        return sum(p.times * s for p, s in pairs), sum(p.life * s for p, s in pairs)


def _bounds(phase: Phase, problem: Problem) -> list[tuple[str, Affine]]:
    """Return labels and lower bounds in seconds of a sweep of the phase."""
    if not problem.overlap:
        return [("all lanes", sum(phase.lanes.values(), Affine(0.0)))] if phase.lanes else []
    return [
        (lane, sum((phase.lanes[o] * share for o, share in problem.crosstalk.get(lane, {}).items()
                    if share and o != lane and o in phase.lanes), busy))
        for lane, busy in phase.lanes.items()
    ]  # fmt: skip


def checked(problem: Problem) -> Problem:
    """Return the problem with unique labels of phases. Raise InvalidInput if a number or the name of a fraction is not
    allowed."""
    labels: list[str] = []
    names = fractions(problem.places)
    for phase in problem.phases:
        labels.append(unique(phase.label, labels))
    for phase in problem.phases:
        _check_number(f"{phase.label}: times", phase.times)
        _check_number(f"{phase.label}: life", phase.life)
        for lane, busy in phase.lanes.items():
            _check_line(f"{phase.label}: {lane}", busy, names)
    for memory in problem.memories:
        _check_line(f"{memory.label} memory", memory.used, names)
        if math.isnan(memory.capacity):
            raise InvalidInput(f"{memory.label} memory: capacity is {memory.capacity}; it must be a number of bytes")
    _check_allowed(problem.allowed, names)
    limit = problem.latency_limit
    if limit is not None and not 0 < limit < math.inf:
        raise InvalidInput(f"latency limit is {shown(limit)}; it must be positive seconds, or None")
    if labels == [phase.label for phase in problem.phases]:
        return problem
    phases = (replace(phase, label=label) for phase, label in zip(problem.phases, labels, strict=True))
    return replace(problem, phases=tuple(phases))


def unique(label: str, taken: Container[str]) -> str:
    """Return the label, with a number if it is taken."""
    name, number = label, 2
    while name in taken:
        name, number = f"{label} {number}", number + 1
    return name


def _check_number(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InvalidInput(f"{what} is {shown(value)}; it must be a finite number of 0 or more")


def _check_line(what: str, line: Affine, names: tuple[str, ...]) -> None:
    if unknown := line.coefficients.keys() - set(names):
        raise InvalidInput(f"{what} depends on {sorted(unknown)}; it may depend on {', '.join(names)}")
    for name, value in {"": line.constant, **line.coefficients}.items():
        if not math.isfinite(value):
            raise InvalidInput(f"{what} is {shown(value)}{f' for {name}' * bool(name)}; the number must be finite")


def _check_allowed(allowed: frozenset[str], names: tuple[str, ...]) -> None:
    if unknown := allowed - set(names):
        raise InvalidInput(f"allowed names {sorted(unknown)}; it may name {', '.join(names)}")
    for kind, what in KINDS.items():
        own = [name for name in names if kind_of(name) == kind]
        if not allowed.intersection(own):
            raise InvalidInput(f"allowed has no place for the {what}; it must have one of {', '.join(own)}")
