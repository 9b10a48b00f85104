"""Times of tasks that have ended."""

from collections import deque
from collections.abc import Iterable

from flexengine.runtime.lane import Mark
from flexengine.runtime.trace import Spans
from flexengine.schedule.tasks import LOADING, Compute, Op, Task

_CELLS = (Op.COMPUTE, Op.PROJECT)  # each cell has one task of these


class TaskTimes:
    """Sums the seconds of tasks by lane, and passes them to traces.

    On a CUDA stream a task lasts from when the stream comes to it until the GPU has done it, not while it is queued.

    Attributes:
        busy: seconds of work by lane, of the tasks counted so far. Reads of resident weights, which occur once, have
            the key LOADING.
    """

    def __init__(self, traces: Iterable[Spans]) -> None:
        self._traces = tuple(traces)
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
        """Add the tasks that have ended to `busy` and to the traces. Weight loads may still be under way."""
        for _ in range(len(self._marks)):
            task, began, end = self._marks.popleft()
            if not end.passed:
                self._marks.append((task, began, end))
                continue
            lane = LOADING if task.op is Op.LOAD_RESIDENT else task.lane
            self.busy[lane] = self.busy.get(lane, 0.0) + end.seconds - began.seconds
            for trace in self._traces:
                trace.add(task, began.seconds, end.seconds)
