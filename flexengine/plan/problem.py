"""Input of the linear program: seconds of lanes and bytes of memories, as linear functions of the fraction of each kind
of data on each tier.

The memory rows are computed from the corners: one layout per place, with all data that may move on this place. Between
corners, the bytes of each purpose are linear in the fractions of one kind of data. A real layout differs from this line
in three ways:

* Whole tensors, sequences and gpu_batches are rounded.
* Buffers and staging count at full size in the program as soon as a kind of data may leave the device.
* The program counts KV pages at the mean job's peak under the schedule; `layout` reserves pages for the longest
  sequences if memory is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from flexengine.places import TIERS, further_disks
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Capacity, Hardware, at
from flexengine.plan.layout import Layout
from flexengine.plan.loading import LOAD_BYTES, RESIDENT, fault_seconds, write_seconds
from flexengine.plan.profile import Profile
from flexengine.plan.sizes import DELEGATION, Array
from flexengine.plan.terms import CACHE, HIDDEN, KINDS, WEIGHTS, fraction, kind_of
from flexengine.policy import Policy

# Purposes of a layout's account, and the kind of data whose fractions determine their bytes.
_KIND = dict.fromkeys(("weights", "weight slots", "weight staging"), WEIGHTS)
_KIND |= {"hidden states": HIDDEN, DELEGATION: CACHE}
PHASES_PER_KIND = 3  # phases of prefill sweeps, and as many of decode sweeps


@lru_cache(maxsize=256)
def _by_kind(names: frozenset[str]) -> tuple[tuple[str, ...], ...]:
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
    """Sweeps of one kind."""

    label: str  # "prefill", "decode", ...
    times: float  # number of these sweeps in the job
    lanes: Mapping[str, Affine]  # seconds of work per lane in one sweep
    life: float = 0.0  # number of these sweeps while an average row is alive (for the latency limit)

    def fixed(self, fractions: Mapping[str, float]) -> "Phase":
        """Return the phase with these fractions fixed, without lanes that then have no work."""
        lanes = {lane: line.fixed(fractions) for lane, line in self.lanes.items()}
        return replace(self, lanes={lane: line for lane, line in lanes.items() if line.coefficients or line.constant})


@dataclass(frozen=True)
class MemoryLimit:
    """A memory constraint."""

    label: str  # "device", "host", "disk", "RAM"
    used: Affine  # bytes
    capacity: float  # bytes; infinite for no limit


@dataclass(frozen=True)
class Problem:
    """The linear program of one block shape."""

    phases: tuple[Phase, ...]  # kinds of sweeps, each with a label of its own
    memories: tuple[MemoryLimit, ...]  # memory constraints
    # `crosstalk[a][b]`: seconds that a busy second of lane b adds to lane a
    crosstalk: Mapping[str, Mapping[str, float]]
    overlap: bool  # whether lanes work at the same time; else their seconds add up
    allowed: frozenset[str]  # names of the fractions that may be above 0
    # most seconds of an average row, the sum of life * T over phases; None for no limit
    latency_limit: float | None = None
    places: tuple[str, ...] = TIERS  # places of the machine, from near to far

    @cached_property
    def bounds(self) -> list[list[tuple[str, Affine]]]:
        """By phase, labels and lower bounds in seconds of a sweep."""
        if not self.overlap:
            return [[("all lanes", sum(p.lanes.values(), Affine(0.0)))] if p.lanes else [] for p in self.phases]
        return [[(lane, self._slowed(phase, lane)) for lane in phase.lanes] for phase in self.phases]

    def _slowed(self, phase: Phase, lane: str) -> Affine:
        """Return the work of a lane with its crosstalk."""
        talk = self.crosstalk.get(lane, {})
        added = (phase.lanes[o] * share for o, share in talk.items() if share and o != lane and o in phase.lanes)
        return sum(added, phase.lanes[lane])

    def least(self) -> tuple[float, float]:
        """Return lower bounds of the job's seconds and of a row's seconds, without solving the program."""
        sweeps = [max((line.least(self.allowed) for _, line in bounds), default=0.0) for bounds in self.bounds]
        return self.over(sweeps)

    def over(self, sweeps: Sequence[float]) -> tuple[float, float]:
        """Return the job's seconds and an average row's seconds. sweeps: seconds of a sweep, by phase."""
        pairs = list(zip(self.phases, sweeps, strict=True))
        return sum(p.times * s for p, s in pairs), sum(p.life * s for p, s in pairs)


def memories(corners: Mapping[str, Layout], cache: Mapping[str, float], capacity: Capacity) -> tuple[MemoryLimit, ...]:
    """Return one row of the program per memory that has a limit, without attention workers.

    Args:
        corners: by tier, the layout with all data that may move on that tier, planned without memory limits.
        cache: by tier, bytes of the KV cache if all of it is on that tier.
    """
    used = {tier: _bytes(corners, tier, cache[tier]) for tier in corners}
    limits = capacity.limits
    if capacity.shared:
        used["device"], limits["host"] = used["device"] + used["host"], None
    return tuple(MemoryLimit(tier, used[tier], float(limit)) for tier in used if (limit := limits[tier]) is not None)


def _bytes(corners: Mapping[str, Layout], tier: str, cache: float) -> Affine:
    """Return the bytes of one tier. cache: as in `memories`, of this tier."""
    accounts = {at: layout.account[tier] for at, layout in corners.items()}
    hidden_moves = len({layout.policy.activations for layout in corners.values()}) > 1
    delegates = any(layout.policy.delegates for layout in corners.values()) and not hidden_moves
    line = Affine(0.0)
    for what in dict.fromkeys(what for account in accounts.values() for what in account):
        booked = {at: float(account.get(what, 0)) for at, account in accounts.items()}
        if what == "KV cache":
            line += Affine(0.0, {fraction(CACHE, tier): cache})
        elif what == "paused forwards":  # held by delegated sequences, else by gpu_batches with hidden states on device
            line += _between(booked, CACHE if delegates else HIDDEN)
        elif what in _KIND:
            line += _between(booked, _KIND[what])
        else:
            line += Affine(max(booked.values()))
    return line


def _between(booked: Mapping[str, float], kind: str) -> Affine:
    """Return the line through the corners. booked: bytes of one purpose, by the tier that has all data of the kind."""
    least = min(booked.values())
    return Affine(least, {fraction(kind, at): nbytes - least for at, nbytes in booked.items() if nbytes > least})


def phases(cost: Cost, policy: Policy, sweeps: Profile, split: Mapping[str, float]) -> tuple[Phase, ...]:
    """Return the first sweep as one phase, and phases of the other sweeps by kind and by the device's seconds.

    Resident weights are read in the first sweep. Arguments as in `Cost.terms`.
    """
    lanes, first = cost.lanes(policy, sweeps, split), load_resident(cost.hardware, cost.streamed_bytes)
    labels, weights = _groups(lanes["device"][""], sweeps)
    totals = weights.sum(0)
    names = [(lane, name) for lane, by in lanes.items() for name in by]
    means = (np.array([lanes[lane][name] for lane, name in names]) @ weights / totals).T.tolist()
    lives = (sweeps.live @ weights / max(1, sweeps.rows)).tolist()
    result = []
    for label, times, seconds, life in zip(labels, totals.tolist(), means, lives, strict=True):
        work: dict[str, dict[str, float]] = {lane: {} for lane in lanes}
        for (lane, name), mean in zip(names, seconds, strict=True):
            work[lane][name] = mean
        lines = {lane: Affine(by.pop("", 0.0), by) for lane, by in work.items()}
        result.append(Phase(label, times, lines, life))
    nothing, work_of = Affine(0.0), result[0].lanes
    summed = {lane: work_of.get(lane, nothing) + first.get(lane, nothing) for lane in dict.fromkeys([*work_of, *first])}
    return (replace(result[0], lanes=summed), *result[1:])


def _groups(compute: Array, sweeps: Profile) -> tuple[list[str], Array]:
    """Return the labels of the groups, and how often each sweep occurs in each group: [sweeps, groups]. compute:
    seconds of the device by sweep."""
    entering, times = sweeps.prompt > 1e-9, sweeps.times.copy()
    first = int(np.argmax(entering))
    labels, columns = ["first"], [np.zeros_like(times)]
    columns[0][first] = min(1.0, times[first])
    times[first] -= columns[0][first]
    for kind, of_kind in (("prefill", entering), ("decode", ~entering)):
        members = np.flatnonzero(of_kind & (times > 0))
        order = members[np.argsort(compute[members], kind="stable")]
        for number, group in enumerate(g for g in np.array_split(order, PHASES_PER_KIND) if len(g)):
            labels.append(f"{kind} {number + 1}")
            columns.append(np.zeros_like(times))
            columns[-1][group] = times[group]
    return labels, np.array(columns).T


def load_resident(hardware: Hardware, nbytes: float) -> dict[str, Affine]:
    """Return the work, by lane, of reading weights once into new RAM, or of copying them to further disks.

    The lane of the checkpoint's disk reads and writes copies. Without a GPU, page faults take the processor that
    computes. With a GPU, they are a lane of their own ("touch"), because they overlap disk reads.

    Args:
        nbytes: number of bytes of all weights.
    """
    read = nbytes / at(hardware.checkpoint_read, LOAD_BYTES)
    faults = fault_seconds(hardware, 0.0, nbytes)
    lane = "touch" if hardware.gpu else "device"
    seconds = {place: 0.0 if hardware.gpu and place == "device" else faults for place in RESIDENT}
    reads = dict.fromkeys(RESIDENT, read)
    for disk in further_disks(hardware.places):
        reads[disk] = read + write_seconds(hardware, disk, nbytes)
    work = {"disk_read": reads, lane: seconds}
    return {lane: Affine(0.0, {fraction(WEIGHTS, place): s for place, s in by.items()}) for lane, by in work.items()}
