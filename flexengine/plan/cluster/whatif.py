"""Changes of a cluster that would make a job shorter, each planned again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexengine.errors import OutOfMemory
from flexengine.plan.cluster import harm
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.cluster.devices import Cluster, Device, Link
from flexengine.plan.cluster.latency import Latency
from flexengine.plan.cluster.model import Format, Model
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


@dataclass(frozen=True)
class Faster:
    """A device that is `factor` times as fast as `latency` says."""

    latency: Latency
    factor: float

    def layer(self, model: Model, layer: int, form: Format, phase: str, batch: int, tokens: float) -> float:
        """Return the seconds of one layer; see `Latency`."""
        return self.latency.layer(model, layer, form, phase, batch, tokens) / self.factor

    def head(self, model: Model, rows: int) -> float:
        """Return the seconds of the logits of some sequences."""
        return self.latency.head(model, rows) / self.factor

    def fixed(self, rows: int) -> float:
        """Return the seconds of bookkeeping."""
        return self.latency.fixed(rows) / self.factor


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
        yield f"{name} twice as fast", replace(task, cluster=_each(cluster, name, _faster))
    yield f"one more {kind}", replace(task, cluster=_one_more(cluster, plan.devices[slow]))
    full = max(range(len(plan.devices)), key=lambda k: priced.memory[k] / plan.devices[k].memory)
    if priced.memory[full] >= FULL * plan.devices[full].memory:
        name = plan.devices[full].type
        yield f"{name} with twice the memory", replace(task, cluster=_each(cluster, name, _larger))
    if len(plan.devices) > 1:
        yield "links ten times as fast", replace(task, cluster=_linked(cluster, 10.0))
    if any(choice.host for choice in plan.choices):
        hosts = tuple(replace(d, host_link=2 * d.host_link) for d in cluster.devices)
        yield "links from host to device twice as fast", replace(task, cluster=replace(cluster, devices=hosts))
    fewer = next((form for form in ("int8", "int4", "int3") if form not in task.formats), None)
    if fewer is not None and all(fewer in model.layers[0].bytes for model in task.models.values()):
        formats = (*task.formats, fewer)
        table = harm.assumed(task.model, formats)
        yield f"layers in {fewer} allowed (lossy)", replace(task, formats=formats, harm=table)


def _each(cluster: Cluster, kind: str, change: Callable[[Device], Device]) -> Cluster:
    return replace(cluster, devices=tuple(change(d) if d.type == kind else d for d in cluster.devices))


def _faster(device: Device) -> Device:
    return replace(device, latency=Faster(device.latency, 2.0))


def _larger(device: Device) -> Device:
    return replace(device, memory=2 * device.memory)


def _one_more(cluster: Cluster, device: Device) -> Cluster:
    names = {d.name for d in cluster.devices}
    name = next(f"{device.type}+{k}" for k in range(1, len(names) + 2) if f"{device.type}+{k}" not in names)
    return replace(cluster, devices=(*cluster.devices, replace(device, name=name)))


def _linked(cluster: Cluster, factor: float) -> Cluster:
    def faster(link: Link) -> Link:
        return Link(link.bandwidth * factor, link.latency / factor)

    pairs = {pair: faster(link) for pair, link in cluster.pairs.items()}
    return replace(cluster, within=faster(cluster.within), between=faster(cluster.between), pairs=pairs)
