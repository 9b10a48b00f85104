"""Prefetch of halves of layers (`Policy.half_layers`): the weights up to attention, and the others with the head, have
a slot each.

A cell with delegated attention reads the first half up to attention and the second one after it. So the second half is
loaded, and the next layer's first half, while attention is computed elsewhere:

    cells      P00 P01 P02    F00 F01 F02    P10 P11 P12    (P up to attention, F from attention on; layer, gpu_batch)
    loads    P0 F0         P1             F1             P2

A cell that is computed at once reads both halves, and waits for their loads.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from flexengine.schedule.batches import Batch
from flexengine.schedule.frame import ProgramFrame, slot_part, slot_stage
from flexengine.schedule.order import NO_BATCH, Cell, CellPart, CellStep
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.tasks import Copy, Op, Resources, Task, legs


class HalfSlot:
    """A slot that one half of each unit passes through.

    Attributes:
        number: number of the slot.
        streamed: by unit, tiers of the half's weights off the device; () for none.
        cycle: units with such weights.
    """

    def __init__(self, streamed: Sequence[tuple[str, ...]], number: int) -> None:
        self.streamed, self.number = streamed, number
        self.cycle = [unit for unit, homes in enumerate(streamed) if homes]
        self._emitted = self._passed = 0  # number of halves that are loaded, and read by all cells, since the job began
        self._horizon = 0  # number of halves that may be loaded in this sweep, since the job began
        self._ended: Counter[int] = Counter()  # by unit: cells that read it and whose tasks are all emitted

    def begin(self, more: bool) -> None:
        """Begin a sweep. more: whether to load one half of the next sweep."""
        self._horizon = self._passed + len(self.cycle) + (more and bool(self.cycle))
        self._ended.clear()

    def due(self, most: int | None) -> int | None:
        """Return the next unit if the slot is free for it, and count its load; else None. most: number of this sweep's
        units to load, None for all."""
        horizon = self._horizon if most is None else self._passed + most
        if self._emitted >= horizon or self._emitted > self._passed:
            return None
        self._emitted += 1
        return self.cycle[(self._emitted - 1) % len(self.cycle)]

    def read(self, unit: int, batches: int) -> None:
        """Note that all tasks of a cell that read a unit are emitted. batches: number of cells that read it."""
        if self.streamed[unit]:
            self._ended[unit] += 1
            self._passed += self._ended[unit] == batches


class HalvesPrefetch(Prefetch):
    """Emits the loads of halves."""

    halves = True

    def __init__(self, frame: ProgramFrame) -> None:
        super().__init__(frame)
        self._slots = [HalfSlot(streamed, number) for number, streamed in enumerate(frame.halves)]

    def begin(self, sweep: int, batches: Sequence[Batch], more: bool) -> None:
        super().begin(sweep, batches, more)
        for slot in self._slots:
            slot.begin(more)

    def slot(self, unit: int) -> int | None:
        """Return 0 for a unit with streamed weights: their slots do not change. The head is in slot 1."""
        return int(unit >= self.layers) if self.streamed[unit] else None

    def reads(self, unit: int, op: Op = Op.COMPUTE) -> Resources:
        slots = self._slots
        if op is not Op.COMPUTE:
            slots = slots[:1] if op in (Op.PROJECT, Op.PROJECT_KEYS) else slots[1:]
        parts = tuple(part for slot in slots if slot.streamed[unit] for part in self._parts[slot.number])
        return self.resident(unit) + parts if self._waits else parts

    def in_cell(self, step: CellStep) -> Iterable[Task]:
        return self.loads()

    def loads(self, most: int | None = None) -> Iterator[Task]:
        for slot in self._slots:
            while (unit := slot.due(most)) is not None:
                yield from self.arrivals(unit)
                # The first load also declares the unused parts of the slot as written, to reserve the whole slot.
                homes, number = slot.streamed[unit], slot.number
                unused = tuple(slot_part(number, home) for home in self.load if home not in homes)
                for home in homes:
                    copy = Copy(Op.LOAD_WEIGHT, Cell(self._sweep, unit, NO_BATCH), home=home, buffer=number)
                    target, stage = (slot_part(number, home), *unused), slot_stage(number, home)
                    yield from legs(copy, self.load[home], self.copied(unit, home), stage, target)
                    unused = ()

    def projected(self, step: CellStep) -> Iterator[Task]:
        self._slots[0].read(step.cell.layer, self._batches)
        yield from self.loads()

    def end(self, step: CellStep) -> None:
        if step.part.ends:
            for slot in self._slots[1:] if step.part is CellPart.FROM_ATTENTION else self._slots:
                slot.read(step.cell.layer, self._batches)
