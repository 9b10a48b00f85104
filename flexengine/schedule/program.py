"""Tasks of cells. Each task names the lane it runs on, and the resources it reads and writes.

| resource | meaning |
|---|---|
| ("resident", j) | resident weights of unit j, written once, in the first sweep |
| ("w", slot, home) | part of a weight slot that is filled from tier `home` |
| ("wstage", slot, home) | host staging of a slot's weights from disk `home` |
| ("cbuf", b), ("cstage", b) | device buffer and host staging for a gpu_batch's KV of one layer |
| ("hbuf", b), ("hstage", b) | the same for hidden states |
| ("kv", j, k), ("h", k) | KV of layer j of batch k, and hidden states of batch k, on their tier |
| ("run", k) | the forward pass of batch k |
| ("near", k), ("far", k) | q, k, v of delegated attention of batch k, then its output: on the device, and off it |
| ("near kv", k), ("far kv", k) | k, v of batch k, if its queries go first |
| ("embedded", k) | embedding rows of batch k |
| ("before", k), ("after", k) | hidden states of batch k in the ports before the first and after the last layer |
| ("inbuf", b), ("outbuf", b) | device buffers between these ports and the forward passes |
| ("rows", home, k), ("rowstage", home, k) | experts that batch k is the first to need, in the slot and in staging |

A cell with delegated attention has five tasks: the layer up to attention (device), copy of q, k, v to the place that
computes attention, attention, copy of its output to the device, rest of the layer (device). `Routes.attend` has the
lanes of the other three. The rest of layer j is emitted right before the start of layer j + 1 of the same batch. So the
place computes attention of one batch while the device computes other batches:

    device  P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 P20 ...     P start, A attention, F rest of layer j, batch k
    cpu         A00 A01 A02     A10     A11     A12 ...

If queries go first, the start of such a cell computes queries only, and three more tasks follow the copy of q: keys
and values (device), their copy, and attention over cached tokens, which needs neither. Attention then adds the new
tokens:

    device        P00 K00         F00 P10 K10         F10 P20 ...     K keys and values, S copies, C cached tokens
    worker1_send      S00 S00             S10 S10
    worker1               C00 A00             C10 A10

A cell that loads experts by rows has three tasks: the layer up to the experts, their load, rest of the layer. The rests
are emitted after the starts of all batches, so that loads overlap compute; with hidden buffers, at most one rest per
buffer waits. Experts stay in the slot until the layer's last batch is computed, so each is loaded once per sweep.

    device     C00 C01 C02 R00 R01 R02 C10 ...                  C up to the experts, L load, R rest of layer j, batch k
    disk_read      L00 L01 L02             L10 ...
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flexengine.places import DISK
from flexengine.schedule.demand import NOTHING, Demand
from flexengine.schedule.order import Batch, Cell
from flexengine.schedule.rings import Ring, num_buffers
from flexengine.schedule.routes import Routes
from flexengine.schedule.tasks import LOADING, Op, Task

__all__ = ["AFTER", "BEFORE", "LOADING", "Op", "Program", "Task"]

BEFORE, AFTER = "before", "after"  # ports through which hidden states enter and leave a range of layers


class Parts(NamedTuple):
    """Tasks of one cell.

    Attributes:
        loads: loads of KV and hidden states.
        compute: the whole cell, or its start.
        after: tasks that may run while the device computes other cells.
        rest: the rest of the cell, emitted later; empty if `compute` is the whole cell.
    """

    loads: Sequence[Task]
    compute: Task
    after: Sequence[Task]
    rest: Sequence[Task]


class Program:
    """Tasks of one sweep after the other. Weight loads run up to `slots` units ahead, also into the next sweep.

    Args:
        streamed: by unit (layers, then head chunks), the tiers of its off-device weights; () if all are resident.
        layers: number of units that are layers.
        slots: number of weight slots.
        routes: lanes of the machine.
        arriving: units with resident weights that are not read yet, rising, once per batch of reads. The first sweep
            reads them.
        demand: weights that are loaded by rows.
        ports: BEFORE if hidden states enter from another program, AFTER if they leave to another program.
    """

    def __init__(
        self,
        streamed: Sequence[tuple[str, ...]],
        layers: int,
        slots: int,
        routes: Routes,
        arriving: Sequence[int] = (),
        demand: Demand = NOTHING,
        ports: Collection[str] = (),
    ) -> None:
        self.streamed, self.layers, self.slots, self.routes = streamed, layers, slots, routes
        self.arriving, self.demand, self.ports = list(arriving), demand, ports
        self.first = bool(arriving)  # whether units must wait for resident weights
        self.cycle = [j for j, homes in enumerate(streamed) if homes]
        self.buffers = num_buffers(slots)
        self.weights, self.caches, self.hiddens = Ring("w", slots), Ring("c", self.buffers), Ring("h", self.buffers)
        self.by_rows = False  # whether weight loads of this sweep leave out experts
        self.split = [False] * slots  # by slot: `by_rows` of the last load emitted for it

    def sweep(self, number: int, batches: Sequence[Batch], more: bool) -> Iterator[Task]:
        """Yield the tasks of one sweep in program order.

        A lane runs its tasks in order, and a weight load waits for its slot. So it is emitted after cache and hidden
        loads of the next unit's first cells, which need no slot. Edges link a task to earlier tasks only. So it is also
        emitted after the last task that reads the previous content of its slot. With fewer than three slots a streamed
        unit is finished before the next one begins, as otherwise no slot is free to load ahead.

        Args:
            more: whether to emit the first loads of the next sweep.
        """
        self.by_rows = self.demand.by_rows(sum(batch.tokens for batch in batches))
        horizon = self.weights.passed + len(self.cycle) + (self._ahead if more else 0)
        if not self.cycle:
            yield from self._load_resident(number, len(self.streamed))
        yield from self._embedded(number, batches)
        yield from self._weights(number, horizon)
        ahead = min(self.slots, len(batches)) - 1
        waiting: dict[int, Sequence[Task]] = {}  # by batch: rest of its last cell, after delegated attention
        for j, homes in enumerate(self.streamed):
            started: dict[int, Sequence[Task]] = {}
            late: deque[Sequence[Task]] = deque()  # rests of cells, after loads of experts
            yield from self._load_resident(number, j)
            for k, batch in enumerate(batches):
                last = list(waiting) == [k]
                yield from waiting.pop(k, ())
                if last:
                    self.weights.give_back()
                while batch.hidden_home != "device" and _buffered(late) == self.buffers:
                    yield from late.popleft()  # frees the buffer that this cell uses
                parts = self._cell(Cell(number, j, k), batch, batches)
                yield from parts.loads
                # With one slot, the load of this unit's own weights may not be emitted yet.
                if k == ahead or self.slots == 1 or last:
                    yield from self._weights(number, horizon)
                yield parts.compute
                yield from parts.after
                if parts.rest and parts.compute.op is Op.PROJECT:
                    started[k] = parts.rest
                elif parts.rest:
                    late.append(parts.rest)
            for rest in late:
                yield from rest
            if homes:
                if self.slots < 3:
                    for rest in started.values():
                        yield from rest
                    started = {}
                self.weights.leave(held=bool(started))
            waiting = started
        for rest in waiting.values():  # only if the last unit is a layer: hidden states leave, and there is no head
            yield from rest
        if waiting:
            self.weights.give_back()
        yield from self._weights(number, horizon)
        self.first = False

    @property
    def _ahead(self) -> int:
        """Number of units of the next sweep that may be loaded in this one. It is 1 if embedding rows, which all
        batches wait for, are read in the same lane: they are emitted after these loads."""
        home, load = self.demand.embedding, self.routes.load
        one_lane = home and any(load[home][0] in load[other] for unit in self.streamed for other in unit)
        return min(1 if one_lane else self.slots, len(self.cycle))

    def _embedded(self, sweep: int, batches: Sequence[Batch]) -> Iterator[Task]:
        """Yield the tasks that begin all forward passes and load embedding rows, if these are off the device."""
        if not (home := self.demand.embedding):
            return
        yield from self._load_resident(sweep, 0)
        cells = [Cell(sweep, -1, k) for k in range(len(batches))]
        for cell in cells:
            yield Task(Op.OPEN, cell, "device", self._resident(0), (("run", cell.batch),))
        for cell in cells:
            k, lane = cell.batch, self.routes.load[home][0]
            reads = (("run", k), *self._copied(0, home))
            yield Task(Op.LOAD_ROWS, cell, lane, reads, (("embedded", k),), home)
            # The first batch is computed while rows of the others are read.
            if k == 0 and any(self.routes.load[other][0] == lane for other in self.streamed[0]):
                yield from self._weights(sweep, self.weights.passed + 1)

    def _weights(self, sweep: int, horizon: int) -> Iterator[Task]:
        """Yield weight loads as long as a slot is free, up to unit number `horizon` since the job began."""
        while self.weights.free and self.weights.taken < horizon:
            unit = self.cycle[self.weights.taken % len(self.cycle)]
            slot = self.weights.take()
            yield from self._load_resident(sweep, unit)
            self.split[slot] = split = self.by_rows and bool(self.demand.of(unit))
            # If only experts are off the device, a load of no bytes reserves the slot.
            homes = (self.demand.others[unit] or self.streamed[unit][:1]) if split else self.streamed[unit]
            # The first load also declares the unused parts of the slot as written, to reserve the whole slot.
            empty = self.weights.parts(slot, (home for home in self.routes.load if home not in homes))
            for home in homes:
                task = Task(Op.LOAD_WEIGHT, Cell(sweep, unit, -1), "", (), (), home, slot=slot, by_rows=split)
                source = self._copied(unit, home)
                target, stage = self.weights.part(slot, home), self.weights.stage(slot, home)
                *first, last = _route(task, self.routes.load, source, target, stage)
                yield from first
                yield last._replace(writes=last.writes + empty)
                empty = ()

    def _load_resident(self, sweep: int, unit: int) -> Iterator[Task]:
        """Yield the reads of resident weights of the units up to this one that are not emitted yet. So they precede the
        loads of later units, which wait for slots."""
        while self.arriving and self.arriving[0] <= unit:
            j = self.arriving.pop(0)
            yield Task(Op.LOAD_RESIDENT, Cell(sweep, j, -1), self.routes.load[DISK][0], (), (("resident", j),))

    def _resident(self, unit: int) -> tuple[Hashable, ...]:
        """Return the resident weights that a unit reads. A tied head is the embedding, which is read with unit 0."""
        if not self.first:
            return ()
        return (("resident", unit),) if unit < self.layers else (("resident", 0), ("resident", self.layers))

    def _copied(self, unit: int, home: str) -> tuple[Hashable, ...]:
        """Return the resources that a load from `home` reads. The checkpoint is on the first disk, without copies."""
        return () if home == DISK else self._resident(unit)

    def _cell(self, cell: Cell, batch: Batch, batches: Sequence[Batch]) -> Parts:
        """Return the tasks of one cell. It has no loads if its data is on the device or its attention is delegated."""
        j, k = cell.layer, cell.batch
        slot = self.weights.current if self.streamed[j] else -1
        # Read all parts of the slot, also unused ones: the next unit's load must not begin there meanwhile.
        reads = self._resident(j)
        reads += self.weights.parts(slot, self.routes.load) if self.streamed[j] else ()
        # With one slot the unit's own load may be emitted only later in this sweep.
        split = self.split[slot] if self.weights.taken > self.weights.passed else self.by_rows
        experts = self.demand.of(j) if slot >= 0 and split else ()
        compute = Task(Op.COMPUTE, cell, "device", reads, (("run", k),), slot=slot)
        if j == 0 and self.demand.embedding:
            compute = compute._replace(reads=(*reads, ("embedded", k)))
        if j >= self.layers:
            return Parts((), compute, (), ())
        if batch.delegated:
            return self._ported(self._delegated(compute, batch, reads, experts))
        cache, cache_loads, cache_stores = self._cached(cell, batch, batches)
        hidden, hidden_loads, hidden_stores = self._hidden(cell, batch)
        buffers = (self.caches.buffer(cache),) * (cache >= 0), (self.hiddens.buffer(hidden),) * (hidden >= 0)
        loads = (*cache_loads, *hidden_loads)
        compute = compute._replace(writes=(("run", k), *buffers[0], *buffers[1]), cache=cache, hidden=hidden)
        if not experts:
            return self._ported(Parts(loads, compute, (*cache_stores, *hidden_stores), ()))
        compute = compute._replace(by_rows=True)
        *rows, resume = self._rows(compute, reads, experts)
        resume = resume._replace(writes=(("run", k), *buffers[1]), hidden=hidden)
        return self._ported(Parts(loads, compute, (*cache_stores, *rows), (resume, *hidden_stores)))

    def _ported(self, parts: Parts) -> Parts:
        """Return a cell with its ENTER and LEAVE tasks, if it is in the first or last layer."""
        cell, compute = parts.compute.cell, parts.compute
        k, source, target = cell.batch, ("inbuf", cell.batch % self.slots), ("outbuf", cell.batch % self.slots)
        if BEFORE in self.ports and cell.layer == 0:
            enter = Task(Op.ENTER, cell, "enter", ((BEFORE, k),), (source,))
            compute = compute._replace(reads=(*compute.reads, source))
            parts = parts._replace(loads=(*parts.loads, enter), compute=compute)
        if AFTER in self.ports and cell.layer == self.layers - 1:
            leave = Task(Op.LEAVE, cell, "leave", (target,), ((AFTER, k),))
            last = parts.rest[-1] if parts.rest else compute
            last = last._replace(writes=(*last.writes, target))
            if parts.rest:
                return parts._replace(rest=(*parts.rest[:-1], last, leave))
            return parts._replace(compute=last, after=(*parts.after, leave))
        return parts

    def _cached(self, cell: Cell, batch: Batch, batches: Sequence[Batch]) -> tuple[int, list[Task], list[Task]]:
        """Return the buffer of a batch's KV, loads and stores; -1 and no tasks if the KV is on the device."""
        if batch.cache_home == "device":
            return -1, [], []
        j, k = cell.layer, cell.batch
        cache, loads = self.caches.take(), list[Task]()
        buffer, stage = self.caches.buffer(cache), self.caches.stage(cache)
        if any(p.start for p in batch.pieces):
            earlier = tuple(("kv", j, other) for other in range(k) if continues(batches[other], batch))
            task = Task(Op.LOAD_CACHE, cell, "", (), (), batch.cache_home, cache=cache)
            loads += _route(task, self.routes.load, earlier, buffer, stage)
        task = Task(Op.STORE_CACHE, cell, "", (), (), batch.cache_home, cache=cache)
        return cache, loads, list(_route(task, self.routes.store, (buffer,), ("kv", j, k), stage))

    def _hidden(self, cell: Cell, batch: Batch) -> tuple[int, list[Task], list[Task]]:
        """Return the buffer of a batch's hidden states, loads and stores; -1 and no tasks if they are on the device."""
        if batch.hidden_home == "device":
            return -1, [], []
        j, k = cell.layer, cell.batch
        hidden, loads, stores = self.hiddens.take(), list[Task](), list[Task]()
        buffer, stage = self.hiddens.buffer(hidden), self.hiddens.stage(hidden)
        if j > 0:
            task = Task(Op.LOAD_HIDDEN, cell, "", (), (), batch.hidden_home, hidden=hidden)
            loads += _route(task, self.routes.load, (("h", k),), buffer, stage)
        if j < self.layers - 1:
            task = Task(Op.STORE_HIDDEN, cell, "", (), (), batch.hidden_home, hidden=hidden)
            stores += _route(task, self.routes.store, (buffer,), ("h", k), stage)
        return hidden, loads, stores

    def _delegated(
        self, compute: Task, batch: Batch, weights: tuple[Hashable, ...], experts: tuple[str, ...]
    ) -> Parts:  # fmt: skip
        """Return a cell with attention computed at a place off the device. compute: the cell in one task."""
        cell, slot, place = compute.cell, compute.slot, batch.attention
        j, k = cell.layer, cell.batch
        run, near, far = ("run", k), ("near", k), ("far", k)
        down, there, up = self.routes.attend[place]
        send, attend, fetch = (
            Task(Op.SEND, cell, down, (near,), (far,), place),
            Task(Op.ATTEND, cell, there, (far,), (("kv", j, k), far), place),
            Task(Op.FETCH, cell, up, (far,), (near,), place),
        )
        after: tuple[Task, ...] = (send, attend, fetch)
        if batch.queries_first:
            near_kv, far_kv = ("near kv", k), ("far kv", k)
            keys = Task(Op.PROJECT_KEYS, cell, "device", weights, (run, near_kv), slot=slot)
            send_keys = Task(Op.SEND_KEYS, cell, down, (near_kv,), (far_kv,), place)
            cached = Task(Op.ATTEND_CACHED, cell, there, (far,), (far,), place)
            after = (send, keys, send_keys, cached, attend._replace(reads=(far, far_kv)), fetch)
        split = bool(experts)
        finish = Task(Op.FINISH, cell, "device", (*weights, near), (run,), slot=slot, by_rows=split)
        rest = self._rows(compute, weights, experts) if experts else ()
        return Parts((), compute._replace(op=Op.PROJECT, writes=(run, near)), after, (finish, *rest))

    def _rows(self, compute: Task, weights: tuple[Hashable, ...], experts: tuple[str, ...]) -> tuple[Task, ...]:
        """Return the loads of a cell's experts, one per tier and leg, then the rest of the cell.

        An earlier batch may have loaded an expert of this cell. So each load waits for the load of the batch before.

        Args:
            compute: the cell up to its experts.
            experts: tiers of the experts.
        """
        cell, slot, k = compute.cell, compute.slot, compute.cell.batch
        rows = tuple(("rows", home, k) for home in experts)
        loads = list[Task]()
        for home, target in zip(experts, rows, strict=True):
            task = Task(Op.LOAD_ROWS, cell, "", (), (), home, slot=slot, by_rows=True)
            source = (("run", k), *self._copied(cell.layer, home))
            *first, last = _route(task, self.routes.load, source, target, ("rowstage", home, k))
            staging = (self.weights.stage(slot, home),) if first else ()  # the next unit must not write there meanwhile
            before = (("rows", home, k - 1),) if k else ()
            loads += [t._replace(reads=t.reads + staging) for t in first]
            loads.append(last._replace(reads=last.reads + staging + before))
        return (*loads, Task(Op.RESUME, cell, "device", (*weights, *rows), (("run", k),), slot=slot, by_rows=True))


def _route(
    task: Task,
    routes: dict[str, tuple[str, ...]],
    source: tuple[Hashable, ...],
    target: Hashable,
    stage: Hashable,
) -> Iterator[Task]:
    """Yield one task per leg from `source` to `target`. Two legs meet in the staging buffer `stage`."""
    lanes = routes[task.home]
    for hop, lane in enumerate(lanes):
        reads = source if hop == 0 else (stage,)
        writes = (target,) if hop == len(lanes) - 1 else (stage,)
        yield task._replace(lane=lane, reads=reads, writes=writes, hop=hop)


def _buffered(rests: Iterable[Sequence[Task]]) -> int:
    """Return how many rests of cells still use a buffer for hidden states."""
    return sum(any(task.op is Op.RESUME and task.hidden >= 0 for task in rest) for rest in rests)


def continues(earlier: Batch, later: Batch) -> bool:
    """Return whether `later` reads KV that `earlier` computes: of the same sequence, or of a trunk that it shares."""
    begun = {p.sequence for p in earlier.pieces}
    return any(p.sequence in begun or p.source in begun for p in later.pieces)
