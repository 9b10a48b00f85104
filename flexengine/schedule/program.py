"""The program: the tasks of all cells, in order.

    for step in cells(...):
        yield from expanders[step.part](step)

`schedule.order` has the order of the cells, `schedule.expand` the tasks of a cell, and `schedule.prefetch` the loads of
weights ahead of it. The numbers of buffers and of weight slots limit how far ahead data is loaded: `runtime.execute`
submits all tasks of a sweep at once, and a lane waits for the edges of each task (`schedule.edges`).

What a plain job does not need is imported on first use: `schedule.parts` (attention at another place, experts and
embedding rows on demand).
"""

from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name

from flexengine.schedule.batches import Batch
from flexengine.schedule.expand import with_ports
from flexengine.schedule.frame import ProgramFrame, num_buffers
from flexengine.schedule.order import CellPart, CellStep, cells
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.tasks import Task

Expander = Callable[[CellStep], Iterator[Task]]

# By part of a cell, the class of its expander. A module is imported when the first cell needs it.
EXPANDERS = {
    CellPart.WHOLE: "flexengine.schedule.expand:WholeCell",
    CellPart.TO_ATTENTION: "flexengine.schedule.parts:DelegatedCell",
    CellPart.FROM_ATTENTION: "flexengine.schedule.parts:DelegatedCell",
    CellPart.TO_EXPERTS: "flexengine.schedule.parts:ExpertCell",
    CellPart.FROM_EXPERTS: "flexengine.schedule.parts:ExpertCell",
}
TURNS = "flexengine.schedule.turns:TurnsCell"  # of cells with delegated attention whose slices take turns on engines


class Program(ProgramFrame):
    """Tasks of one sweep after the other. `slots` units have their weights at once, with the unit that is computed; so
    weight loads run slots - 1 units ahead, also into the next sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        made: type[Prefetch] = resolve_name("flexengine.schedule.halves:HalvesPrefetch") if self.halves else Prefetch
        self.prefetch = made(self)

    def sweep(self, number: int, batches: Sequence[Batch], more: bool) -> Iterator[Task]:
        """Yield the tasks of one sweep in program order. more: whether to emit the first loads of the next sweep."""
        prefetch, units = self.prefetch, len(self.streamed)
        expanders: dict[str, Expander] = {}  # by class; as an attribute they would make a reference cycle
        self.batches = batches
        prefetch.begin(number, batches, more)
        if not prefetch.cycle:
            yield from prefetch.arrivals(units)
        if self.demand.embedding:
            yield from resolve_name("flexengine.schedule.parts:embedding_rows")(self, prefetch, number)
        yield from prefetch.loads()
        for step in cells(number, units, batches, self._begin, self._closed, num_buffers(self.slots)):
            if prefetch.arriving:
                yield from prefetch.arrivals(step.cell.layer)
            delegated = self.turns is not None and step.part in (CellPart.TO_ATTENTION, CellPart.FROM_ATTENTION)
            name = TURNS if delegated else EXPANDERS[step.part]
            if name not in expanders:
                expanders[name] = resolve_name(name)(self, prefetch)
            tasks = expanders[name](step)
            yield from with_ports(self, step, tasks) if self.ports else tasks
            prefetch.end(step)
        yield from prefetch.loads()

    def _begin(self, layer: int, batch: int) -> tuple[CellPart, int]:
        """Return the first part of a cell, and the number of layers that it computes."""
        if layer >= self.layers:
            return CellPart.WHOLE, 1
        if self.batches[batch].delegated:
            return CellPart.TO_ATTENTION, 1
        if not self.streamed[layer]:
            return CellPart.WHOLE, self.joined(layer, batch)
        return (CellPart.TO_EXPERTS if self.prefetch.experts(layer) else CellPart.WHOLE), 1

    def _closed(self, layer: int) -> bool:
        """Return whether a layer must end before the next one begins: with fewer than three slots, no slot would be
        free to load a streamed layer ahead."""
        return bool(self.streamed[layer]) and self.slots < 3
