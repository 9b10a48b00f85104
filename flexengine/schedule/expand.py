"""Tasks of a cell: FlexGen's six operations (algorithm 1). Parts of cells have expanders of their own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flexengine.places import DEVICE
from flexengine.schedule.batches import Batch, continues
from flexengine.schedule.demand import Demand
from flexengine.schedule.order import CellStep
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.rings import Ring
from flexengine.schedule.routes import Routes
from flexengine.schedule.tasks import Compute, Copy, Op, Resources, Task, legs

_BEGIN = (Op.COMPUTE, Op.PROJECT)  # operations that take the input of a layer
_END = (Op.COMPUTE, Op.FINISH, Op.RESUME)  # operations that give its output


@dataclass
class ProgramFrame:
    """What the expanders of a program share.

    Attributes:
        layers: number of units that are layers.
        slots: number of weight slots.
        routes: lanes of the machine.
        demand: weights that are loaded by rows.
        prefetch: loads of weights.
        caches, hiddens: buffers for KV pages and hidden states.
        batches: gpu_batches of the present sweep.
        entering: functions that return resources which the first layer of a gpu_batch also reads; guests add theirs.
        leaving: functions that return resources which the last layer of a gpu_batch also writes; guests add theirs.
    """

    layers: int
    slots: int
    routes: Routes
    demand: Demand
    prefetch: Prefetch
    caches: Ring
    hiddens: Ring
    batches: Sequence[Batch] = ()
    entering: list[Callable[[int], Resources]] = field(default_factory=list)
    leaving: list[Callable[[int], Resources]] = field(default_factory=list)


class WholeCell:
    """Expands a cell that is computed at once. Data that stays on the device needs no load and no store."""

    def __init__(self, frame: ProgramFrame) -> None:
        self.frame = frame

    def __call__(self, step: CellStep) -> Iterator[Task]:
        """Yield the tasks of a step."""
        cache, hidden = self.take_buffers(step)
        yield from self.load_cache(step, cache)
        yield from self.load_hidden(step, hidden)
        yield from self.frame.prefetch.in_cell(step)  # load weight: those that are due
        yield self.compute(Op.COMPUTE, step, cache, hidden)
        yield from self.store_cache(step, cache)
        yield from self.store_hidden(step, hidden)

    def batch(self, step: CellStep) -> Batch:
        """Return the step's gpu_batch."""
        return self.frame.batches[step.cell.batch]

    def take_buffers(self, step: CellStep) -> tuple[int | None, int | None]:
        """Return the numbers of the device buffers for KV and for hidden states; None for data on the device."""
        batch, is_layer = self.batch(step), step.cell.layer < self.frame.layers
        cache = self.frame.caches.take() if is_layer and batch.cache_home != DEVICE else None
        hidden = self.frame.hiddens.take() if is_layer and batch.hidden_home != DEVICE else None
        return cache, hidden

    def compute(
        self,
        op: Op,
        step: CellStep,
        cache: int | None = None,
        hidden: int | None = None,
        by_rows: bool = False,
        reads: Resources = (),
        writes: Resources = (),
    ) -> Compute:
        """Return a task of the device. It waits for the loads of its buffers, as it writes to them, too.

        Args:
            op: the operation.
            step: the cell, or its part.
            cache, hidden: numbers of the buffers.
            by_rows: whether another task computes the experts.
            reads, writes: further resources.
        """
        frame, cell = self.frame, step.cell
        for unit in range(cell.layer, cell.layer + step.layers):
            reads += frame.prefetch.reads(unit)
        if op in _BEGIN and cell.layer == 0:
            reads += tuple(name for added in frame.entering for name in added(cell.batch))
        writes = (("run", cell.batch), *writes)
        writes += () if cache is None else (frame.caches.buffer(cache),)
        writes += () if hidden is None else (frame.hiddens.buffer(hidden),)
        if op in _END and not by_rows and cell.layer + step.layers == frame.layers:
            writes += tuple(name for added in frame.leaving for name in added(cell.batch))
        slot = frame.prefetch.slot(cell.layer)
        return Compute(op, cell, DEVICE, reads, writes, slot, cache, hidden, by_rows, step.layers)

    def load_cache(self, step: CellStep, buffer: int | None) -> Iterator[Copy]:
        """Yield the loads of a batch's cached KV of one layer, after the stores of KV that it reads in this sweep."""
        if buffer is None or not any(piece.start for piece in self.batch(step).pieces):
            return
        frame, (_, layer, k) = self.frame, step.cell
        earlier = (other for other in range(k) if continues(frame.batches[other], self.batch(step)))
        copy = Copy(Op.LOAD_CACHE, step.cell, home=self.batch(step).cache_home, buffer=buffer)
        source, target = tuple(("kv", layer, other) for other in earlier), (frame.caches.buffer(buffer),)
        yield from legs(copy, frame.routes.load[copy.home], source, frame.caches.stage(buffer), target)

    def store_cache(self, step: CellStep, buffer: int | None) -> Iterator[Copy]:
        """Yield the stores of the KV that a cell appended."""
        if buffer is None:
            return
        frame, (_, layer, k) = self.frame, step.cell
        copy = Copy(Op.STORE_CACHE, step.cell, home=self.batch(step).cache_home, buffer=buffer)
        source, target = (frame.caches.buffer(buffer),), (("kv", layer, k),)
        yield from legs(copy, frame.routes.store[copy.home], source, frame.caches.stage(buffer), target)

    def load_hidden(self, step: CellStep, buffer: int | None) -> Iterator[Copy]:
        """Yield the loads of a batch's hidden states. The first layer has no stored input."""
        if buffer is None or step.cell.layer == 0:
            return
        frame = self.frame
        copy = Copy(Op.LOAD_HIDDEN, step.cell, home=self.batch(step).hidden_home, buffer=buffer)
        source, target = (("h", step.cell.batch),), (frame.hiddens.buffer(buffer),)
        yield from legs(copy, frame.routes.load[copy.home], source, frame.hiddens.stage(buffer), target)

    def store_hidden(self, step: CellStep, buffer: int | None) -> Iterator[Copy]:
        """Yield the stores of a batch's hidden states. The output of the last layer stays on the device."""
        if buffer is None or step.cell.layer == self.frame.layers - 1:
            return
        frame = self.frame
        copy = Copy(Op.STORE_HIDDEN, step.cell, home=self.batch(step).hidden_home, buffer=buffer)
        source, target = (frame.hiddens.buffer(buffer),), (("h", step.cell.batch),)
        yield from legs(copy, frame.routes.store[copy.home], source, frame.hiddens.stage(buffer), target)
