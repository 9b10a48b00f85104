"""Prefetch of weights: which loads the program emits (yields) ahead of the cells that read them.

Streamed units (layers and head chunks with weights off the device) pass through the slots in ring order: unit number n
since the job began uses slot n % slots. Its load is emitted when two conditions hold:

- All cells of unit n - slots are emitted. Edges link a task to earlier tasks only, so a load must come after the last
  task that reads the previous content of its slot. So the number of slots bounds the depth: 1 means no overlap, 2
  double buffering; 3 also hide a load that takes longer than others. Between disk and a GPU, the first leg of a load
  waits only for its staging, so RAM holds up to `slots` units more.
- Within a layer, the loads of KV and hidden states of its first min(slots, gpu_batches) cells are emitted. A lane runs
  its tasks in order, and a weight load waits for its slot, so these loads must not queue behind it; those
  of later cells do. Cells whose data is on the device count, too. Before the first cell of a sweep and after the last
  one, the first condition alone holds.

    two slots:   cells      00 01 02   10 11 12   20 21 22    (layer, gpu_batch)
                 loads    0 1             2          3        unit 2 takes the slot of unit 0 while 11 is prepared

The loads of the next sweep's first units are emitted in the same way; only one of them if embedding rows, for which
all gpu_batches wait, are read in the same lane.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from flexengine.places import DISK
from flexengine.schedule.batches import Batch
from flexengine.schedule.frame import ProgramFrame, slot_part, slot_stage
from flexengine.schedule.order import NO_BATCH, Cell, CellStep
from flexengine.schedule.tasks import Copy, Op, Resources, Task, legs


class Prefetch:
    """Emits the loads of weights. Call `begin` before each sweep.

    Attributes:
        emitted: number of streamed units whose loads are emitted, since the job began.
        passed: number of streamed units whose cells are all emitted, since the job began; units pass in order.
        halves: whether halves of layers are loaded apart (`schedule.halves`).
    """

    halves = False

    def __init__(self, frame: ProgramFrame) -> None:
        self.streamed, self.layers, self.slots, self.load = frame.streamed, frame.layers, frame.slots, frame.routes.load
        self.demand, self.arriving = frame.demand, list(frame.arriving)
        self.cycle = [unit for unit, homes in enumerate(frame.streamed) if homes]
        self.emitted = self.passed = 0
        self._parts = [tuple(slot_part(slot, home) for home in self.load) for slot in range(frame.slots)]
        self._number: dict[int, int] = {}  # by streamed unit of this sweep: its number since the job began
        self._horizon = 0  # number of units that may be loaded in this sweep, since the job began
        self._sweep = self._batches = 0
        self._waits = bool(frame.arriving)  # whether units must wait for resident weights
        self._ended: Counter[int] = Counter()  # by unit: cells whose tasks are all emitted
        self._by_rows = False  # whether loads emitted in this sweep leave out experts
        self._without_experts = [False] * frame.slots  # by slot: `_by_rows` of the last load

    def begin(self, sweep: int, batches: Sequence[Batch], more: bool) -> None:
        """Begin a sweep. more: whether to emit the first loads of the next sweep, too."""
        self._sweep, self._batches, self._waits = sweep, len(batches), bool(self.arriving)
        self._by_rows = self.demand.by_rows(sum(batch.tokens for batch in batches))
        self._number = {unit: self.passed + i for i, unit in enumerate(self.cycle)}
        # If embedding rows, for which all batches wait, are read in the lane of weights, one unit of the next sweep is
        # loaded in this one: the rows are emitted after these loads.
        home, load = self.demand.embedding, self.load
        one_lane = home and any(load[home][0] in load[other] for unit in self.streamed for other in unit)
        ahead = min(1 if one_lane else self.slots, len(self.cycle)) if more else 0
        self._horizon = self.passed + len(self.cycle) + ahead
        self._ended.clear()

    def slot(self, unit: int) -> int | None:
        """Return the slot of a unit's weights in this sweep; None if all of its weights are resident."""
        return self._number[unit] % self.slots if self.streamed[unit] else None

    def reads(self, unit: int, op: Op = Op.COMPUTE) -> Resources:
        """Return the resources that an operation of a unit reads.

        It reads all parts of the slot, also unused ones: the next unit's load must not begin there meanwhile.
        """
        parts = self._parts[self._number[unit] % self.slots] if self.streamed[unit] else ()
        return self.resident(unit) + parts if self._waits else parts

    def experts(self, unit: int) -> tuple[str, ...]:
        """Return the tiers from which the unit's chosen experts are loaded; () if its load brings all experts."""
        slot = self.slot(unit) if self.demand.experts else None
        if slot is None:
            return ()
        emitted = self._number[unit] < self.emitted  # then the load decided, maybe in the sweep before
        return self.demand.of(unit) if (self._without_experts[slot] if emitted else self._by_rows) else ()

    def in_cell(self, step: CellStep) -> Iterable[Task]:
        """Return the loads that are due between the loads of a cell and its compute: the second condition."""
        return self.loads() if step.cell.batch >= min(self.slots, self._batches) - 1 else ()

    def loads(self, most: int | None = None) -> Iterator[Task]:
        """Yield weight loads as long as a slot is free. most: number of this sweep's units to load, None for all."""
        horizon = self._horizon if most is None else self.passed + most
        while self.emitted < horizon and self.emitted - self.passed < self.slots:
            yield from self._load(self.cycle[self.emitted % len(self.cycle)])

    def _load(self, unit: int) -> Iterator[Task]:
        yield from self.arrivals(unit)
        slot = self.emitted % self.slots
        self.emitted += 1
        by_rows = self._by_rows and bool(self.demand.of(unit))
        self._without_experts[slot] = by_rows
        # If only experts are off the device, a load of no bytes reserves the slot.
        homes = (self.demand.others[unit] or self.streamed[unit][:1]) if by_rows else self.streamed[unit]
        # The first load also declares the unused parts of the slot as written, to reserve the whole slot.
        unused = tuple(slot_part(slot, home) for home in self.load if home not in homes)
        for home in homes:
            copy = Copy(Op.LOAD_WEIGHT, Cell(self._sweep, unit, NO_BATCH), home=home, buffer=slot, by_rows=by_rows)
            target = (slot_part(slot, home), *unused)
            yield from legs(copy, self.load[home], self.copied(unit, home), slot_stage(slot, home), target)
            unused = ()

    def arrivals(self, unit: int) -> Iterator[Task]:
        """Yield the reads of resident weights of the units up to this one that are not emitted yet. So they precede the
        loads of later units, which wait for slots."""
        while self.arriving and self.arriving[0] <= unit:
            cell = Cell(self._sweep, self.arriving.pop(0), NO_BATCH)
            yield Task(Op.LOAD_RESIDENT, cell, self.load[DISK][0], (), (("resident", cell.layer),))

    def resident(self, unit: int) -> Resources:
        """Return the resident weights that a unit reads, in the sweep that reads them from disk. A tied head is the
        embedding, which is read with unit 0."""
        if not self._waits:
            return ()
        return (("resident", unit),) if unit < self.layers else (("resident", 0), ("resident", self.layers))

    def copied(self, unit: int, home: str) -> Resources:
        """Return the resources that a load from `home` reads. The checkpoint is on the first disk, without copies."""
        return () if home == DISK else self.resident(unit)

    def projected(self, step: CellStep) -> Iterable[Task]:
        """Return the loads that are due when a layer is computed up to attention."""
        return ()

    def end(self, step: CellStep) -> None:
        """Note that all tasks of a step are emitted. A unit gives its slot back with the end of its last cell."""
        unit = step.cell.layer
        if not self.streamed[unit] or not step.part.ends:
            return
        self._ended[unit] += 1
        if self._ended[unit] == self._batches:
            self.passed += 1
