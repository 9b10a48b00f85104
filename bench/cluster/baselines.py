"""Plans of simpler planners, for comparison: even layers, PipeEdge's balanced partition and FlexGen's 8 bits, which use
one format, and least harm without a look at seconds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from flexengine.plan.cluster.case_costs import Array, CaseCosts
from flexengine.plan.cluster.costs import ClusterPlan, ClusterTask, Costs, Order, orders
from flexengine.plan.cluster.job import Shape, batches
from flexengine.plan.cluster.program import solve

Partition = Callable[[CaseCosts, int], Sequence[int] | None]


def uniform(task: ClusterTask, batch: int | None = None) -> ClusterPlan | None:
    """Return the plan with equally many layers on each device, in the order of the file, or None if none fits.

    As many rows as possible are alive, divided evenly over the stages, in the most exact format that fits.
    """
    return _one_format(task, [task.cluster.devices], lambda numbers, choice: even(numbers.units, numbers.stages), batch)


def pipe_edge(task: ClusterTask, batch: int | None = None) -> ClusterPlan | None:
    """Return the plan of PipeEdge's partition (Hu et al. 2021), or None if none fits.

    The partition has the least slowest stage in prefill, as PipeEdge was made for models without decode steps. As many
    rows as possible are alive, in the most exact format that fits; all orders of device types are tried.
    """
    return _one_format(task, orders(task.cluster), balanced, batch)


def flexgen_int8(task: ClusterTask, batch: int) -> ClusterPlan | None:
    """Return the plan of FlexGen's pipeline in 8 bits: equally many layers on each device, in the order of the file; as
    few layers as possible on the hosts. None if none fits.

    Rows pass in as many micro-batches as there are stages or all together, and all at once or in rounds: the fastest.
    """
    order, eight = task.cluster.devices, replace(task, formats=("int8",), harm=task.harm[:, _column(task, "int8")])
    costs, found = Costs(eight), []
    for size in batches(batch):
        for micro in {math.ceil(size / len(order)), size}:
            shape = Shape(size, micro, micro)
            numbers = costs.numbers(order, shape)
            stages = even(numbers.units, numbers.stages)
            homes = _fewest_on_hosts(numbers, stages)
            found.append(ClusterPlan(eight, order, shape, numbers, stages, homes))
    return min((p for p in found if p.priced.fits), key=lambda p: p.priced.seconds, default=None)


def _column(task: ClusterTask, form: str) -> slice:
    place = task.formats.index(form)
    return slice(place, place + 1)


def _fewest_on_hosts(numbers: CaseCosts, stages: Sequence[int]) -> list[int]:
    """Return the choice of each unit of a case with one format: its first units' weights are on the host in each stage,
    as few as fit; all of them if none fits."""
    homes = [0] * len(stages)
    if len(numbers.choices) == 1:
        return homes
    for j in range(numbers.stages):
        own = [i for i, stage in enumerate(stages) if stage == j]
        for count in range(len(own) + 1):
            for i in own:
                homes[i] = int(i < own[0] + count)
            cells = [(j, numbers.classes[i], homes[i]) for i in own]
            used = sum(numbers.memory[c] for c in cells) + max(numbers.slots[c] for c in cells)
            if used + numbers.fixed_memory[j] <= numbers.capacity[j]:
                break
    return homes


def adabits(task: ClusterTask, batch: int) -> ClusterPlan | None:
    """Return the plan of least harm, without a look at seconds ("pure adabits"), or None if none fits: the start of
    LLM-PQ's bit transfer. The micro-batches are PipeEdge's; of all orders of device types the fastest counts."""
    costs = Costs(task)

    def found() -> Iterator[ClusterPlan]:
        for order in orders(task.cluster):
            micro = math.ceil(batch / len(order))
            shape = Shape(batch, micro, micro)
            numbers = costs.numbers(order, shape)
            answer = solve(numbers, gap=1e-3, quality=True) if len(order) <= numbers.units else None
            if answer is not None:
                yield ClusterPlan(task, order, shape, numbers, answer.stage_of, answer.choice_of)

    plans = [plan for plan in found() if plan.priced.fits]
    least = min((plan.priced.harm for plan in plans), default=0.0)
    near = [plan for plan in plans if plan.priced.harm <= least * 1.01]
    return min(near, key=lambda plan: plan.priced.seconds, default=None)


def _one_format(
    task: ClusterTask, tried: Sequence[Order], partition: Partition, batch: int | None
) -> ClusterPlan | None:
    costs = Costs(task)
    for size in [batch] if batch else batches(task.job.rows):
        for choice, picked in enumerate(task.choices):
            if picked.host:
                continue
            plans = []
            for order in tried:
                micro = math.ceil(size / len(order))
                shape = Shape(size, micro, micro)
                numbers = costs.numbers(order, shape)
                stages = partition(numbers, choice) if len(order) <= numbers.units else None
                if stages is not None:
                    kinds = np.array(numbers.classes)
                    seconds = numbers.decode[np.array(stages), kinds, choice]
                    if np.all(np.isfinite(seconds)):
                        plans.append(ClusterPlan(task, order, shape, numbers, stages, [choice] * numbers.units))
            if (best := among(plans)) is not None:
                return best
    return None


def even(units: int, stages: int) -> list[int]:
    """Return the stage of each unit if the stages have equally many; the first ones have the rest."""
    sizes = [units // stages + (j < units % stages) for j in range(stages)]
    return [j for j, size in enumerate(sizes) for _ in range(size)]


def balanced(numbers: CaseCosts, choice: int) -> list[int] | None:
    """Return the contiguous partition that fits with the least slowest prefill stage, or None.

    Dynamic program: least[j][i] is the least slowest stage if the first i units are in the first j stages.
    """
    stages, units = numbers.stages, numbers.units
    kinds = np.array(numbers.classes)

    def sums(table: Array, j: int) -> Array:
        return np.concatenate([[0.0], np.cumsum(table[j, kinds, choice])])

    least = np.full((stages + 1, units + 1), np.inf)
    cut = np.zeros((stages + 1, units + 1), dtype=int)
    least[0, 0] = 0.0
    for j in range(stages):
        seconds, memory = sums(numbers.prefill, j), sums(numbers.memory, j)
        for i in range(1, units + 1):
            starts = np.arange(i)
            slowest = np.maximum(least[j, :i], seconds[i] - seconds[starts] + numbers.fixed_prefill[j])
            over = memory[i] - memory[starts] + numbers.fixed_memory[j] > numbers.capacity[j]
            slowest[over] = np.inf
            cut[j + 1, i] = int(np.argmin(slowest))
            least[j + 1, i] = slowest[cut[j + 1, i]]
    if not np.isfinite(least[stages, units]):
        return None
    stage_of, end = [0] * units, units
    for j in range(stages, 0, -1):
        start = cut[j, end]
        stage_of[start:end] = [j - 1] * (end - start)
        end = start
    return stage_of


def among(plans: Sequence[ClusterPlan]) -> ClusterPlan | None:
    """Return the plan of least cost that fits, or None."""
    return min((p for p in plans if p.priced.fits), key=lambda p: p.priced.cost, default=None)
