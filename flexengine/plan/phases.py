"""Phases of the linear program: groups of sweeps that take similar seconds."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flexengine.plan.paging import Array
from flexengine.plan.problem import Linear, Phase
from flexengine.plan.profile import Profile
from flexengine.plan.terms import Lanes

PHASES_PER_KIND = 3  # phases of prefill sweeps, and as many of decode sweeps


def phases(lanes: Lanes, sweeps: Profile, first: Mapping[str, Linear]) -> tuple[Phase, ...]:
    """Return the first sweep as one phase, and phases of the other sweeps by kind and by the device's seconds.

    Args:
        lanes: seconds by lane, fraction and sweep.
        first: additional work by lane in the first sweep, which reads resident weights.
    """
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
        lines = {lane: Linear(by.pop("", 0.0), by) for lane, by in work.items()}
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


def _sum(one: Mapping[str, Linear], other: Mapping[str, Linear]) -> dict[str, Linear]:
    """Return the work of both, by lane."""
    nothing = Linear(0.0)
    return {lane: one.get(lane, nothing) + other.get(lane, nothing) for lane in dict.fromkeys([*one, *other])}
