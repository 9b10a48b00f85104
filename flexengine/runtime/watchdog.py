"""Reports of tasks that last, and of the progress of a sweep."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from flexengine.activity import messenger
from flexengine.runtime.trace import TaskTimes
from flexengine.schedule.tasks import Task

QUIET_SECONDS = 120.0  # without the end of a task, until the first report; the next one comes after twice that
_PATIENCE_SECONDS = 1.0  # to wait for the thread at the end: `say` and `look` may block
_LOOK_SECONDS = 0.5  # between two calls of `look`


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
        """Watch from a thread of its own while the block runs. times: counts the cells for `look`."""
        self.awaited = None
        self.progress()
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over, times), name="flexengine-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_PATIENCE_SECONDS)

    def _watch(self, over: threading.Event, times: TaskTimes | None) -> None:
        quiet, look = QUIET_SECONDS, self.look if times is not None else None
        while not over.wait(QUIET_SECONDS / 4 if look is None else min(QUIET_SECONDS / 4, _LOOK_SECONDS)):
            if look is not None and times is not None:
                with contextlib.suppress(Exception):  # the main thread meets a listener's error, too
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
