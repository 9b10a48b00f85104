"""Reads from the disk that computing tasks begin: neurons and experts that tokens use. No lane has tasks for them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from flexengine.places import DISK
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task
from flexengine.tier.base import Region, Tier

LANE = f"{DISK}_used_read"  # row of these reads in a trace: they overlap tasks of the disk's lane
Note = Callable[[Task, float, float], None]


class DemandReads:
    """Reads from a disk in any thread, and notes when.

    Args:
        disk: the tier that is read.
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
        task, began = Task(Op.READ_USED, self.cell, LANE, (), (), DISK), time.perf_counter()
        yield
        end = time.perf_counter()
        for note in self._notes:
            note(task, began, end)
