"""The program: the tasks of all cells, in order.

    for step in cells(...):
        yield from expanders[step.part](step)

`schedule.order` has the order of the cells, `schedule.expand` the tasks of a cell, and `schedule.prefetch` the loads of
weights ahead of it. Parts that a plain job does not need have modules of their own, which are imported on first use:
`schedule.delegated` (attention at another place), `schedule.rows` (experts and embedding rows on demand),
`schedule.ports` (stages).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pkgutil import resolve_name

from flexengine.schedule.batches import Batch
from flexengine.schedule.demand import NOTHING, Demand
from flexengine.schedule.expand import ProgramFrame
from flexengine.schedule.order import CellPart, CellStep, cells
from flexengine.schedule.prefetch import Prefetch
from flexengine.schedule.rings import Ring, num_buffers
from flexengine.schedule.routes import Routes
from flexengine.schedule.tasks import Task

Expander = Callable[[CellStep], Iterator[Task]]

# By part of a cell, the class of its expander. A module is imported when the first cell needs it.
EXPANDERS = {
    CellPart.WHOLE: "flexengine.schedule.expand:WholeCell",
    CellPart.TO_ATTENTION: "flexengine.schedule.delegated:DelegatedCell",
    CellPart.FROM_ATTENTION: "flexengine.schedule.delegated:DelegatedCell",
    CellPart.TO_EXPERTS: "flexengine.schedule.rows:ExpertCell",
    CellPart.FROM_EXPERTS: "flexengine.schedule.rows:ExpertCell",
}


class Program:
    """Tasks of one sweep after the other. Weight loads run up to `slots` units ahead, also into the next sweep.

    Args:
        streamed: by unit (layers, then head chunks), the tiers of its off-device weights; () if all are resident.
        layers: number of units that are layers.
        slots: number of weight slots.
        routes: lanes of the machine.
        arriving: units with resident weights that are not read yet, rising; one entry per read. The first sweep reads
            them.
        demand: weights that are loaded by rows.
        ports: names of ports (schedule.ports), if the program is a stage of a pipeline.
        joined: returns the number of layers, from a layer on, that one call of kernels computes for a gpu_batch. Their
            weights, KV and hidden states are on the device.
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
        joined: Callable[[int, int], int] = lambda layer, batch: 1,
    ) -> None:
        self.streamed, self.layers, self.slots, self.buffers = streamed, layers, slots, num_buffers(slots)
        self.demand, self.joined = demand, joined
        self.prefetch = Prefetch(streamed, layers, slots, routes, arriving, demand)
        rings = Ring("c", self.buffers), Ring("h", self.buffers)
        self.frame = ProgramFrame(layers, slots, routes, demand, self.prefetch, *rings)
        self._expanders: dict[str, Expander] = {}  # by class
        self._ports = resolve_name("flexengine.schedule.ports:PortTasks")(self.frame, ports) if ports else None
        if demand.embedding:
            self.frame.entering.append(lambda batch: (("embedded", batch),))

    def sweep(self, number: int, batches: Sequence[Batch], more: bool) -> Iterator[Task]:
        """Yield the tasks of one sweep in program order.

        Args:
            number: number of the sweep.
            batches: its gpu_batches.
            more: whether to emit the first loads of the next sweep.
        """
        prefetch, units = self.prefetch, len(self.streamed)
        self.frame.batches = batches
        prefetch.begin(number, batches, more)
        if not prefetch.cycle:
            yield from prefetch.arrivals(units)
        if self.demand.embedding:
            yield from resolve_name("flexengine.schedule.rows:embedding_rows")(self.frame, number, self.streamed[0])
        yield from prefetch.loads()
        for step in cells(number, units, batches, self._begin, self._closed, self.buffers):
            yield from prefetch.arrivals(step.cell.layer)
            yield from self._expanded(step)
            prefetch.end(step)
        yield from prefetch.loads()

    def _expanded(self, step: CellStep) -> Iterator[Task]:
        """Return the tasks of a step, by the expander of its part."""
        name = EXPANDERS[step.part]
        if name not in self._expanders:
            self._expanders[name] = resolve_name(name)(self.frame)
        tasks = self._expanders[name](step)
        return tasks if self._ports is None else self._ports.around(step, tasks)  # type: ignore[no-any-return]

    def _begin(self, layer: int, batch: int) -> tuple[CellPart, int]:
        """Return the first part of a cell, and the number of layers that it computes."""
        if layer >= self.layers:
            return CellPart.WHOLE, 1
        if self.frame.batches[batch].delegated:
            return CellPart.TO_ATTENTION, 1
        if self.prefetch.experts(layer):
            return CellPart.TO_EXPERTS, 1
        return CellPart.WHOLE, 1 if self.streamed[layer] else self.joined(layer, batch)

    def _closed(self, layer: int) -> bool:
        """Return whether a layer must end before the next one begins: with fewer than three slots, no slot would be
        free to load a streamed layer ahead."""
        return bool(self.streamed[layer]) and self.slots < 3
