"""Trace of a job's tasks as Chrome trace JSON, which Perfetto opens.

The process is named flexengine. It has one row per lane, in the order in which data passes the lanes.
"""

import json
from pathlib import Path
from typing import Protocol

from flexengine.errors import InvalidInput
from flexengine.schedule.program import Task
from flexengine.schedule.routes import by_way

PROCESS = "flexengine"  # name of the process in the trace


class Spans(Protocol):
    """Object that an executor calls with the time of every task that has ended."""

    def add(self, task: Task, began: float, end: float) -> None:
        """Add a task that ran from `began` to `end`, in seconds of time.perf_counter."""


class Trace:
    """Spans of tasks, which `write` writes to a file.

    Attributes:
        path: path of the file.
        spans: (task, began, end) in seconds of time.perf_counter.

    Raises:
        InvalidInput: the constructor cannot open the file for writing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.spans: list[tuple[Task, float, float]] = []
        try:
            with self.path.open("a"):
                pass
        except OSError as error:
            raise InvalidInput(f"trace file {path}: {error}") from error

    def add(self, task: Task, began: float, end: float) -> None:
        """Add a task that ran from `began` to `end`, in seconds of time.perf_counter."""
        self.spans.append((task, began, end))

    def write(self) -> None:
        """Write all spans so far, with times in microseconds after the start of the first one."""
        lanes = by_way({task.lane for task, _, _ in self.spans})
        zero = min((began for _, began, _ in self.spans), default=0.0)
        events: list[dict[str, object]] = [_named("process_name", 0, name=PROCESS)] if lanes else []
        for i, lane in enumerate(lanes):
            events += [_named("thread_name", i, name=lane), _named("thread_sort_index", i, sort_index=i)]
        for task, began, end in self.spans:
            cell = task.cell
            args = {"sweep": cell.sweep, "layer": cell.layer, "batch": cell.batch, "home": task.home, "hop": task.hop}
            events.append({"ph": "X", "pid": 1, "tid": lanes.index(task.lane), "name": task.op.value,
                           "ts": (began - zero) * 1e6, "dur": (end - began) * 1e6, "args": args})  # fmt: skip
        self.path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _named(event: str, thread: int, **args: object) -> dict[str, object]:
    """Return a metadata event of the trace."""
    return {"ph": "M", "pid": 1, "tid": thread, "name": event, "args": args}
