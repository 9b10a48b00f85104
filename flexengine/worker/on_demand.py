"""Sources of rows of weights that computing tasks read when tokens use them: neurons and experts. No lane has tasks for
these reads."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from flexengine.places import DISK, USED_READ
from flexengine.plan.layout import Layout
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Copy, Op, Task
from flexengine.tier.base import Region, Tier
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

# By field of `OpenModel.flash` with what it reads, by layer: the source as module:name, which is imported on first use.
SOURCES = {
    "blocks": "flexengine.guests.flash.neurons:Neurons",
    "experts": "flexengine.guests.flash.expert_blocks:ExpertBlocks",
}
Note = Callable[[Task, float, float], None]


class DemandReads:
    """Reads from a disk in any thread, and notes when.

    Args:
        notes: called after each read, with a task that stands for it, and its begin and end in seconds of
            time.perf_counter.

    Attributes:
        cell: the cell that is computed. A read is noted as part of the cell in which it runs first.
    """

    def __init__(self, disk: Tier, notes: Sequence[Note] = ()) -> None:
        self._disk, self._notes, self.cell = disk, notes, Cell(-1, -1, -1)

    def load_all(self, pairs: Sequence[tuple[Region, Tensor]]) -> None:
        """Do as `Tier.load_all`."""
        with self._noted():
            self._disk.load_all(pairs)

    def read_by(self, read: Callable[[], int]) -> None:
        """Do as `Tier.read_by`."""
        with self._noted():
            self._disk.read_by(read)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        task, began = Copy(Op.READ_USED, self.cell, USED_READ, home=DISK), time.perf_counter()
        yield
        end = time.perf_counter()
        for note in self._notes:
            note(task, began, end)


class OnDemand:
    """What a job reads on demand, with its memory.

    Raises:
        OutOfMemory: a tier has less memory than the layout books.
    """

    def __init__(self, opened: OpenModel, layout: Layout, machine: Machine, notes: Sequence[Note] = ()) -> None:
        """Allocate the memory. notes: see `DemandReads`."""
        self.reads = DemandReads(machine.disk, notes)
        self.sources: dict[str, Any] = {}  # by name in SOURCES, what is read, if the model has it
        with ExitStack() as undo:
            for name, source in SOURCES.items():
                if getattr(opened.flash, name):
                    self.sources[name] = resolve_name(source)(opened, layout, machine, self.reads)
                    undo.callback(self.sources[name].close)
            self._ended = undo.pop_all()

    @property
    def neurons(self) -> Any:
        """Blocks whose neurons are read when they become active; None if there are none."""
        return self.sources.get("blocks")

    def close(self) -> None:
        """Free the memory."""
        self._ended.close()
