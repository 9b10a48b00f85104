"""Tasks of the stages of a pipeline: hidden states enter before the first layer of a stage, and leave after the last.

A port is the object through which they pass from one stage to the next (`worker.stage_ports`).

| resource | meaning |
|---|---|
| ("before", k), ("after", k) | hidden states of batch k in the ports before the first and after the last layer |
| ("inbuf", b), ("outbuf", b) | device buffers between these ports and the forward passes, one per weight slot |
"""

from collections.abc import Iterator

from flexengine.schedule.frame import ProgramFrame
from flexengine.schedule.order import CellStep
from flexengine.schedule.tasks import Op, Task

BEFORE, AFTER = "before", "after"  # ports through which hidden states enter and leave a range of layers


class PortTasks:
    """Adds ENTER and LEAVE to the tasks of the first and the last cell of each gpu_batch.

    Args:
        frame: of the program. Its `ports` have BEFORE if hidden states enter from another program, AFTER if they leave
            to another program.
    """

    def __init__(self, frame: ProgramFrame) -> None:
        self.ports, self.layers, self.slots = frame.ports, frame.layers, frame.slots
        slots = frame.slots
        if BEFORE in self.ports:
            frame.entering.append(lambda batch: (_buffer("inbuf", batch, slots),))
        if AFTER in self.ports:
            frame.leaving.append(lambda batch: (_buffer("outbuf", batch, slots),))

    def around(self, step: CellStep, tasks: Iterator[Task]) -> Iterator[Task]:
        """Yield the tasks of a step, and the task before or after them."""
        cell, k, slots = step.cell, step.cell.batch, self.slots
        if BEFORE in self.ports and cell.layer == 0 and step.part.begins:
            yield Task(Op.ENTER, cell, "enter", ((BEFORE, k),), (_buffer("inbuf", k, slots),))
        yield from tasks
        if AFTER in self.ports and cell.layer + step.layers == self.layers and step.part.ends:
            yield Task(Op.LEAVE, cell, "leave", (_buffer("outbuf", k, slots),), ((AFTER, k),))


def _buffer(kind: str, batch: int, slots: int) -> tuple[str, int]:
    return kind, batch % slots
