"""The one loop: for each task ask the edges what it waits for and hand it to its lane."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import cast

from flexengine.activity import messenger
from flexengine.runtime.lane import Done, Lane, Mark, new_lane
from flexengine.runtime.trace import Spans
from flexengine.runtime.watchdog import Watchdog
from flexengine.schedule.edges import Edges
from flexengine.schedule.program import LOADING, Op, Task

QUIET_SECONDS = 120.0  # without the end of any task, until people are told what it is that lasts
_CELLS = (Op.COMPUTE, Op.PROJECT)  # each cell has one task of these


class Cancelled(Exception):
    """A task that was not begun because its job had ended."""


class Executor:
    """Runs programs on lanes that live as long as it does. Use as a context manager; threads end with it, and what they
    have not begun by then (after an error or an interrupt) is not done any more. It may be entered again.

    perform: does what a task says, in the lane's thread. busy: seconds of work per lane, of the tasks that had ended
    when `run` last returned or this was left; what brings weights home, once, is no work of the lane's but LOADING.
    On a CUDA stream a task lasts from when the stream comes to it until the GPU has done it, not while it is queued.
    traces: get the times of every task that has ended.
    say: told what is under way when no task has ended for QUIET_SECONDS, for twice that, and so on; a task may last
    that long, or a lane hang (a network disk that does not answer), which nothing but the user can tell apart.
    look: called about twice a second while `run` lasts, from another thread, with the number of cells that it has
    computed; None for no calls.
    """

    def __init__(self, perform: Callable[[Task], None], lane_kind: str, *traces: Spans) -> None:
        self.perform, self.kind, self.traces = perform, lane_kind, traces
        self.lanes: dict[str, Lane] = {}
        self.edges: Edges[Done] = Edges()
        self.busy: dict[str, float] = {}
        self._marked: deque[tuple[Task, Mark, Mark]] = deque()  # beginning and end of tasks that `busy` lacks
        self.say: Callable[[str], None] = messenger()
        self.look: Callable[[int], None] | None = None
        self._ended = False
        self._under_way: dict[str, tuple[Task, float]] = {}  # by lane: since when, in seconds of time.perf_counter
        self._awaited: Task | None = None  # what `run` waits for
        self._watchdog = Watchdog(QUIET_SECONDS)

    def __enter__(self) -> "Executor":
        self._ended = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        failed: list[Exception] = []
        for lane in self.lanes.values():
            try:
                lane.close()
            except Exception as caught:  # the threads of the other lanes must end, too
                failed.append(caught)
        self.lanes, self.edges = {}, Edges()
        self._count()
        if failed and error is None:
            raise failed[0]
        for failure in failed:
            cast(BaseException, error).add_note(f"then a lane could not be closed: {failure!r}")

    def abandon(self, lane: str, last: Callable[[], None]) -> None:
        """Begins nothing more. What a lane's thread alone can let go of, it does in `last`, after what it is doing."""
        self._ended = True
        if (there := self.lanes.get(lane)) is not None:
            done = Done()
            with self._watchdog.watching(self._lasting, self.say):
                there.submit(last, (), done)
                done.wait()

    def run(self, program: Iterable[Task]) -> None:
        """Submits a program and returns when all but its weight loads have ended: those may serve the next one.

        The first error of a task is raised here, with the task in a note.
        """
        pending: list[tuple[Task, Done]] = []
        self._awaited = None
        look = self.look
        seen = None if look is None else lambda: look(self.cells)
        with self._watchdog.watching(self._lasting, self.say, seen):
            for task in program:
                done = self._submit(task)
                failed = done.error is not None
                if failed or task.op is not Op.LOAD_WEIGHT:
                    pending.append((task, done))
                if failed:
                    break
            for self._awaited, done in pending:
                done.wait()
                self._watchdog.progress()
        self._count()

    @property
    def cells(self) -> int:
        """Number of cells that the present `run` has computed, on the GPU too."""
        return sum(task.op in _CELLS and end.passed for task, _, end in self._marked.copy())

    def _count(self) -> None:
        """Add the tasks that have ended to `busy` and to the traces. Weights loaded ahead may still be under way."""
        for _ in range(len(self._marked)):
            task, began, end = self._marked.popleft()
            if not end.passed:
                self._marked.append((task, began, end))
                continue
            work = LOADING if task.op is Op.LOAD_RESIDENT else task.lane
            self.busy[work] = self.busy.get(work, 0.0) + end.seconds - began.seconds
            for trace in self.traces:
                trace.add(task, began.seconds, end.seconds)

    def _lasting(self) -> str:
        now = time.perf_counter()
        tasks = [f"lane {lane}: {task.op.value}, {task.cell}, for {now - began:.0f} s"
                 for lane, (task, began) in sorted(self._under_way.copy().items())]  # fmt: skip
        if not tasks and (task := self._awaited) is not None:  # its thread is done with it
            tasks = [f"on the GPU, or before it: {task.op.value}, {task.cell}, lane {task.lane}"]
        return f"under way are {'; '.join(tasks)}" if tasks else "none is under way"

    def _submit(self, task: Task) -> Done:
        lane = self.lanes.get(task.lane) or self.lanes.setdefault(task.lane, new_lane(self.kind, task.lane))
        done = Done()
        after = self.edges.add(task.reads, task.writes, done)
        lane.submit(lambda: self._work(task, lane), after, done)
        return done

    def _work(self, task: Task, lane: Lane) -> None:
        if self._ended:
            raise Cancelled(f"{task.op.value}, {task.cell}")
        began = lane.mark()
        self._under_way[task.lane] = task, time.perf_counter()
        try:
            self.perform(task)
        except BaseException as error:
            error.add_note(f"in task: {task.op.value}, {task.cell}, lane {task.lane}")
            raise
        finally:
            self._under_way.pop(task.lane, None)
            self._watchdog.progress()
        self._marked.append((task, began, lane.mark()))
