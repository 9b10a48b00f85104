"""Slices of gpu_batches that take turns on several engines (Lamina, section 3.3).

A slice is what one engine computes between two attentions of a gpu_batch: the rest of layer j - 1, then layer j up to
its attention. Slice 0 begins with the embedding, slice L ends with the head. The first engine, number 0, computes these
two for all gpu_batches; it holds the embedding, the head, the page tables and the connections to attention workers. The
other engines are replicas of the layers, processes that hold weights only (guests/replicas).

| order | engine of slice j of gpu_batch k, of R engines | |
|---|---|---|
| fixed | k mod R | each engine keeps its gpu_batches |
| rotational | (j + k) mod R | R + 1 gpu_batches keep R engines busy |

Slices have the order of the cells in parts of `schedule.order`: 00 01 02 10 11 12 ... (slice, gpu_batch), so each
engine has its slices in that order, too, and the place of attention is asked in that order.

| resource | meaning |
|---|---|
| ("turn", k) | slice of batch k that another engine computes |
| ("moved", k) | hidden states of batch k, at the engine that computes its next slice |
| ("near", k), ("run", k) | as in `parts` and `tasks`: q, k, v or attention of batch k; its forward pass |

Rotational order of two engines, three gpu_batches (S slice j, k; A attention):

    device          S00---S02---S11---S20---S22---
    replica1           S01---S10---S12---S21---
    worker1               A00A01A02A10A11A12A20A21
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flexengine.places import Lane
from flexengine.policy import ROTATIONAL
from flexengine.schedule.order import Cell, CellPart, CellStep
from flexengine.schedule.parts import DelegatedCell
from flexengine.schedule.tasks import Op, Task


@dataclass(frozen=True)
class Turns:
    """Which engine computes a slice.

    Attributes:
        engines: number of engines.
        layers: number of layers.
        order: "fixed" or "rotational".
    """

    engines: int
    layers: int
    order: str

    def engine(self, number: int, batch: int) -> int:
        """Return the number of the engine that computes a slice; 0 is the first one. number: of the slice."""
        if number in (0, self.layers):
            return 0
        return (number * (self.order == ROTATIONAL) + batch) % self.engines


class ReplicaLanes(NamedTuple):
    """The lanes of an engine other than the first one.

    Hidden states have a lane of their own: they wait for the end of a slice, and attention that is handed over must not
    wait behind them.
    """

    enter: Lane  # hidden states to it
    send: Lane  # attention to it
    slices: Lane  # its slices

    @staticmethod
    def of(engine: int) -> "ReplicaLanes":
        """Return the lanes of an engine. engine: its number, 1 or more."""
        name = f"replica{engine}"
        return ReplicaLanes(Lane(f"{name}_enter", "send"), Lane(f"{name}_send", "send"), Lane(name, "fetch"))


class TurnsCell(DelegatedCell):
    """Expands cells with delegated attention whose slices take turns."""

    def __call__(self, step: CellStep) -> Iterator[Task]:
        turns, (_, layer, k) = self.frame.turns, step.cell
        assert turns is not None
        begins = step.part is CellPart.TO_ATTENTION
        engine = turns(layer if begins else layer + 1, k)
        if not engine:
            yield from super().__call__(step)
        elif begins:
            writes = (("turn", k), ("run", k), ("near", k))
            yield Task(Op.TAKE_BACK, step.cell, ReplicaLanes.of(engine).slices, (), writes)
            yield from self.attention(step)
        else:
            reads = (("near", k), ("moved", k))
            yield Task(Op.HAND_OVER, step.cell, ReplicaLanes.of(engine).send, reads, (("turn", k),))
        if begins:
            yield from self._move(step.cell, engine, turns(layer + 1, k))

    def _move(self, cell: Cell, engine: int, following: int) -> Iterator[Task]:
        """Yield the task that sends hidden states to the engine of the next slice, while attention is computed."""
        if following not in (0, engine):
            k = cell.batch
            yield Task(Op.LEAVE, cell, ReplicaLanes.of(following).enter, (("run", k),), (("moved", k),))
