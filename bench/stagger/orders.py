"""Staggered pipelines: gpu_batches that take turns on replicas of the model and on one attention pool (Lamina 3.3).

A slice is what a device computes between two attentions: the rest of a layer, and the next layer up to its attention.
A slice takes t_m seconds, and attention of a gpu_batch t_a on the whole pool. Each slice has a number; slices and their
attention run in the order of these numbers, and replica `number mod replicas` computes the slice. The rotational order
of n = 3, with t_a = t_m / 2 (S slice, A attention of layer j, gpu_batch k):

    number      0   1   2   3   4   5   6   7
    replica 0   S00-----S02-----S11-----S20-----
    replica 1       S01-----S10-----S12-----S21-----
    pool                A00 A01 A02 A10 A11 A12 A20 A21

| order | gpu_batches | replicas | number of slice j of gpu_batch k | a replica holds |
|---|---|---|---|---|
| fixed | n - 1 | n - 1 | k + j (n - 1) | all layers, and keeps its gpu_batch |
| rotational | n | n - 1 | k + j n | all layers |
| interleaved | n | n - 1 | k (n - 1) + j n | layers r, r + n - 1, r + 2 (n - 1), ... |

In the last two orders with t_a = t_m / (n - 1), the number is the time of the start in units of t_a. In the interleaved
order, replica r is a stage without copies: k (n - 1) + j n mod (n - 1) is j mod (n - 1), and a gpu_batch starts right
after the one before. `Program` with delegated attention has the rotational order with one replica.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task

POOL = "pool"  # the lane of attention

_STARTS = (Op.COMPUTE, Op.PROJECT)  # each cell has one task of these

Span = tuple[Task, float, float]  # task, start and end in seconds


class Slice(NamedTuple):
    """One slice of one gpu_batch.

    Attributes:
        number: place in the order of all slices.
        cell: gpu_batch, and layer whose attention follows.
        replica: number of the replica that computes it.
    """

    number: int
    cell: Cell
    replica: int


@dataclass(frozen=True)
class Stagger:
    """An order of slices.

    Attributes:
        batches: number of gpu_batches.
        replicas: number of replicas.
        apart: difference of the numbers of a layer's slices of two consecutive gpu_batches.
    """

    batches: int
    replicas: int
    apart: int = 1

    def slices(self, layers: int) -> list[Slice]:
        """Return the slices of all gpu_batches in a number of layers, in order."""
        found = (
            (cell.batch * self.apart + cell.layer * self.batches, cell)
            for cell in starmap(Cell, product((0,), range(layers), range(self.batches)))
        )
        return [Slice(number, cell, number % self.replicas) for number, cell in sorted(found)]

    def program(self, layers: int) -> Iterator[Task]:
        """Yield the tasks: each slice on the lane of its replica, its attention on the lane of the pool.

        If another replica computes the next slice, the residual stream moves there during attention, on a lane of the
        replica that it leaves.
        """
        for number, cell, replica in self.slices(layers):
            k, lane = cell.batch, replica_lane(replica)
            run, near, far, moved = ("run", k), ("near", k), ("far", k), ("after", k)
            yield Task(Op.COMPUTE, cell, lane, (far, moved), (run, near))
            yield Task(Op.ATTEND, cell, POOL, (near,), (far,))
            if cell.layer + 1 < layers and (number + self.batches) % self.replicas != replica:
                yield Task(Op.LEAVE, cell, f"{lane}_leave", (run,), (moved,))


def fixed(n: int) -> Stagger:
    """Return the order in which each of n - 1 replicas keeps its gpu_batch, and waits during its attention."""
    return Stagger(n - 1, n - 1)


def rotational(n: int) -> Stagger:
    """Return the order in which n gpu_batches move over n - 1 replicas."""
    return Stagger(n, n - 1)


def interleaved(n: int) -> Stagger:
    """Return the order in which n gpu_batches move over n - 1 stages, of which each holds every (n - 1)th layer."""
    return Stagger(n, n - 1, apart=n - 1)


def replica_lane(replica: int) -> str:
    """Return the lane of a replica's slices."""
    return f"replica{replica}"


@dataclass(frozen=True)
class Steady:
    """A pipeline between filling and draining.

    Attributes:
        period: seconds per layer of all gpu_batches.
        busy: by lane, the share of the time in which it works.
    """

    period: float
    busy: dict[str, float]


def steady(spans: Iterable[Span], first: int, last: int) -> Steady:
    """Return the pace of a pipeline between two layers.

    The window begins when gpu_batch 0 starts the slice of layer `first`, and ends when it starts that of layer `last`.
    So a window of a multiple of `replicas` layers has equally many slices on each replica.
    """
    spans = list(spans)
    starts = {task.cell.layer: start for task, start, _ in spans if task.op in _STARTS and task.cell.batch == 0}
    begin, end = starts[first], starts[last]
    busy = dict.fromkeys((task.lane for task, _, _ in spans), 0.0)
    for task, start, stop in spans:
        busy[task.lane] += max(0.0, min(stop, end) - max(start, begin))
    seconds = end - begin
    return Steady(seconds / (last - first), {lane: work / seconds for lane, work in busy.items()})
