"""What a cell touches: cells become tasks that name the lane they run on and the resources they read and write.

| resource | meaning |
|---|---|
| ("home", j) | weights of unit j that stay in memory, until the first sweep has brought them there |
| ("w", slot, home) | part of a weight slot filled from a home tier |
| ("wstage", slot, home) | host staging of the weights that come from a disk |
| ("cbuf", b), ("cstage", b) | device buffer and host staging for a gpu_batch's KV of one layer |
| ("hbuf", b), ("hstage", b) | the same for hidden states |
| ("kv", j, k), ("h", k) | KV of layer j of batch k, and hidden states of batch k, in their home |
| ("run", k) | the forward pass of batch k |
| ("near", k), ("far", k) | what delegated attention of batch k needs, then gives, on the device and at its place |
| ("embedded", k) | embedding rows of batch k |
| ("rows", home, k), ("rowstage", home, k) | experts that batch k needs and earlier batches did not, and their staging |

A cell whose attention is delegated is five tasks in place of one: its layer up to the attention, queries and new tokens
to the place that computes attention, attention there, the output to the device, the rest of the layer. Routes name the
lanes of that place. The rest of layer j comes right before the start of layer j + 1 of the same batch, so that (here)
the host attends for it while the device computes the others:

    device  P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 P20 ...     P start, A attention, F rest of layer j, batch k
    cpu         A00 A01 A02     A10     A11     A12 ...

A cell that loads experts by rows is three: its layer up to the experts, their load, the rest of the layer. The rests
come behind the starts of all batches, so that loads run while the device computes; where hidden states pass through
buffers, behind as many as there are buffers. Experts stay in the layer's slot until its last batch is computed: a batch
loads only those that no batch before it has loaded.

    device     C00 C01 C02 R00 R01 R02 C10 ...                  C up to the experts, L load, R rest of layer j, batch k
    disk_read      L00 L01 L02             L10 ...
"""

import enum
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flexengine.places import DISK, HOST, TIERS, is_disk
from flexengine.schedule.demand import NOTHING, Demand
from flexengine.schedule.order import Batch, Cell
from flexengine.schedule.slots import Ring

LOADING = "loading"  # what SETTLE counts as, beside the lanes: it happens once


class Op(enum.Enum):
    SETTLE = "bring weights home"
    LOAD_WEIGHT = "load weight"
    LOAD_CACHE = "load cache"
    LOAD_HIDDEN = "load hidden"
    COMPUTE = "compute"
    STORE_HIDDEN = "store hidden"
    STORE_CACHE = "store cache"
    PROJECT = "compute up to attention"
    SEND = "send queries"
    ATTEND = "attend"
    FETCH = "fetch attention"
    FINISH = "compute from attention on"
    OPEN = "begin the forward pass"
    LOAD_ROWS = "load rows"
    RESUME = "compute from the rows on"


class Task(NamedTuple):
    """One op of a cell. For SETTLE and LOAD_WEIGHT `cell.batch` is -1; for OPEN and the LOAD_ROWS of embedding rows
    `cell.layer` is -1.

    home: tier, or place of attention, the data comes from or goes to.
    hop: which leg of the route (disk -> host staging -> device has two).
    slot, cache, hidden: weight slot, cache buffer and hidden buffer it uses, -1 for none.
    by_rows: whether a LOAD_WEIGHT leaves out the unit's experts, which LOAD_ROWS loads; whether a COMPUTE or FINISH
    ends before the experts, which RESUME computes.
    """

    op: Op
    cell: Cell
    lane: str
    reads: tuple[Hashable, ...]
    writes: tuple[Hashable, ...]
    home: str = ""
    hop: int = 0
    slot: int = -1
    cache: int = -1
    hidden: int = -1
    by_rows: bool = False


class Parts(NamedTuple):
    """Tasks of one cell.

    Attributes:
        loads: of its KV and hidden states.
        compute: the cell, or its start.
        after: tasks that may run while the device computes other cells.
        rest: the rest of the cell, emitted later; empty for a cell of one COMPUTE.
    """

    loads: Sequence[Task]
    compute: Task
    after: Sequence[Task]
    rest: Sequence[Task]


@dataclass(frozen=True)
class Routes:
    """Lanes between each place and the device.

    Attributes:
        load: by place, the lanes from the place to the device. Two lanes mean a stop in host staging.
        store: by place, the lanes from the device to the place.
        attend: by place that computes attention, the lanes of the question, of attention there and of the answer.
    """

    load: dict[str, tuple[str, ...]]
    store: dict[str, tuple[str, ...]]
    attend: dict[str, tuple[str, str, str]]

    @staticmethod
    @cache
    def between(places: tuple[str, ...], staged: bool) -> "Routes":
        """Return the routes of a machine. Every disk has a lane for reads and a lane for writes.

        Args:
            places: all places of the machine.
            staged: whether disks and device are not directly connected. If they are, RAM is the device, and nothing is
                delegated to the host.
        """
        load: dict[str, tuple[str, ...]] = {HOST: ("h2d",)}
        store: dict[str, tuple[str, ...]] = {HOST: ("d2h",)}
        for disk in filter(is_disk, places):
            load[disk] = (f"{disk}_read", *load[HOST] * staged)
            store[disk] = (*store[HOST] * staged, f"{disk}_write")
        return Routes(load, store, {HOST: ("d2h", "cpu", "h2d")} if staged else {})


STAGED, DIRECT = Routes.between(TIERS, staged=True), Routes.between(TIERS, staged=False)  # of machines with one disk


class Program:
    """Tasks of sweep after sweep, with weight loads running `slots` units ahead across sweep boundaries.

    streamed: per unit (layers, then head chunks) the homes its off-device weights come from, () when all are resident.
    layers: how many of the units are layers (hidden states move between those only). arriving: rising numbers of the
    units with weights that stay in memory and are not there yet, each as often as there are batches of them; they come
    while the first sweep computes. demand: weights that are loaded by rows.
    """

    def __init__(
        self,
        streamed: Sequence[tuple[str, ...]],
        layers: int,
        slots: int,
        routes: Routes,
        arriving: Sequence[int] = (),
        demand: Demand = NOTHING,
    ) -> None:
        self.streamed, self.layers, self.slots, self.routes = streamed, layers, slots, routes
        self.arriving, self.demand = list(arriving), demand
        self.first = bool(arriving)  # whether units may still have to wait for what is to stay
        self.cycle = [j for j, homes in enumerate(streamed) if homes]
        self.weights = Ring("w", slots)
        self.caches, self.hiddens = Ring("c", slots, first=1 % slots), Ring("h", slots, first=1 % slots)
        self.by_rows = False  # whether weight loads of this sweep leave out experts
        self.split = [False] * slots  # the same of the load that was last emitted for each slot

    def sweep(self, number: int, batches: Sequence[Batch], more: bool) -> Iterator[Task]:
        """Tasks of one sweep in program order; `more` lets the loads of the next sweep begin.

        A weight load waits for its slot, and a lane is first come first served; so it is emitted behind the cache and
        hidden loads of the next unit's first cells, which need not wait. Edges know earlier tasks only; so it is
        emitted behind the last task that reads what its slot held. With fewer than three slots a streamed unit is
        finished before the next begins, as holding its slot for longer would leave nothing to load ahead into.
        """
        self.by_rows = self.demand.by_rows(sum(batch.tokens for batch in batches))
        horizon = self.weights.passed + len(self.cycle) + (self._ahead if more else 0)
        if not self.cycle:
            yield from self._settle(number, len(self.streamed))
        yield from self._embedded(number, batches)
        yield from self._weights(number, horizon)
        ahead = min(self.slots, len(batches)) - 1
        waiting: dict[int, Sequence[Task]] = {}  # by batch: the rest of the unit before, which waits for attention
        for j, homes in enumerate(self.streamed):
            started: dict[int, Sequence[Task]] = {}
            late: deque[Sequence[Task]] = deque()  # the rests of cells that wait for experts
            yield from self._settle(number, j)
            for k, batch in enumerate(batches):
                last = list(waiting) == [k]
                yield from waiting.pop(k, ())
                if last:
                    self.weights.give_back()
                while batch.hidden_home != "device" and _buffered(late) == self.slots:
                    yield from late.popleft()  # else this cell would use its buffer
                parts = self._cell(Cell(number, j, k), batch, batches)
                yield from parts.loads
                # With one slot the load cannot wait: this unit's own weights may still be due.
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
        yield from self._weights(number, horizon)
        self.first = False

    @property
    def _ahead(self) -> int:
        """Units of the next sweep that may be loaded in this one. Embedding rows of the next sweep, which every batch
        waits for, are emitted behind these loads: so it is one unit where both are read in one lane."""
        home, load = self.demand.embedding, self.routes.load
        one_lane = home and any(load[home][0] in load[other] for unit in self.streamed for other in unit)
        return min(1 if one_lane else self.slots, len(self.cycle))

    def _embedded(self, sweep: int, batches: Sequence[Batch]) -> Iterator[Task]:
        """Begin all forward passes and load the rows of the embedding that they need, if it is off the device."""
        if not (home := self.demand.embedding):
            return
        yield from self._settle(sweep, 0)
        cells = [Cell(sweep, -1, k) for k in range(len(batches))]
        for cell in cells:
            yield Task(Op.OPEN, cell, "device", self._home(0), (("run", cell.batch),))
        for cell in cells:
            k, lane = cell.batch, self.routes.load[home][0]
            reads = (("run", k), *self._copied(0, home))
            yield Task(Op.LOAD_ROWS, cell, lane, reads, (("embedded", k),), home)

    def _weights(self, sweep: int, horizon: int) -> Iterator[Task]:
        """The loads that may be emitted by now, up to the horizon."""
        while self.weights.free and self.weights.taken < horizon:
            unit = self.cycle[self.weights.taken % len(self.cycle)]
            slot = self.weights.take()
            yield from self._settle(sweep, unit)
            self.split[slot] = split = self.by_rows and bool(self.demand.of(unit))
            # A unit with nothing but experts off the device has one load of no bytes, which reserves the slot.
            homes = (self.demand.others[unit] or self.streamed[unit][:1]) if split else self.streamed[unit]
            # One of the loads speaks for the parts of the slot that this unit leaves empty.
            empty = self.weights.parts(slot, (home for home in self.routes.load if home not in homes))
            for home in homes:
                task = Task(Op.LOAD_WEIGHT, Cell(sweep, unit, -1), "", (), (), home, slot=slot, by_rows=split)
                source = self._copied(unit, home)
                target, stage = self.weights.part(slot, home), self.weights.stage(slot, home)
                *first, last = _route(task, self.routes.load, source, target, stage)
                yield from first
                yield last._replace(writes=last.writes + empty)
                empty = ()

    def _settle(self, sweep: int, unit: int) -> Iterator[Task]:
        """What the units up to this one still lack of the weights that stay in memory. Read in the order of use, so
        behind no load that waits for a slot of a later unit."""
        while self.arriving and self.arriving[0] <= unit:
            j = self.arriving.pop(0)
            yield Task(Op.SETTLE, Cell(sweep, j, -1), self.routes.load[DISK][0], (), (("home", j),))

    def _home(self, unit: int) -> tuple[Hashable, ...]:
        """What a unit needs to have come home. A head may be the embedding, and its chunks come with the first."""
        if not self.first:
            return ()
        return (("home", unit),) if unit < self.layers else (("home", 0), ("home", self.layers))

    def _copied(self, unit: int, home: str) -> tuple[Hashable, ...]:
        """Return what a load of a unit from `home` waits for: the first sweep copies weights to every place but the
        disk of the checkpoint."""
        return () if home == DISK else self._home(unit)

    def _cell(self, cell: Cell, batch: Batch, batches: Sequence[Batch]) -> Parts:
        """Return the tasks of one cell. Hidden states and KV at home on the device are neither loaded nor stored. Where
        attention is delegated nothing is loaded before the start of the layer."""
        j, k = cell.layer, cell.batch
        slot = self.weights.current if self.streamed[j] else -1
        # The whole slot, even what this unit does not fill: the next unit's load must not begin there meanwhile.
        reads = self._home(j)
        reads += self.weights.parts(slot, self.routes.load) if self.streamed[j] else ()
        # With one slot the unit's own load may not have been emitted yet: then it will be in this sweep.
        split = self.split[slot] if self.weights.taken > self.weights.passed else self.by_rows
        experts = self.demand.of(j) if slot >= 0 and split else ()
        compute = Task(Op.COMPUTE, cell, "device", reads, (("run", k),), slot=slot)
        if j == 0 and self.demand.embedding:
            compute = compute._replace(reads=(*reads, ("embedded", k)))
        if j >= self.layers:
            return Parts((), compute, (), ())
        if batch.delegated:
            return self._delegated(compute, batch.attention, reads, experts)
        cache, cache_loads, cache_stores = self._cached(cell, batch, batches)
        hidden, hidden_loads, hidden_stores = self._hidden(cell, batch)
        buffers = (self.caches.buffer(cache),) * (cache >= 0), (self.hiddens.buffer(hidden),) * (hidden >= 0)
        loads = (*cache_loads, *hidden_loads)
        compute = compute._replace(writes=(("run", k), *buffers[0], *buffers[1]), cache=cache, hidden=hidden)
        if not experts:
            return Parts(loads, compute, (*cache_stores, *hidden_stores), ())
        compute = compute._replace(by_rows=True)
        *rows, resume = self._rows(compute, reads, experts)
        resume = resume._replace(writes=(("run", k), *buffers[1]), hidden=hidden)
        return Parts(loads, compute, (*cache_stores, *rows), (resume, *hidden_stores))

    def _cached(self, cell: Cell, batch: Batch, batches: Sequence[Batch]) -> tuple[int, list[Task], list[Task]]:
        """Return the buffer for a batch's KV, its loads and its stores; -1 and none where the KV is on the device."""
        if batch.cache_home == "device":
            return -1, [], []
        j, k = cell.layer, cell.batch
        cache, loads = self.caches.take(), list[Task]()
        buffer, stage = self.caches.buffer(cache), self.caches.stage(cache)
        if any(p.start for p in batch.pieces):
            earlier = tuple(("kv", j, other) for other in range(k) if _continues(batches[other], batch))
            task = Task(Op.LOAD_CACHE, cell, "", (), (), batch.cache_home, cache=cache)
            loads += _route(task, self.routes.load, earlier, buffer, stage)
        task = Task(Op.STORE_CACHE, cell, "", (), (), batch.cache_home, cache=cache)
        return cache, loads, list(_route(task, self.routes.store, (buffer,), ("kv", j, k), stage))

    def _hidden(self, cell: Cell, batch: Batch) -> tuple[int, list[Task], list[Task]]:
        """Return the buffer for a batch's hidden states, loads and stores; -1 and none where those are on the
        device."""
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
        self, compute: Task, place: str, weights: tuple[Hashable, ...], experts: tuple[str, ...]
    ) -> Parts:  # fmt: skip
        """Return a cell whose attention is computed at a place off the device. compute: the cell in one task."""
        cell, slot = compute.cell, compute.slot
        j, k = cell.layer, cell.batch
        run, near, far = ("run", k), ("near", k), ("far", k)
        down, there, up = self.routes.attend[place]
        attend = (
            Task(Op.SEND, cell, down, (near,), (far,), place),
            Task(Op.ATTEND, cell, there, (far,), (("kv", j, k), far), place),
            Task(Op.FETCH, cell, up, (far,), (near,), place),
        )
        split = bool(experts)
        finish = Task(Op.FINISH, cell, "device", (*weights, near), (run,), slot=slot, by_rows=split)
        rest = self._rows(compute, weights, experts) if experts else ()
        return Parts((), compute._replace(op=Op.PROJECT, writes=(run, near)), attend, (finish, *rest))

    def _rows(self, compute: Task, weights: tuple[Hashable, ...], experts: tuple[str, ...]) -> tuple[Task, ...]:
        """Return the load of a cell's experts from their homes, then the rest of the cell.

        compute: the cell up to its experts. The rest waits for the loads of earlier batches, too, as each load waits
        for the one before: an expert may have come with one of those.
        """
        cell, slot, k = compute.cell, compute.slot, compute.cell.batch
        rows = tuple(("rows", home, k) for home in experts)
        loads = list[Task]()
        for home, target in zip(experts, rows, strict=True):
            task = Task(Op.LOAD_ROWS, cell, "", (), (), home, slot=slot, by_rows=True)
            source = (("run", k), *self._copied(cell.layer, home))
            *first, last = _route(task, self.routes.load, source, target, ("rowstage", home, k))
            staging = (self.weights.stage(slot, home),) if first else ()  # not written to by the next unit meanwhile
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
    """One task per leg from source to target; what lies between the legs is the staging buffer."""
    lanes = routes[task.home]
    for hop, lane in enumerate(lanes):
        reads = source if hop == 0 else (stage,)
        writes = (target,) if hop == len(lanes) - 1 else (stage,)
        yield task._replace(lane=lane, reads=reads, writes=writes, hop=hop)


def _buffered(rests: Iterable[Sequence[Task]]) -> int:
    """Return how many rests of cells still use a buffer for hidden states."""
    return sum(any(task.op is Op.RESUME and task.hidden >= 0 for task in rest) for rest in rests)


def _continues(earlier: Batch, later: Batch) -> bool:
    """Whether `later` holds a piece of a sequence that `earlier` began in this sweep."""
    begun = {p.sequence for p in earlier.pieces}
    return any(p.sequence in begun for p in later.pieces)
