"""The order of cells: what the device computes, one after the other.

A sweep computes the prompts of sequences that enter, and one token of every other live sequence of its cohort. Its
cells are computed layer by layer, so that each layer's weights are needed once per sweep, however many gpu_batches
there are (zig-zag, FlexGen section 4.2). The numbers are the order:

                batch 0   batch 1   batch 2
    layer 0        1         2         3
    layer 1        4         5         6
    head           7         8         9

All schedules have this order of cells; row, zigzag, diagonal and continuous differ in the admission of sequences
(`schedule.sweeps`).

A cell that waits in the middle for data from elsewhere is computed in two parts, with other cells between them:

- Attention at another place (delegation). The second part comes right before the next layer of the same gpu_batch, so
  the place attends for one gpu_batch while the device computes another one: P first part, F second part, of layer j,
  gpu_batch k. With one or two slots, a streamed layer ends before the next one begins: P00 P01 P02 F00 F01 F02 P10 ...

      P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 P20 ...

- Experts that are loaded after the router has chosen them. The second parts come after the first parts of all
  gpu_batches, or earlier if the buffers for hidden states are taken: C up to the choice of experts, R the rest. If
  attention is delegated, too, experts are loaded and used right after F.

      C00 C01 C02 R00 R01 R02 C10 ...

`schedule.program` makes tasks of each cell.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flexengine.places import DEVICE
from flexengine.schedule.batches import Batch

NO_BATCH = -1  # `Cell.batch` of a task that serves all gpu_batches
NO_LAYER = -1  # `Cell.layer` of a task before the first layer


class Cell(NamedTuple):
    """One layer, or one chunk of the head, of one gpu_batch in one sweep. The device computes cell after cell."""

    sweep: int
    layer: int  # number of the unit: layers come first, then head chunks
    batch: int  # number of the gpu_batch in the sweep


class CellPart(enum.Enum):
    """Part of a cell that is computed without a wait for other data."""

    WHOLE = "whole"
    TO_ATTENTION = "up to attention"
    FROM_ATTENTION = "from attention on"
    TO_EXPERTS = "up to experts"
    FROM_EXPERTS = "from experts on"

    @property
    def begins(self) -> bool:
        """Whether it computes a layer from its input on."""
        return self in (CellPart.WHOLE, CellPart.TO_ATTENTION, CellPart.TO_EXPERTS)

    @property
    def ends(self) -> bool:
        """Whether it computes a layer to its output."""
        return self in (CellPart.WHOLE, CellPart.FROM_ATTENTION, CellPart.FROM_EXPERTS)


class CellStep(NamedTuple):
    """A cell, or a part of it, in the order of a sweep."""

    part: CellPart
    cell: Cell
    layers: int = 1  # number of layers, from that of the cell on, that one call of kernels computes


def cells(
    sweep: int,
    units: int,
    batches: Sequence[Batch],
    begin: Callable[[int, int], tuple[CellPart, int]],
    closed: Callable[[int], bool],
    buffers: int,
) -> Iterator[CellStep]:
    """Yield the cells of one sweep in the order in which the device computes them.

    Args:
        units: number of layers and head chunks.
        begin: returns the first part of the cell of a layer and a gpu_batch, and the layers that one call computes.
        closed: returns whether the cells of a layer must end before the next layer begins.
        buffers: device buffers for offloaded hidden states. A cell that waits for experts keeps one.
    """
    done = [0] * len(batches)  # by gpu_batch: layers that are begun
    attending = list[int]()  # gpu_batches whose attention in the layer before is under way
    for j in range(units):
        loading = deque[int]()  # gpu_batches whose experts are under way
        attended = attending.copy()
        for k, batch in enumerate(batches):
            if k in attended:
                attending.remove(k)
                yield CellStep(CellPart.FROM_ATTENTION, Cell(sweep, j - 1, k))
            if j < done[k]:
                continue
            while loading and _buffered(batch) and sum(_buffered(batches[b]) for b in loading) == buffers:
                yield CellStep(CellPart.FROM_EXPERTS, Cell(sweep, j, loading.popleft()))
            part, layers = begin(j, k)
            yield CellStep(part, Cell(sweep, j, k), layers)
            done[k] = j + layers
            if part is CellPart.TO_ATTENTION:
                attending.append(k)
            elif part is CellPart.TO_EXPERTS:
                loading.append(k)
        for k in loading:
            yield CellStep(CellPart.FROM_EXPERTS, Cell(sweep, j, k))
        if closed(j) or j == units - 1:
            for k in attending:
                yield CellStep(CellPart.FROM_ATTENTION, Cell(sweep, j, k))
            attending.clear()


def _buffered(batch: Batch) -> bool:
    """Return whether a gpu_batch's hidden states pass through a device buffer."""
    return batch.hidden_home != DEVICE and not batch.delegated
