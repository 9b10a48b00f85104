"""The units, lanes and buffers that all parts of a program share, and the names of buffers as resources of tasks."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from flexengine.places import Routes
from flexengine.schedule.batches import Batch
from flexengine.schedule.tasks import Resources

BEFORE, AFTER = "before", "after"  # ports through which hidden states enter and leave a range of layers


@dataclass(frozen=True)
class Demand:
    """Tiers of the weights of which a sweep may load only the rows that its tokens use."""

    embedding: str = ""  # tier of the embedding table; "" if the table is on the device
    experts: Sequence[tuple[str, ...]] = ()  # by unit, the tiers of the experts' matrices. A row is one expert.
    others: Sequence[tuple[str, ...]] = ()  # by unit, the tiers of the other streamed tensors
    most_tokens: int = 0  # a sweep of more tokens loads whole matrices of experts, before the unit is computed

    def of(self, unit: int) -> tuple[str, ...]:
        """Return the tiers of a unit's experts; () if no expert is off the device."""
        return self.experts[unit] if unit < len(self.experts) else ()

    def by_rows(self, tokens: int) -> bool:
        """Return whether a sweep of this many tokens loads only the experts that its tokens chose."""
        return any(self.experts) and tokens <= self.most_tokens


def num_buffers(slots: int) -> int:
    """Return the number of device buffers for KV pages, and for hidden states, of one gpu_batch each.

    With overlap, there are three or more: one gpu_batch is loaded, one computed and one stored at the same time.
    Weights need one slot less, as they are not stored. slots: number of weight slots, `Policy.slots`.
    """
    return slots + 1 if slots > 1 else 1


class Ring:
    """Buffers 0 .. count - 1 of one kind, which cells take in turn.

    The load of a cell waits for the tasks of the last cell with the same buffer. So the count limits how far ahead KV
    and hidden states are loaded. Only cells with data off the device take a buffer. Turns go on from sweep to sweep.

    Args:
        kind: "c" for KV pages, "h" for hidden states.
        count: number of buffers.
    """

    def __init__(self, kind: str, count: int) -> None:
        # By number: the names of the buffers, and of their host staging.
        self.buffers: list[Hashable] = [(f"{kind}buf", number) for number in range(count)]
        self.stages: list[Hashable] = [(f"{kind}stage", number) for number in range(count)]
        self._numbers = cycle(range(count))

    def take(self) -> int:
        """Return the number of the next buffer."""
        return next(self._numbers)


def slot_part(slot: int, home: str) -> Hashable:
    """Return the name of the part of a weight slot that is filled from a tier."""
    return ("w", slot, home)


def slot_stage(slot: int, home: str) -> Hashable:
    """Return the name of the host staging of a weight slot's data from a disk."""
    return ("wstage", slot, home)


@dataclass
class ProgramFrame:
    """A model as its programs see it, and the gpu_batches of the present sweep."""

    # By unit (layers, then head chunks), the tiers of its off-device weights; () if all are resident
    streamed: Sequence[tuple[str, ...]]
    layers: int  # number of units that are layers
    slots: int  # number of weight slots
    routes: Routes  # lanes by tier, such as h2d and d2h for the host; all data of a tier shares them
    # Ascending numbers of the units whose resident weights the first sweep reads, once for each of a unit's reads
    arriving: Sequence[int] = ()
    demand: Demand = Demand()  # weights that are loaded by rows
    # of a stage of a pipeline: BEFORE if hidden states enter from another program, AFTER if they leave to another one
    ports: Collection[str] = ()
    # Returns the number of layers, from a layer on, that one call of kernels computes for a gpu_batch. Their weights,
    # KV and hidden states are on the device.
    joined: Callable[[int, int], int] = lambda layer, batch: 1
    # If halves of layers are loaded apart (`Policy.half_layers`): by half, the tiers of each unit's weights off the
    # device. The first halves pass through slot 0, the second halves and the head through slot 1.
    halves: Sequence[Sequence[tuple[str, ...]]] = ()
    # Returns the number of the engine that computes a slice of a gpu_batch with delegated attention
    # (`schedule.turns`); None if this one computes all.
    turns: Callable[[int, int], int] | None = None
    batches: Sequence[Batch] = field(default=(), init=False)  # gpu_batches of the present sweep

    def __post_init__(self) -> None:
        self.caches, self.hiddens = Ring("c", num_buffers(self.slots)), Ring("h", num_buffers(self.slots))

    def entering(self, batch: int) -> Resources:
        """Return what the first layer of a gpu_batch also reads: embedding rows, and a port's buffer."""
        rows: Resources = (("embedded", batch),) if self.demand.embedding else ()
        return (*rows, ("inbuf", batch % self.slots)) if BEFORE in self.ports else rows

    def leaving(self, batch: int) -> Resources:
        """Return what the last layer of a gpu_batch also writes: a port's buffer."""
        return (("outbuf", batch % self.slots),) if AFTER in self.ports else ()
