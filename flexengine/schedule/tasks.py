"""Tasks: operations of cells, which lanes run. `schedule.program` has the order of the tasks of a sweep."""

import enum
from collections.abc import Hashable
from typing import NamedTuple

from flexengine.schedule.order import Cell

LOADING = "loading"  # key of the seconds of LOAD_RESIDENT, which are reported apart from those of the lanes


class Op(enum.Enum):
    """Operations. READ_USED is in traces only: a read that a task of the device has begun."""

    LOAD_RESIDENT = "load resident weights"
    LOAD_WEIGHT = "load weight"
    LOAD_CACHE = "load cache"
    LOAD_HIDDEN = "load hidden"
    COMPUTE = "compute"
    STORE_HIDDEN = "store hidden"
    STORE_CACHE = "store cache"
    PROJECT = "compute up to attention"
    SEND = "send queries"
    PROJECT_KEYS = "compute keys and values"
    SEND_KEYS = "send keys and values"
    ATTEND_CACHED = "attend to cached tokens"
    ATTEND = "attend"
    FETCH = "fetch attention"
    FINISH = "compute from attention on"
    OPEN = "begin the forward pass"
    LOAD_ROWS = "load rows"
    RESUME = "compute from the rows on"
    ENTER = "take hidden states from a port"
    LEAVE = "put hidden states into a port"
    READ_USED = "read neurons or experts"


class Task(NamedTuple):
    """One op of a cell.

    Attributes:
        cell: `cell.batch` is -1 for LOAD_RESIDENT and LOAD_WEIGHT. `cell.layer` is -1 for OPEN and for LOAD_ROWS of
            the embedding.
        lane: lane that runs the task.
        reads, writes: names of resources.
        home: tier that the data comes from or goes to, or place that computes attention.
        hop: number of the leg on the route; disk -> host staging -> device has legs 0 and 1.
        slot, cache, hidden: number of the weight slot, cache buffer and hidden buffer; -1 for none.
        by_rows: for LOAD_WEIGHT, whether LOAD_ROWS loads the unit's experts; for COMPUTE and FINISH, whether RESUME
            computes the experts.
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
    by_rows: bool = False
