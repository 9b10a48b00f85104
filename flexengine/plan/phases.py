"""Phases of the linear program: a job's sweeps in groups that are alike."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flexengine.plan.problem import Linear, Phase
from flexengine.plan.profile import Array, Profile
from flexengine.plan.terms import Lanes

GROUPS = 3  # phases of the prefill sweeps, and of the decode sweeps


def phases(lanes: Lanes, sweeps: Profile, first: Mapping[str, Linear]) -> tuple[Phase, ...]:
    """Return the first sweep, and the others grouped by the device's seconds, prefill apart from decode.

    Args:
        lanes: seconds by sweep.
        first: work by lane that the first sweep has besides: reading resident weights.
    """
    labels, weights = _groups(lanes["device"][""], sweeps)
    totals = weights.sum(0)
    names = [(lane, name) for lane, by in lanes.items() for name in by]
    means = (np.array([lanes[lane][name] for lane, name in names]) @ weights / totals).T.tolist()
    lives = (sweeps.live @ weights / max(1, sweeps.rows)).tolist()
    found = []
    for label, times, seconds, life in zip(labels, totals.tolist(), means, lives, strict=True):
        work: dict[str, dict[str, float]] = {lane: {} for lane in lanes}
        for (lane, name), mean in zip(names, seconds, strict=True):
            work[lane][name] = mean
        lines = {lane: Linear(by.pop("", 0.0), by) for lane, by in work.items()}
        found.append(Phase(label, times, lines, life))
    return (replace(found[0], lanes=_sum(found[0].lanes, first)), *found[1:])


def _groups(compute: Array, sweeps: Profile) -> tuple[list[str], Array]:
    """Return labels, and how often each sweep occurs in each group [sweeps, groups]. compute: seconds by sweep."""
    entering, times = sweeps.prompt > 1e-9, sweeps.times.copy()
    first = int(np.argmax(entering))
    labels, columns = ["first"], [np.zeros_like(times)]
    columns[0][first] = min(1.0, times[first])
    times[first] -= columns[0][first]
    for kind, there in (("prefill", entering), ("decode", ~entering)):
        members = np.flatnonzero(there & (times > 0))
        order = members[np.argsort(compute[members], kind="stable")]
        for number, group in enumerate(g for g in np.array_split(order, GROUPS) if len(g)):
            labels.append(f"{kind} {number + 1}")
            columns.append(np.zeros_like(times))
            columns[-1][group] = times[group]
    return labels, np.array(columns).T


def _sum(one: Mapping[str, Linear], other: Mapping[str, Linear]) -> dict[str, Linear]:
    """Return the work of both, by lane."""
    nothing = Linear(0.0)
    return {lane: one.get(lane, nothing) + other.get(lane, nothing) for lane in dict.fromkeys([*one, *other])}
