"""Phases of the linear program: groups of sweeps that take similar seconds."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flexengine.places import further_disks
from flexengine.plan.cost import Cost
from flexengine.plan.fractions import WEIGHTS, fraction
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.loading import LOAD_BYTES, RESIDENT, write_seconds
from flexengine.plan.paging import Array
from flexengine.plan.problem import Affine, Phase
from flexengine.plan.profile import Profile
from flexengine.policy import Policy

PHASES_PER_KIND = 3  # phases of prefill sweeps, and as many of decode sweeps


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
    return (replace(result[0], lanes=_sum(result[0].lanes, first)), *result[1:])


def _groups(compute: Array, sweeps: Profile) -> tuple[list[str], Array]:
    """Return the labels of the groups, and how often each sweep occurs in each group.

    Args:
        compute: seconds of the device by sweep.

    Returns:
        Labels, and an array [sweeps, groups].
    """
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


def _sum(one: Mapping[str, Affine], other: Mapping[str, Affine]) -> dict[str, Affine]:
    """Return the work of both, by lane."""
    nothing = Affine(0.0)
    return {lane: one.get(lane, nothing) + other.get(lane, nothing) for lane in dict.fromkeys([*one, *other])}


def load_resident(hardware: Hardware, nbytes: float) -> dict[str, Affine]:
    """Return the work, by lane, of reading weights once into new RAM, or of copying them to further disks.

    The lane of the checkpoint's disk reads and writes copies. Without a GPU, page faults take the processor that
    computes. With a GPU, they are a lane of their own ("touch"), because they overlap disk reads.

    Args:
        nbytes: number of bytes of all weights.
    """
    read = nbytes / at(hardware.checkpoint_read, LOAD_BYTES)
    faults = nbytes / hardware.touch if hardware.touch else 0.0
    lane = "touch" if hardware.kind == "cuda" else "device"
    seconds = {place: 0.0 if hardware.kind == "cuda" and place == "device" else faults for place in RESIDENT}
    reads = dict.fromkeys(RESIDENT, read)
    for disk in further_disks(hardware.places):
        reads[disk] = read + write_seconds(hardware, disk, nbytes)
    work = {"disk_read": reads, lane: seconds}
    return {lane: Affine(0.0, {fraction(WEIGHTS, place): s for place, s in by.items()}) for lane, by in work.items()}
