"""The one loop: ask the edges which earlier tasks a task waits for, and hand the task to its lane."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from flexengine.runtime.lane import Done, LaneRunner, forget_variables, new_lane
from flexengine.runtime.trace import Spans, TaskTimes
from flexengine.runtime.watchdog import Watchdog
from flexengine.schedule.edges import Edges
from flexengine.schedule.tasks import Op, Task


class TaskFailed(Exception):
    """A task raised an error, `cause`."""

    def __init__(self, task: Task, cause: Exception) -> None:
        self.task, self.cause = task, cause
        super().__init__(f"{task}: {cause}")


def cause_of(failed: TaskFailed) -> Exception:
    """Return the error of a failed task, with the task in a note. The variables of ended frames are cleared: they would
    keep the job's objects alive."""
    for note in (f"in task: {failed.task}", *getattr(failed, "__notes__", ())):
        failed.cause.add_note(note)
    forget_variables(failed)
    return failed.cause


@contextmanager
def causes_raised() -> Iterator[None]:
    """Raise the error of a failed task itself."""
    try:
        yield
        return
    except TaskFailed as failed:
        cause = cause_of(failed)
    raise cause  # outside of `except`: else the TaskFailed would stay referenced as its context


class Cancelled(Exception):
    """A task was not begun, because its job had ended."""


class Executor:
    """Runs programs on lanes. Use it as a context manager: the threads of the lanes end with it. Tasks that are not
    begun by then, after an error or an interrupt, do not run. It may be entered again.

    Args:
        perform: does the work of a task, in the thread of the task's lane.
        lane_kind: kind of the lanes; see `new_lane`.
        traces: get the times of every task that has ended.

    Attributes:
        times: seconds of the tasks that have ended.
        watchdog: reports tasks that last.
    """

    def __init__(self, perform: Callable[[Task], None], lane_kind: str, *traces: Spans) -> None:
        self.perform, self.kind = perform, lane_kind
        self.times, self.watchdog = TaskTimes(traces), Watchdog()
        self.lanes: dict[str, LaneRunner] = {}
        self.edges: Edges[Done] = Edges()
        self._ended = False

    def __enter__(self) -> "Executor":
        self._ended = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        failures: list[Exception] = []
        for lane in self.lanes.values():
            try:
                lane.close()
            except Exception as unclosed:  # the threads of the other lanes must end, too
                failures.append(unclosed)
        self.lanes, self.edges = {}, Edges()
        self.times.count()
        for failure in failures:
            if error is None:
                raise failure
            error.add_note(f"then a lane could not be closed: {failure!r}")

    def abandon(self, lane: str, last: Callable[[], None]) -> None:
        """Begin no further task. Run `last` in the thread of a lane, after its present task: no other thread can free
        what the lane's thread holds."""
        self._ended = True
        if lane in self.lanes:
            done = Done()
            with self.watchdog.watching():
                self.lanes[lane].submit(last, (), done)
                done.wait()

    def run(self, program: Iterable[Task]) -> None:
        """Submit a program. Return when all tasks but weight loads have ended: the loads may serve the next sweep.

        Raises:
            TaskFailed: the first error of a task.
        """
        pending: list[tuple[Task, Done]] = []
        with self.watchdog.watching(self.times):
            for task in program:
                done = self.submit(task)
                failed = done.error is not None
                if failed or task.op is not Op.LOAD_WEIGHT:
                    pending.append((task, done))
                if failed:
                    break
            for task, done in pending:
                self.watchdog.awaited = task
                done.wait()
                self.watchdog.progress()
        self.times.count()

    def submit(self, task: Task) -> Done:
        """Hand a task to its lane. Return its completion."""
        lane = self.lanes.get(task.lane) or self.lanes.setdefault(task.lane, new_lane(self.kind, task.lane))
        done = Done()
        after = self.edges.add(task.reads, task.writes, done)
        lane.submit(lambda: self._work(task, lane), after, done)
        return done

    def _work(self, task: Task, lane: LaneRunner) -> None:
        if self._ended:
            raise Cancelled(str(task))
        began = lane.mark()
        with self.watchdog.during(task):
            try:
                self.perform(task)
            except Exception as error:
                raise TaskFailed(task, error) from error
        self.times.add(task, began, lane.mark())
