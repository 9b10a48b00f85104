"""Tasks of cells in parts, and of embedding rows.

Attention computed where the KV cache lies: on the host, or on an attention worker (FlexGen section 4.2, Lamina).

| resource | meaning |
|---|---|
| ("near", k), ("far", k) | q, k, v of batch k, then the output of attention: on the device (near), at the place (far) |
| ("near kv", k), ("far kv", k) | k, v of batch k, if its queries go first |

A cell has five tasks: the layer up to attention (device), copy of q, k, v to this place, attention, copy of its output
to the device, rest of the layer (device). `Routes.attend` has the lanes of the copies and of attention. The place
computes attention of one batch while the device computes other batches:

    device  P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 P20 ...     P start, A attention, F rest of layer j, batch k
    cpu         A00 A01 A02     A10     A11     A12 ...

Pages of a disk are read to host staging before attention, and written after it, so they do not reach the device. Hidden
states that live off the device are loaded before the first part, and stored after the last one.

If queries go first, the start of such a cell computes queries only, and three more tasks follow the copy of q: keys
and values (device), their copy, and attention over cached tokens, which needs neither. Attention then adds the new
tokens:

    device        P00 K00         F00 P10 K10         F10 P20 ...     K keys and values, S copies, C cached tokens
    worker1_send      S00 S00             S10 S10
    worker1               C00 A00             C10 A10

Weights of which a sweep loads only the rows that its tokens use: the embedding, and experts.

| resource | meaning |
|---|---|
| ("embedded", k) | embedding rows of batch k |
| ("rows", home, k), ("rowstage", home, k) | experts that batch k is the first to need, in the slot and in staging |

A cell that loads experts has three tasks: the layer up to the experts, their load, the rest of the layer. Experts stay
in the slot until the layer's last batch is computed, so each is loaded once per sweep.

    device     C00 C01 C02 R00 R01 R02 C10 ...                  C up to the experts, L load, R rest of layer j, batch k
    disk_read      L00 L01 L02             L10 ...
"""

from collections.abc import Iterator

from flexengine.places import DEVICE
from flexengine.schedule.expand import WholeCell
from flexengine.schedule.frame import ProgramFrame, slot_stage
from flexengine.schedule.order import NO_LAYER, Cell, CellPart, CellStep
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.tasks import Copy, Delegate, Op, Resources, Task, legs


class ExpertCell(WholeCell):
    """Expands cells that load their experts after the router has chosen them."""

    def __init__(self, frame: ProgramFrame, prefetch: Prefetch) -> None:
        super().__init__(frame, prefetch)
        self._hidden: dict[int, int | None] = {}  # by gpu_batch: hidden buffer of its present cell

    def __call__(self, step: CellStep) -> Iterator[Task]:
        k = step.cell.batch
        if step.part is CellPart.TO_EXPERTS:
            cache, self._hidden[k] = self.take_buffers(step)
            yield from self.load_cache(step, cache)
            yield from self.load_hidden(step, self._hidden[k])
            yield from self.prefetch.in_cell(step)
            yield self.compute(Op.COMPUTE, step, cache, self._hidden[k], by_rows=True)
            yield from self.store_cache(step, cache)
            yield from self.load_experts(step)
        else:
            hidden = self._hidden.pop(k)
            yield self.resume(step, hidden)
            yield from self.store_hidden(step, hidden)

    def load_experts(self, step: CellStep) -> Iterator[Copy]:
        """Yield the loads of a cell's experts, one per tier and leg.

        An earlier batch may have loaded an expert of this cell. So each load waits for the load of the batch before.
        """
        frame, cell, k = self.frame, step.cell, step.cell.batch
        slot = self.prefetch.slot(cell.layer)
        assert slot is not None
        for home in self.prefetch.experts(cell.layer):
            copy = Copy(Op.LOAD_ROWS, cell, home=home, buffer=slot, by_rows=True)
            lanes = frame.routes.load[home]
            source = (("run", k), *self.prefetch.copied(cell.layer, home))
            # The staging is read by all legs: the next unit must not write there meanwhile.
            staging: Resources = (slot_stage(slot, home),) if len(lanes) > 1 else ()
            before: Resources = (("rows", home, k - 1),) if k else ()
            for leg in legs(copy, lanes, source, ("rowstage", home, k), (("rows", home, k),)):
                leg.reads += staging + (before if leg.hop == len(lanes) - 1 else ())
                yield leg

    def resume(self, step: CellStep, hidden: int | None = None) -> Task:
        """Return the task that computes the rest of a layer after its experts were loaded."""
        rows = tuple(("rows", home, step.cell.batch) for home in self.prefetch.experts(step.cell.layer))
        return self.compute(Op.RESUME, step, hidden=hidden, reads=rows)


def embedding_rows(frame: ProgramFrame, prefetch: Prefetch, sweep: int) -> Iterator[Task]:
    """Yield the tasks that begin all forward passes and load their embedding rows."""
    home = frame.demand.embedding
    lane = frame.routes.load[home][0]
    yield from prefetch.arrivals(0)
    cells = [Cell(sweep, NO_LAYER, k) for k in range(len(frame.batches))]
    for cell in cells:
        yield Task(Op.OPEN, cell, DEVICE, prefetch.resident(0), (("run", cell.batch),))
    for cell in cells:
        reads = (("run", cell.batch), *prefetch.copied(0, home))
        yield Copy(Op.LOAD_ROWS, cell, lane, reads, (("embedded", cell.batch),), home)
        # In this lane, the weights of layer 0 precede rows of later batches, which are read while batch 0 is computed.
        if cell.batch == 0 and any(frame.routes.load[tier][0] == lane for tier in frame.streamed[0]):
            yield from prefetch.loads(1)


class DelegatedCell(WholeCell):
    """Expands cells with delegated attention."""

    def __init__(self, frame: ProgramFrame, prefetch: Prefetch) -> None:
        super().__init__(frame, prefetch)
        self._experts = ExpertCell(frame, prefetch)

    def __call__(self, step: CellStep) -> Iterator[Task]:
        batch, near = self.batch(step), ("near", step.cell.batch)
        hidden = None if batch.hidden_home == DEVICE else self.frame.hiddens.take()
        if step.part is CellPart.TO_ATTENTION:
            stage = self.frame.caches.take() if batch.moves_pages else None
            yield from self.read_pages(step, stage)
            yield from self.load_hidden(step, hidden)
            yield from self.prefetch.in_cell(step)
            yield self.compute(Op.PROJECT, step, hidden=hidden, writes=(near,))
            yield from self.attention(step, stage)
            yield from self.write_pages(step, stage)
        else:
            if self.prefetch.halves:
                yield from self.prefetch.in_cell(step)
            by_rows = bool(self.prefetch.experts(step.cell.layer))
            yield self.compute(Op.FINISH, step, hidden=None if by_rows else hidden, by_rows=by_rows, reads=(near,))
            if by_rows:
                yield from self._experts.load_experts(step)
                yield self._experts.resume(step, hidden)
            yield from self.store_hidden(step, hidden)

    def read_pages(self, step: CellStep, stage: int | None) -> Iterator[Copy]:
        """Yield the read of the pages of a disk to host staging, the first leg of their way to the device."""
        for leg in self.load_cache(step, stage):
            if leg.hop == 0 and stage is not None:
                leg.writes = (self.frame.caches.stages[stage],)
                yield leg

    def write_pages(self, step: CellStep, stage: int | None) -> Iterator[Copy]:
        """Yield the write of changed pages from host staging to a disk, the last leg of their way from the device."""
        *_, last = self.store_cache(step, stage) or (None,)
        if last is not None and stage is not None:
            last.reads = (self.frame.caches.stages[stage],)
            yield last

    def attention(self, step: CellStep, stage: int | None = None) -> Iterator[Task]:
        """Yield the tasks that may run while the device computes other cells. stage: number of the staging with the
        pages; None if they lie at the place."""
        cell, place = step.cell, self.batch(step).attention
        send, attend, fetch = self.frame.routes.attend[place]
        k = cell.batch
        near, far, kv = ("near", k), ("far", k), ("kv", cell.layer, k)
        queried: Resources = (far,)
        yield Delegate(Op.SEND, cell, send, (near,), (far,), place)
        if self.batch(step).queries_first:
            near_kv, far_kv = ("near kv", k), ("far kv", k)
            yield self.compute(Op.PROJECT_KEYS, step, writes=(near_kv,))
            yield Delegate(Op.SEND_KEYS, cell, send, (near_kv,), (far_kv,), place)
            yield Delegate(Op.ATTEND_CACHED, cell, attend, (far,), (far,), place)
            queried = (far, far_kv)
        yield from self.prefetch.projected(step)
        home = "" if stage is None else self.batch(step).cache_home
        pages = kv if stage is None else self.frame.caches.stages[stage]
        yield Delegate(Op.ATTEND, cell, attend, queried, (pages, far), place, home, stage)
        yield Delegate(Op.FETCH, cell, fetch, (far,), (near,), place)
