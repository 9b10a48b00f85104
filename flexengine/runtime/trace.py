"""Times of tasks that have ended, and their trace as Chrome trace JSON, which Perfetto opens.

The process is named flexengine, with its stage if it is one of a pipeline. It has one row per lane, in the order in
which data passes the lanes.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput
from flexengine.places import by_way
from flexengine.runtime.lane import Mark
from flexengine.schedule.tasks import LOADING, Compute, Copy, Delegate, Op, Task

PROCESS = "flexengine"  # name of the process in the trace
_CELLS = (Op.COMPUTE, Op.PROJECT)  # each cell has one task of these
Note = Callable[[Task, float, float], None]  # gets a task that has ended, its begin and end in time.perf_counter
Row = list[Any]  # lane, name, began and end in seconds since 1970, arguments: JSON values that other processes read


class Trace:
    """Spans of tasks, which `write` writes to a file. Raise InvalidInput if the constructor cannot open the file for
    writing. path: of the file; None if another process writes the spans."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.spans: list[tuple[Task, float, float]] = []  # (task, began, end) in seconds of time.perf_counter
        self.others: dict[str, list[Row]] = {}  # rows of other processes by name; see `rows`
        try:
            if self.path is not None:
                with self.path.open("a"):
                    pass
        except OSError as error:
            raise InvalidInput(f"trace file {path}: {error}") from error

    def add(self, task: Task, began: float, end: float) -> None:
        self.spans.append((task, began, end))

    def rows(self, first: int = 0) -> list[Row]:
        """Return all spans so far, with times that processes of other machines can compare. first: first layer of this
        process."""
        since = time.time() - time.perf_counter()
        return [[task.lane, task.op.value, since + began, since + end, _arguments(task, first)]
                for task, began, end in self.spans]  # fmt: skip

    def write(self) -> None:
        """Write all spans so far, with times in microseconds after the start of the first one."""
        assert self.path is not None
        own = {f"{PROCESS} stage 0" if self.others else PROCESS: self.rows()}
        processes = own | self.others
        zero = min((row[2] for rows in processes.values() for row in rows), default=0.0)
        events: list[dict[str, object]] = []
        for number, (name, rows) in enumerate(processes.items(), 1):
            events += _events(number, name, rows, zero)
        self.path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _arguments(task: Task, first: int) -> dict[str, object]:
    cell = task.cell
    layer = cell.layer + first if cell.layer >= 0 else cell.layer
    home = task.home if isinstance(task, Copy) else task.place if isinstance(task, Delegate) else ""
    hop = task.hop if isinstance(task, Copy) else 0
    several = {"layers": task.layers} if isinstance(task, Compute) and task.layers > 1 else {}
    return {"sweep": cell.sweep, "layer": layer, "batch": cell.batch, "home": home, "hop": hop, **several}


def _events(process: int, name: str, rows: Sequence[Row], zero: float) -> list[dict[str, object]]:
    """Return the events of one process. zero: time of the first event of all, in seconds since 1970."""
    lanes = by_way({row[0] for row in rows})
    events = [_named("process_name", process, 0, name=name)] if lanes else []
    for i, lane in enumerate(lanes):
        events += [_named("thread_name", process, i, name=lane), _named("thread_sort_index", process, i, sort_index=i)]
    for lane, op, began, end, args in rows:
        events.append({"ph": "X", "pid": process, "tid": lanes.index(lane), "name": op,
                       "ts": (began - zero) * 1e6, "dur": (end - began) * 1e6, "args": args})  # fmt: skip
    return events


def _named(event: str, process: int, thread: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": thread, "name": event, "args": args}


class TaskTimes:
    """Sums the seconds of tasks by lane, and passes the tasks to `notes`.

    On a CUDA stream a task lasts from when the stream comes to it until the GPU has done it, not while it is queued.
    """

    def __init__(self, notes: Iterable[Note]) -> None:
        self._notes = tuple(notes)
        # Seconds of work by lane, of the tasks counted so far; LOADING is reads of resident weights, which occur once.
        self.busy: dict[str, float] = {}
        self._marks: deque[tuple[Task, Mark, Mark]] = deque()  # begin and end of the tasks that `busy` lacks

    def add(self, task: Task, began: Mark, end: Mark) -> None:
        """Add a task. On CUDA streams it may not have ended yet."""
        self._marks.append((task, began, end))

    @property
    def cells(self) -> int:
        """Number of cells computed since `count` was called last, on the GPU too."""
        ended = (task for task, _, end in self._marks.copy() if task.op in _CELLS and end.passed)
        return sum(task.layers if isinstance(task, Compute) else 1 for task in ended)

    def count(self) -> None:
        """Add the tasks that have ended to `busy`, and pass them to the notes. Weight loads may still be under way."""
        for _ in range(len(self._marks)):
            task, began, end = self._marks.popleft()
            if not end.passed:
                self._marks.append((task, began, end))
                continue
            lane = LOADING if task.op is Op.LOAD_RESIDENT else task.lane
            self.busy[lane] = self.busy.get(lane, 0.0) + end.seconds - began.seconds
            for note in self._notes:
                note(task, began.seconds, end.seconds)
