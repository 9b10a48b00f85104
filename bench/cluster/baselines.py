"""Plans of simpler planners, for comparison: even layers, and PipeEdge's balanced partition. Both use one format."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from flexengine.plan.cluster.case_costs import Array, CaseCosts
from flexengine.plan.cluster.costs import ClusterPlan, ClusterTask, Costs, Order, orders
from flexengine.plan.cluster.job import Shape, batches

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
