"""Changes of a cluster that would make a job shorter, each planned again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flexengine.errors import OutOfMemory
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.cluster.devices import Cluster, Link
from flexengine.plan.cluster.model import assumed_harm
from flexengine.plan.cluster.plan import ClusterPlan
from flexengine.plan.cluster.search import Found, Limits, search

SECONDS = 4.0  # most seconds to plan one change
GAP = 1e-2
MIN_SPEEDUP = 1.03
MOST_TYPES = 3  # types that are tried at twice the speed
FULL = 0.8  # share of a device's memory from which more memory is tried


class ClusterHelp(NamedTuple):
    """A change, and how often faster the job is with it."""

    label: str
    ratio: float


def helps(found: Found, limits: Limits) -> list[ClusterHelp]:
    """Return the changes that make the job at least 3 % shorter, the best first.

    Args:
        found: the plan.
        limits: of the plan's search; each change is planned in at most SECONDS.
    """
    brief = replace(limits, seconds=min(SECONDS, limits.seconds), gap=max(GAP, limits.gap))
    made = []
    for label, task in _changes(found.plan):
        try:
            seconds = search(task, brief).plan.priced.seconds
        except OutOfMemory:
            continue
        if (ratio := found.plan.priced.seconds / seconds) >= MIN_SPEEDUP:
            made.append(ClusterHelp(label, ratio))
    return sorted(made, key=lambda h: -h.ratio)


def _changes(plan: ClusterPlan) -> Iterator[tuple[str, ClusterTask]]:
    """Yield changes, and the task with each of them."""
    task, cluster, priced = plan.task, plan.task.cluster, plan.priced
    slow = max(range(len(plan.devices)), key=lambda k: priced.decode[k] * plan.numbers.cohorts + priced.prefill[k])
    kind = plan.devices[slow].type
    for name in dict.fromkeys((kind, *cluster.types[:MOST_TYPES])):
        yield f"{name} twice as fast", replace(task, cluster=_doubled(cluster, name, "speed"))
    names = {device.name for device in cluster.devices}
    name = next(f"{kind}+{k}" for k in range(1, len(names) + 2) if f"{kind}+{k}" not in names)
    more = (*cluster.devices, replace(plan.devices[slow], name=name))
    yield f"one more {kind}", replace(task, cluster=replace(cluster, devices=more))
    full = max(range(len(plan.devices)), key=lambda k: priced.memory[k] / plan.devices[k].memory)
    if priced.memory[full] >= FULL * plan.devices[full].memory:
        name = plan.devices[full].type
        yield f"{name} with twice the memory", replace(task, cluster=_doubled(cluster, name, "memory"))
    if len(plan.devices) > 1:
        pairs = {pair: _ten_times(link) for pair, link in cluster.pairs.items()}
        faster = replace(cluster, within=_ten_times(cluster.within), between=_ten_times(cluster.between), pairs=pairs)
        yield "links ten times as fast", replace(task, cluster=faster)
    if any(choice.host for choice in plan.choices):
        hosts = tuple(replace(d, host_link=2 * d.host_link) for d in cluster.devices)
        yield "links from host to device twice as fast", replace(task, cluster=replace(cluster, devices=hosts))
    fewer = next((form for form in ("int8", "int4", "int3") if form not in task.formats), None)
    if fewer is not None and all(fewer in model.layers[0].bytes for model in task.models.values()):
        formats = (*task.formats, fewer)
        table = assumed_harm(task.model, formats)
        yield f"layers in {fewer} allowed (lossy)", replace(task, formats=formats, harm=table)


def _doubled(cluster: Cluster, kind: str, field: str) -> Cluster:
    """Return the cluster with twice the number in a field of all devices of a type."""
    doubled = (replace(d, **{field: 2 * getattr(d, field)}) if d.type == kind else d for d in cluster.devices)
    return replace(cluster, devices=tuple(doubled))


def _ten_times(link: Link) -> Link:
    return Link(10 * link.bandwidth, link.latency / 10)
