"""Tasks: operations of cells, which lanes run. `schedule.program` has the order of the tasks of a sweep.

A lane runs its tasks in this order. Each task names the resources that it reads and writes; `schedule.edges` derives
from these names which earlier tasks it waits for. A sweep begins when all tasks of the sweep before have ended, except
loads of weights (`runtime.execute`). So no name orders the KV of two sweeps.

| resource | meaning |
|---|---|
| ("resident", j) | resident weights of unit j, written once, in the first sweep |
| ("w", slot, home) | part of a weight slot that is filled from tier `home` |
| ("wstage", slot, home) | host staging of a slot's weights from disk `home` |
| ("cbuf", b), ("cstage", b) | device buffer and host staging for a gpu_batch's KV of one layer |
| ("hbuf", b), ("hstage", b) | the same for hidden states |
| ("kv", j, k), ("h", k) | KV of layer j of batch k, and hidden states of batch k, on their tier |
| ("run", k) | the forward pass of batch k |

`schedule.parts` and the ports of `schedule.expand` add names of their own.
"""

import enum
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from flexengine.schedule.order import Cell

LOADING = "loading"  # key of the seconds of LOAD_RESIDENT, which are reported apart from those of the lanes
Resources = tuple[Hashable, ...]


class Op(enum.Enum):
    """Operations: the six of FlexGen's algorithm 1, then others (docs/architecture.md 7 says how to add one)."""

    LOAD_WEIGHT = "load weight"
    LOAD_CACHE = "load cache"
    LOAD_HIDDEN = "load hidden"
    COMPUTE = "compute"
    STORE_HIDDEN = "store hidden"
    STORE_CACHE = "store cache"
    LOAD_RESIDENT = "load resident weights"
    # attention at another place
    PROJECT = "compute up to attention"
    SEND = "send queries"
    PROJECT_KEYS = "compute keys and values"
    SEND_KEYS = "send keys and values"
    ATTEND_CACHED = "attend to cached tokens"
    ATTEND = "attend"
    FETCH = "fetch attention"
    FINISH = "compute from attention on"
    # weights that are loaded by rows
    OPEN = "begin the forward pass"
    LOAD_ROWS = "load rows"
    RESUME = "compute from the rows on"
    READ_USED = "read neurons or experts"  # in traces only: a read that a task of the device has begun
    # stages of a pipeline
    ENTER = "take hidden states from a port"
    LEAVE = "put hidden states into a port"
    # slices that other engines compute
    HAND_OVER = "hand a slice to a replica"
    TAKE_BACK = "take q, k, v from a replica"


@dataclass(slots=True)
class Task:
    """One operation. Tasks are not changed after they are made; a frozen record takes three times as long to make."""

    op: Op
    # `cell.batch` is NO_BATCH for weights. `cell.layer` is NO_LAYER for OPEN, and for rows of the embedding.
    cell: Cell  # of LOAD_WEIGHT, with the sweep that emits it: the next one may use it
    lane: str = ""  # lane that runs the task
    # reads, writes: names of resources
    reads: Resources = ()
    writes: Resources = ()

    def __str__(self) -> str:
        """Return the operation, its cell and its lane, for people."""
        return f"{self.op.value}, {self.cell}, lane {self.lane}"


@dataclass(slots=True)
class Copy(Task):
    """A load or a store, one leg of its route."""

    home: str = ""  # tier that the data comes from or goes to
    hop: int = 0  # number of the leg; disk -> host staging -> device has legs 0 and 1
    # Number of the weight slot, cache buffer or hidden buffer; None for rows of the embedding
    buffer: int | None = None
    by_rows: bool = False  # for LOAD_WEIGHT, whether LOAD_ROWS loads the unit's experts


@dataclass(slots=True)
class Compute(Task):
    """A task that the device computes with a unit's weights."""

    slot: int | None = None  # number of the weight slot; None if all weights are resident
    # cache, hidden: numbers of the buffers that KV and hidden states pass through; None if they are on the device
    cache: int | None = None
    hidden: int | None = None
    by_rows: bool = False  # whether COMPUTE or FINISH ends at the layer's experts, which RESUME computes
    layers: int = 1  # number of layers, from that of the cell on, that one call of kernels computes


@dataclass(slots=True)
class Delegate(Task):
    """A part of attention at another place, or a copy to it or from it."""

    place: str = ""
    # of ATTEND, if pages are read from a disk: the disk, and the number of the staging with the pages
    home: str = ""
    buffer: int | None = None


def legs(copy: Copy, lanes: Sequence[str], source: Resources, stage: Hashable, target: Resources) -> Iterator[Copy]:
    """Yield one task per leg of a copy. Two legs meet in host staging.

    Args:
        copy: the task, without lane and resources.
        lanes: lanes of the legs.
        source: resources that the first leg reads.
        stage: name of the host staging.
        target: resources that the last leg writes.
    """
    for hop, lane in enumerate(lanes):
        reads = source if hop == 0 else (stage,)
        writes = target if hop == len(lanes) - 1 else (stage,)
        yield Copy(copy.op, copy.cell, lane, reads, writes, copy.home, hop, copy.buffer, copy.by_rows)
