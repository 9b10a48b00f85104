"""Tasks of a cell: FlexGen's six operations (algorithm 1). Cells in parts: `parts`.

In the stages of a pipeline, hidden states enter before the first layer of a stage, and leave after the last. A port is
the object through which they pass from one stage to the next (`worker.hidden`).

| resource | meaning |
|---|---|
| ("before", k), ("after", k) | hidden states of batch k in the ports before the first and after the last layer |
| ("inbuf", b), ("outbuf", b) | device buffers between these ports and the forward passes, one per weight slot |
"""

from collections.abc import Hashable, Iterable, Iterator

from flexengine.places import DEVICE
from flexengine.schedule.batches import Batch, continues
from flexengine.schedule.frame import AFTER, BEFORE, ProgramFrame, Ring
from flexengine.schedule.order import CellStep
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.tasks import Compute, Copy, Op, Resources, Task, legs

_BEGIN = (Op.COMPUTE, Op.PROJECT)  # operations that take the input of a layer
_END = (Op.COMPUTE, Op.FINISH, Op.RESUME)  # operations that give its output


class WholeCell:
    """Expands a cell that is computed at once. Data that stays on the device needs no load and no store."""

    def __init__(self, frame: ProgramFrame, prefetch: Prefetch) -> None:
        self.frame, self.prefetch = frame, prefetch

    def __call__(self, step: CellStep) -> Iterator[Task]:
        """Yield the tasks of a step."""
        cache, hidden = self.take_buffers(step)
        yield from self.load_cache(step, cache)
        yield from self.load_hidden(step, hidden)
        yield from self.prefetch.in_cell(step)  # load weight, of units ahead, if one is due
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
            step: the cell, or its part.
            cache, hidden: numbers of the buffers.
            by_rows: whether another task computes the experts.
            reads, writes: further resources.
        """
        frame, cell = self.frame, step.cell
        for unit in range(cell.layer, cell.layer + step.layers):
            reads += self.prefetch.reads(unit, op)
        if cell.layer == 0 and op in _BEGIN:
            reads += frame.entering(cell.batch)
        writes = (("run", cell.batch), *writes)
        writes += () if cache is None else (frame.caches.buffers[cache],)
        writes += () if hidden is None else (frame.hiddens.buffers[hidden],)
        if cell.layer + step.layers == frame.layers and op in _END and not by_rows:
            writes += frame.leaving(cell.batch)
        slot = self.prefetch.slot(cell.layer)
        return Compute(op, cell, DEVICE, reads, writes, slot, cache, hidden, by_rows, step.layers)

    def load_cache(self, step: CellStep, buffer: int | None) -> Iterable[Copy]:
        """Return the loads of a batch's cached KV of one layer, after the stores of KV that it reads in this sweep.

        Stores of later batches may overwrite the same pages, of a window. They need no edge: they follow their own
        cell, which follows this one on the device's lane.
        """
        batch, (_, layer, k) = self.batch(step), step.cell
        if buffer is None or not any(piece.start for piece in batch.pieces):
            return ()
        earlier = (other for other in range(k) if continues(self.frame.batches[other], batch))
        copy = Copy(Op.LOAD_CACHE, step.cell, home=batch.cache_home, buffer=buffer)
        return self._load(copy, self.frame.caches, tuple(("kv", layer, other) for other in earlier))

    def store_cache(self, step: CellStep, buffer: int | None) -> Iterable[Copy]:
        """Return the stores of the KV that a cell appended."""
        if buffer is None:
            return ()
        copy = Copy(Op.STORE_CACHE, step.cell, home=self.batch(step).cache_home, buffer=buffer)
        return self._store(copy, self.frame.caches, ("kv", step.cell.layer, step.cell.batch))

    def load_hidden(self, step: CellStep, buffer: int | None) -> Iterable[Copy]:
        """Return the loads of a batch's hidden states. The first layer has no stored input."""
        if buffer is None or step.cell.layer == 0:
            return ()
        copy = Copy(Op.LOAD_HIDDEN, step.cell, home=self.batch(step).hidden_home, buffer=buffer)
        return self._load(copy, self.frame.hiddens, (("h", step.cell.batch),))

    def store_hidden(self, step: CellStep, buffer: int | None) -> Iterable[Copy]:
        """Return the stores of a batch's hidden states. The output of the last layer stays on the device."""
        if buffer is None or step.cell.layer == self.frame.layers - 1:
            return ()
        copy = Copy(Op.STORE_HIDDEN, step.cell, home=self.batch(step).hidden_home, buffer=buffer)
        return self._store(copy, self.frame.hiddens, ("h", step.cell.batch))

    def _load(self, copy: Copy, ring: Ring, source: Resources) -> Iterable[Copy]:
        number = copy.buffer or 0
        lanes = self.frame.routes.load[copy.home]
        return legs(copy, lanes, source, ring.stages[number], (ring.buffers[number],))

    def _store(self, copy: Copy, ring: Ring, target: Hashable) -> Iterable[Copy]:
        number = copy.buffer or 0
        lanes = self.frame.routes.store[copy.home]
        return legs(copy, lanes, (ring.buffers[number],), ring.stages[number], (target,))


def with_ports(frame: ProgramFrame, step: CellStep, tasks: Iterator[Task]) -> Iterator[Task]:
    """Yield the tasks of a step in a stage. ENTER precedes a gpu_batch's first cell, LEAVE follows its last one."""
    cell, k = step.cell, step.cell.batch
    if BEFORE in frame.ports and cell.layer == 0 and step.part.begins:
        yield Task(Op.ENTER, cell, "enter", ((BEFORE, k),), (("inbuf", k % frame.slots),))
    yield from tasks
    if AFTER in frame.ports and cell.layer + step.layers == frame.layers and step.part.ends:
        yield Task(Op.LEAVE, cell, "leave", frame.leaving(k), ((AFTER, k),))
