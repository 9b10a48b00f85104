"""Trace of a job's tasks as Chrome trace JSON, which Perfetto opens: one row per lane."""

import json
from pathlib import Path

from flexengine.errors import InvalidInput
from flexengine.schedule.program import Task


class Trace:
    """Spans of tasks, which `write` writes to a file.

    Attributes:
        path: of the file.
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
        lanes = sorted({task.lane for task, _, _ in self.spans})
        zero = min((began for _, began, _ in self.spans), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": lane}}
            for i, lane in enumerate(lanes)
        ]
        for task, began, end in self.spans:
            cell = task.cell
            args = {"sweep": cell.sweep, "layer": cell.layer, "batch": cell.batch, "home": task.home, "hop": task.hop}
            events.append({"ph": "X", "pid": 1, "tid": lanes.index(task.lane), "name": task.op.value,
                           "ts": (began - zero) * 1e6, "dur": (end - began) * 1e6, "args": args})  # fmt: skip
        self.path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
