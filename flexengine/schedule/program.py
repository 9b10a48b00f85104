"""What a cell touches: cells become tasks that name the lane they run on and the resources they read and write.

| resource | meaning |
|---|---|
| ("home", j) | weights of unit j that stay in memory, until the first sweep has brought them there |
| ("w", slot, home) | part of a weight slot filled from a home tier |
| ("wstage", slot) | host staging of a weight slot on its way from disk |
| ("cbuf", b), ("cstage", b) | device buffer and host staging for a gpu_batch's KV of one layer |
| ("hbuf", b), ("hstage", b) | the same for hidden states |
| ("kv", j, k), ("h", k) | KV of layer j of batch k, and hidden states of batch k, in their home |
| ("run", k) | the forward pass of batch k |
| ("near", k), ("far", k) | what delegated attention of batch k needs, then gives, on the device and on the host |

A cell whose attention is delegated is five tasks in place of one: its layer up to the attention, queries and new tokens
to the host, attention there, the output to the device, the rest of the layer. The rest of layer j comes right before
the start of layer j + 1 of the same batch, so that the host attends for it while the device computes the others:

    device  P00 P01 P02 F00 P10 F01 P11 F02 P12 F10 P20 ...     P start, A attention, F rest of layer j, batch k
    cpu         A00 A01 A02     A10     A11     A12 ...
"""

import enum
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexengine.schedule.order import Batch, Cell

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


class Task(NamedTuple):
    """One op of a cell. For SETTLE and LOAD_WEIGHT `cell.batch` is -1.

    home: tier the data comes from or goes to; hop: which leg of the route (disk -> host staging -> device has two).
    slot, cache, hidden: weight slot, cache buffer and hidden buffer it uses, -1 for none.
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


@dataclass(frozen=True)
class Routes:
    """Lanes a tensor passes on its way from (load) or to (store) each home; two lanes mean a stop in host staging."""

    load: dict[str, tuple[str, ...]]
    store: dict[str, tuple[str, ...]]


STAGED = Routes(
    load={"host": ("h2d",), "disk": ("disk_read", "h2d")},
    store={"host": ("d2h",), "disk": ("d2h", "disk_write")},
)
DIRECT = Routes(load={"host": ("h2d",), "disk": ("disk_read",)}, store={"host": ("d2h",), "disk": ("disk_write",)})


class Program:
    """Tasks of sweep after sweep, with weight loads running `slots` units ahead across sweep boundaries.

    streamed: per unit (layers, then head chunks) the homes its off-device weights come from, () when all are resident.
    layers: how many of the units are layers (hidden states move between those only). arriving: rising numbers of the
    units with weights that stay in memory and are not there yet, each as often as there are batches of them; they come
    while the first sweep computes.
    """

    def __init__(
        self,
        streamed: Sequence[tuple[str, ...]],
        layers: int,
        slots: int,
        routes: Routes,
        arriving: Sequence[int] = (),
    ) -> None:
        self.streamed, self.layers, self.slots, self.routes = streamed, layers, slots, routes
        self.arriving = list(arriving)
        self.first = bool(arriving)  # whether units may still have to wait for what is to stay
        self.cycle = [j for j, homes in enumerate(streamed) if homes]
        self.used = 0  # weight loads whose unit has been walked
        self.held = 0  # 1 if the last of these units has a FINISH to come, which still reads its slot
        self.issued = 0  # weight loads emitted
        self.turn = {"c": 0, "h": 0}

    def sweep(self, number: int, batches: Sequence[Batch], more: bool) -> Iterator[Task]:
        """Tasks of one sweep in program order; `more` lets the loads of the next sweep begin.

        A weight load waits for its slot, and a lane is first come first served; so it is emitted behind the cache and
        hidden loads of the next unit's first cells, which need not wait. Edges know earlier tasks only; so it is
        emitted behind the last task that reads what its slot held. With fewer than three slots a streamed unit is
        finished before the next begins, as holding its slot for longer would leave nothing to load ahead into.
        """
        horizon = self.used + len(self.cycle) + (min(self.slots, len(self.cycle)) if more else 0)
        if not self.cycle:
            yield from self._settle(number, len(self.streamed))
        yield from self._weights(number, horizon)
        ahead = min(self.slots, len(batches)) - 1
        waiting: dict[int, Task] = {}  # by batch: the rest of the unit before
        for j, homes in enumerate(self.streamed):
            started: dict[int, Task] = {}
            yield from self._settle(number, j)
            for k, batch in enumerate(batches):
                cell = Cell(number, j, k)
                last = list(waiting) == [k]
                if k in waiting:
                    yield waiting.pop(k)
                    self.held = 0 if last else self.held
                loads, compute, stores, finish = self._cell(cell, batch, batches)
                yield from loads
                # With one slot the load cannot wait: this unit's own weights may still be due.
                if k == ahead or self.slots == 1 or last:
                    yield from self._weights(number, horizon)
                yield compute
                yield from stores
                if finish:
                    started[k] = finish
            if homes:
                self.used += 1
                if self.slots < 3:
                    yield from started.values()
                    started = {}
                self.held = 1 if started else 0
            waiting = started
        yield from self._weights(number, horizon)
        self.first = False

    def _weights(self, sweep: int, horizon: int) -> Iterator[Task]:
        """The loads that may be emitted by now, up to the horizon."""
        while self.issued < min(self.used - self.held + self.slots, horizon):
            unit = self.cycle[self.issued % len(self.cycle)]
            slot = self.issued % self.slots
            yield from self._settle(sweep, unit)
            # One of the loads speaks for the parts of the slot that this unit leaves empty.
            empty = tuple(("w", slot, home) for home in self.routes.load if home not in self.streamed[unit])
            for home in self.streamed[unit]:
                task = Task(Op.LOAD_WEIGHT, Cell(sweep, unit, -1), "", (), (), home, slot=slot)
                source = self._home(unit) if home == "host" else ()
                *first, last = _route(task, self.routes.load, source, ("w", slot, home), ("wstage", slot))
                yield from first
                yield last._replace(writes=last.writes + empty)
                empty = ()
            self.issued += 1

    def _settle(self, sweep: int, unit: int) -> Iterator[Task]:
        """What the units up to this one still lack of the weights that stay in memory. Read in the order of use, so
        behind no load that waits for a slot of a later unit."""
        while self.arriving and self.arriving[0] <= unit:
            j = self.arriving.pop(0)
            yield Task(Op.SETTLE, Cell(sweep, j, -1), self.routes.load["disk"][0], (), (("home", j),))

    def _home(self, unit: int) -> tuple[Hashable, ...]:
        """What a unit needs to have come home. A head may be the embedding, and its chunks come with the first."""
        if not self.first:
            return ()
        return (("home", unit),) if unit < self.layers else (("home", 0), ("home", self.layers))

    def _next(self, kind: str) -> int:
        self.turn[kind] += 1
        return self.turn[kind] % self.slots

    def _cell(
        self, cell: Cell, batch: Batch, batches: Sequence[Batch]
    ) -> tuple[list[Task], Task, list[Task], Task | None]:
        """Loads, compute and stores of one cell. Hidden states and KV at home on the device need neither. Where
        attention is delegated: no loads, the start of the layer, what attends, and the rest of the layer."""
        j, k = cell.layer, cell.batch
        routes, loads, stores = self.routes, list[Task](), list[Task]()
        writes: list[Hashable] = [("run", k)]
        slot = self.used % self.slots if self.streamed[j] else -1
        # The whole slot, even what this unit does not fill: the next unit's load must not begin there meanwhile.
        reads = self._home(j)
        reads += tuple(("w", slot, home) for home in self.routes.load) if self.streamed[j] else ()
        if j < self.layers and batch.delegated:
            start, *attend, rest = self._delegated(cell, batch.cache_home, slot, reads)
            return [], start, attend, rest
        cache = hidden = -1
        if j < self.layers and batch.cache_home != "device":
            cache = self._next("c")
            buffer, stage = ("cbuf", cache), ("cstage", cache)
            writes.append(buffer)
            if any(p.start for p in batch.pieces):
                earlier = tuple(("kv", j, other) for other in range(k) if _continues(batches[other], batch))
                task = Task(Op.LOAD_CACHE, cell, "", (), (), batch.cache_home, cache=cache)
                loads += _route(task, routes.load, earlier, buffer, stage)
            task = Task(Op.STORE_CACHE, cell, "", (), (), batch.cache_home, cache=cache)
            stores += _route(task, routes.store, (buffer,), ("kv", j, k), stage)
        if j < self.layers and batch.hidden_home != "device":
            hidden = self._next("h")
            buffer, stage = ("hbuf", hidden), ("hstage", hidden)
            writes.append(buffer)
            if j > 0:
                task = Task(Op.LOAD_HIDDEN, cell, "", (), (), batch.hidden_home, hidden=hidden)
                loads += _route(task, routes.load, (("h", k),), buffer, stage)
            if j < self.layers - 1:
                task = Task(Op.STORE_HIDDEN, cell, "", (), (), batch.hidden_home, hidden=hidden)
                stores += _route(task, routes.store, (buffer,), ("h", k), stage)
        compute = Task(Op.COMPUTE, cell, "device", reads, tuple(writes), slot=slot, cache=cache, hidden=hidden)
        return loads, compute, stores, None

    def _delegated(self, cell: Cell, home: str, slot: int, weights: tuple[Hashable, ...]) -> Iterator[Task]:
        j, k = cell.layer, cell.batch
        run, near, far = ("run", k), ("near", k), ("far", k)
        yield Task(Op.PROJECT, cell, "device", weights, (run, near), slot=slot)
        yield Task(Op.SEND, cell, self.routes.store[home][0], (near,), (far,), home)
        yield Task(Op.ATTEND, cell, "cpu", (far,), (("kv", j, k), far), home)
        yield Task(Op.FETCH, cell, self.routes.load[home][-1], (far,), (near,), home)
        yield Task(Op.FINISH, cell, "device", (*weights, near), (run,), slot=slot)


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


def _continues(earlier: Batch, later: Batch) -> bool:
    """Whether `later` holds a piece of a sequence that `earlier` began in this sweep."""
    begun = {p.sequence for p in earlier.pieces}
    return any(p.sequence in begun for p in later.pieces)
