"""The one loop: ask the edges which earlier tasks a task waits for, and hand the task to its lane.

A watchdog reports tasks that last. `shortage` finds out-of-memory errors among the errors of tasks.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name

from flexengine.activity import messenger
from flexengine.errors import size
from flexengine.runtime.lane import Done, LaneRunner, forget_variables, new_lane
from flexengine.runtime.trace import Note, TaskTimes
from flexengine.schedule.edges import Edges
from flexengine.schedule.tasks import Op, Task
from flexengine.system.openmp import end_idle_threads

QUIET_SECONDS = 120.0  # without the end of a task, until the first report; the next one comes after twice that
_PATIENCE_SECONDS = 1.0  # to wait for the thread at the end: `say` and `look` may block
_LOOK_SECONDS = 0.5  # between two calls of `look`


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


@contextlib.contextmanager
def causes_raised() -> Iterator[None]:
    """Raise the error of a failed task itself."""
    try:
        yield
        return
    except TaskFailed as failed:
        cause = cause_of(failed)
    raise cause  # outside of `except`: else the TaskFailed would stay referenced as its context


class Cancelled(Exception):
    """A task was not begun, because its job had ended or was stopped."""


class Watchdog:
    """Reports a lack of progress while tasks run. The job goes on: only users can tell a slow disk from a dead one.
    `say` receives the reports. `look` is called every _LOOK_SECONDS, from another thread, with the number of cells
    computed; None for no calls. Both may block. `awaited` is the task whose end is awaited."""

    def __init__(self) -> None:
        self.say: Callable[[str], None] = messenger()
        self.look: Callable[[int], None] | None = None
        self.awaited: Task | None = None
        self._last = 0.0  # progress, in seconds of time.perf_counter
        self._begun: dict[str, tuple[Task, float]] = {}  # by lane: its task, and when it began
        self._watched: tuple[bool, TaskTimes | None] = False, None  # whether, and the argument of, `watching`
        self._looks = threading.Lock()  # held while `look` runs

    def progress(self) -> None:
        """Note that a task has ended now."""
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def during(self, task: Task) -> Iterator[None]:
        """Note that a task is under way while the block runs."""
        self._begun[task.lane] = task, time.perf_counter()
        try:
            yield
        finally:
            self._begun.pop(task.lane, None)
            self.progress()

    @contextlib.contextmanager
    def watching(self, times: TaskTimes | None = None) -> Iterator[None]:
        """Watch while the block runs, and wait for a call of `look` then. times: counts the cells for `look`."""
        self.awaited = None
        self.progress()
        self._watched = True, times
        try:
            yield
        finally:
            self._watched = False, None
            if self._looks.acquire(timeout=_PATIENCE_SECONDS):
                self._looks.release()

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """Let a thread watch in all `watching` of the block: to start one for each sweep would take 0.3 ms."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="flexengine-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PATIENCE_SECONDS)

    def _watch(self, over: threading.Event) -> None:
        quiet = QUIET_SECONDS
        while not over.wait(QUIET_SECONDS / 4 if self.look is None else min(QUIET_SECONDS / 4, _LOOK_SECONDS)):
            watched, times = sweep = self._watched
            if not watched:
                continue
            if (look := self.look) is not None and times is not None:
                with contextlib.suppress(Exception), self._looks:  # the main thread meets a listener's error, too
                    if self._watched is sweep:
                        look(times.cells)
            silent = time.perf_counter() - self._last
            if silent < QUIET_SECONDS:
                quiet = QUIET_SECONDS
            elif silent >= quiet:
                with contextlib.suppress(Exception):  # keep watching even if `say` fails
                    self.say(f"no task has ended for {silent:.0f} s; {self._under_way()}")
                quiet *= 2

    def _under_way(self) -> str:
        now, begun = time.perf_counter(), sorted(self._begun.copy().items())
        tasks = [f"lane {lane}: {task.op.value}, {task.cell}, for {now - began:.0f} s" for lane, (task, began) in begun]
        if not tasks and (task := self.awaited) is not None:  # its thread has queued it, the GPU has not done it
            tasks = [f"on the GPU, or before it: {task}"]
        return f"under way are {'; '.join(tasks)}" if tasks else "none is under way"


class Executor:
    """Runs programs on lanes. Use it as a context manager: the threads of the lanes end with it. Tasks that are not
    begun by then, after an error or an interrupt, do not run. It may be entered again.

    Args:
        perform: does the work of a task, in the thread of the task's lane.
        lane_kind: kind of the lanes; see `new_lane`.
        notes: get the times of every task that has ended.
    """

    def __init__(self, perform: Callable[[Task], None], lane_kind: str, *notes: Note) -> None:
        self.perform, self.kind = perform, lane_kind
        self.times, self.watchdog = TaskTimes(notes), Watchdog()  # seconds of ended tasks; reports of tasks that last
        self.stopped = threading.Event()  # set by any thread to begin no further task, also if it is entered again
        self.lanes: dict[str, LaneRunner] = {}
        self.edges: Edges[Done] = Edges()
        self._ended = False

    def __enter__(self) -> "Executor":
        self._ended = False
        end_idle_threads()  # lanes compute, not this thread; an inline lane starts them again
        self._thread = self.watchdog.thread()
        self._thread.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._ended = True
        failures: list[Exception] = []
        try:
            self._thread.__exit__(None, None, None)
        finally:  # also after an interrupt
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
        Raise TaskFailed for the first error of a task."""
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
        if self._ended or self.stopped.is_set():
            raise Cancelled(str(task))
        began = lane.mark()
        with self.watchdog.during(task):
            try:
                self.perform(task)
            except Exception as error:
                raise TaskFailed(task, error) from error
        self.times.add(task, began, lane.mark())


class Shortage(Exception):
    """A job ran out of memory in a tier: device, host, or an attention worker. what: data or computation that needed
    the memory. needed: bytes requested; 0 if the error does not state them."""

    def __init__(self, tier: str, what: str, needed: int = 0) -> None:
        self.tier, self.what, self.needed = tier, what, needed
        much = f" ({size(needed)})" if needed else ""
        super().__init__(f"{tier} memory ran out: there was no room for {what}{much}")


def shortage(error: BaseException, gpu: bool) -> Shortage | None:
    """Return what `runtime.shortages.shortage_of` returns; its code is loaded after errors only."""
    found: Shortage | None = resolve_name("flexengine.runtime.shortages:shortage_of")(error, gpu)
    return found
