"""Reports of long work: what is done, why, how long it takes, and how far it is.

Code that may take longer than a second runs inside `activity(...)` and calls `advance` or `tick`. Reports go to the
listener of the present context, which `reporting` sets: an engine sets its own, a command one for all its engines.
Without a listener, reports go to the logger "flexengine". Nothing here starts a thread.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

from flexengine.words import rewording

INTERVAL = 0.5  # seconds between two reports of one activity
MESSAGE = "message"  # name of a record that is a text only
LINE_SECONDS = 10.0  # between two plain lines of one activity
QUICK_SECONDS = 2.0  # an activity of level DEBUG prints no plain line before
MIN_ETA_SECONDS, MIN_ETA_TOTAL = 2.0, 20  # seconds of an activity, and its total, for which remaining time is shown
COLUMNS = 80  # of a terminal that does not tell its width
MIN_BAR = 5  # characters of the bar itself

log = logging.getLogger("flexengine")
State = Literal["began", "running", "done", "failed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Activity:
    """State of long work at one moment, or a message.

    Attributes:
        name: kind of work, such as "compiling" or "generating"; "message" for a message.
        text: the work, its reason, and its usual duration or its bytes, in one line.
        done: finished part of `total`, in `unit`.
        total: None if it is unknown.
        unit: "B" for bytes, or a noun in the plural; "" if nothing is counted.
        details: numbers of the moment, the most important first.
        state: began, running, done or failed.
        level: logging.INFO if the user should read `text` before the work starts, as it is long and done only once;
            logging.DEBUG for other work; logging.WARNING for a message about a loss of speed or of data.
    """

    name: str
    text: str
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    details: tuple[str, ...] = ()
    state: State = "began"
    level: int = logging.DEBUG


Listener = Callable[[Activity], None]


class RunningActivity:
    """Work that is under way. Its methods may be called from any thread; reports never overlap.

    Args:
        listener: receives the reports; None for the logger.
        record: the first report.
    """

    def __init__(self, listener: Listener | None, record: Activity) -> None:
        self._listener, self._first = listener, record
        self._done, self._total, self._details = record.done, record.total, record.details
        self._lock, self._ended = threading.RLock(), False
        self._due = time.monotonic() + INTERVAL
        if listener is None:
            log.log(record.level, "%s", record.text)
        else:
            listener(record)

    def _report(self, state: State) -> None:
        if self._listener is not None:
            self._listener(replace(self._first, done=self._done, total=self._total, details=self._details, state=state))

    def advance(self, count: float = 1) -> None:
        """Add to the finished part."""
        with self._lock:
            self.update(self._done + count)

    def update(
        self, done: float | None = None, total: float | None = None, details: tuple[str, ...] | None = None
    ) -> None:
        """Change the given numbers; report them if the last report is at least INTERVAL seconds old."""
        with self._lock:
            # Plain fields: this is called for every row, and a record is made only for a report.
            self._done = self._done if done is None else done
            self._total = self._total if total is None else total
            self._details = self._details if details is None else details
            if not self._ended and (now := time.monotonic()) >= self._due:
                self._due = now + INTERVAL
                self._report("running")

    @property
    def due(self) -> bool:
        """Whether `update` would report now."""
        return time.monotonic() >= self._due

    def end(self, failed: bool = False) -> None:
        """Report the end, once."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._report("failed" if failed else "done")


_listener: ContextVar[Listener | None] = ContextVar("flexengine listener", default=None)
_work: ContextVar[RunningActivity | None] = ContextVar("flexengine work", default=None)


def listener() -> Listener | None:
    """Return the listener of this context; None if there is none."""
    return _listener.get()


@contextmanager
def reporting(to: Listener | None) -> Iterator[None]:
    """Send all reports of the block, in this context, to a listener. Must not enclose a `yield` of a generator."""
    token = _listener.set(to)
    try:
        yield
    finally:
        _listener.reset(token)


def reported(to: Listener | None, made: Generator[T, None, Any]) -> Generator[T]:
    """Yield from a generator. Reports that it makes go to the listener, but no reports of its caller do."""
    try:
        while True:
            with reporting(to):
                try:
                    item = next(made)
                except StopIteration:
                    return
            yield item
            del item
    finally:
        with reporting(to):
            made.close()


@contextmanager
def activity(
    name: str, text: str, total: float | None = None, unit: str = "", level: int = logging.DEBUG
) -> Iterator[RunningActivity]:
    """Report the block as one activity. Must not enclose a `yield` of a generator.

    Args:
        name, text, total, unit, level: see `Activity`.
    """
    work = RunningActivity(_listener.get(), Activity(name, text, total=total, unit=unit, level=level))
    token = _work.set(work)
    try:
        yield work
    except BaseException:
        work.end(failed=True)
        raise
    finally:
        _work.reset(token)
    work.end()


def advance(count: float = 1) -> None:
    """Add to the finished part of the innermost activity of this context, if there is one."""
    if (work := _work.get()) is not None:
        work.advance(count)


def tick() -> None:
    """Report that the innermost activity of this context goes on, if there is one."""
    if (work := _work.get()) is not None and work.due:
        work.update()


def message(text: str, level: int = logging.INFO) -> None:
    """Report one line of text.

    Args:
        level: logging.DEBUG, INFO or WARNING.
    """
    messenger()(text, level)


def messenger() -> Callable[..., None]:
    """Return a function as `message` for this context's listener. It may be called in other threads."""
    to, reworded = _listener.get(), rewording()

    def send(text: str, level: int = logging.INFO) -> None:
        if to is None:
            log.log(level, "%s", reworded(text))
        else:
            to(Activity(MESSAGE, reworded(text), state="done", level=level))

    return send


@dataclass
class _Shown:
    """An activity under way. Times are seconds of time.monotonic."""

    record: Activity  # its latest report
    began: float
    printed: float | None = None  # when its last plain line was printed; None if none was


class Display:
    """Listener that prints reports on standard error.

    On a terminal, the innermost activity has a bar, which disappears at the end. Elsewhere an activity prints a line at
    the start, one every LINE_SECONDS, and one at the end; quick ones print nothing. An error of the stream is ignored,
    as no job should fail by it. May be called by several threads.

    Args:
        level: messages of a lower level are left out; see `Activity.level`.

    Attributes:
        all_ends: print a line at the end of every activity, also of quick ones and on a terminal.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self.level, self.all_ends = level, False
        self._lock = threading.RLock()
        self._shown: dict[tuple[str, str], _Shown] = {}  # by name and text, in the order of their starts
        self._bar: Any = None  # a tqdm
        self._drawn: _Shown | None = None  # the activity of the bar

    def __call__(self, record: Activity) -> None:
        if sys.stderr is None:  # the process was started without one
            return
        with self._lock:
            try:
                if record.name != MESSAGE:
                    self._take(record)
                elif record.level >= self.level:
                    self._print(record.text)
            except (OSError, ValueError):  # standard error was closed
                self._bar = None

    def _take(self, record: Activity) -> None:
        now, key = time.monotonic(), (record.name, record.text)
        shown = self._shown.setdefault(key, _Shown(record, now))
        shown.record = record
        if ended := record.state in ("done", "failed"):
            del self._shown[key]
        if record.state == "began" and record.level >= logging.INFO:
            self._print(record.text)
            shown.printed = now
        if is_terminal():
            self._draw(now)
        elif not ended:
            self._line(shown, now)
        announced = shown.printed is not None and not is_terminal()
        if record.state == "done" and (announced or self.all_ends):
            seconds = now - shown.began
            took = minutes(seconds) if seconds >= QUICK_SECONDS else f"{seconds:.2f} s"
            self._print(f"{record.text if shown.printed is None else record.name}: done in {took}")

    def _print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.clear()
        print(f"flexengine: {text}", file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def _line(self, shown: _Shown, now: float) -> None:
        """Print a plain line of an activity, unless it is too early."""
        record, wait = shown.record, QUICK_SECONDS if shown.printed is None else LINE_SECONDS
        if now - (shown.began if shown.printed is None else shown.printed) < wait:
            return
        if shown.printed is None:
            self._print(record.text)
        else:
            part = share(record)
            done = [] if part is None else [f"{part:.0%} of {record.unit}" if record.details else f"{part:.0%}"]
            self._print(f"{record.name}: {', '.join(done + facts(record, now - shown.began))}")
        shown.printed = now

    def _draw(self, now: float) -> None:
        """Draw the bar of the innermost activity."""
        last = next(reversed(self._shown.values()), None)
        if self._bar is not None and self._drawn is not last:
            self._bar.close()
            self._bar = None
        self._drawn = last
        if last is None:
            return
        part, width = share(last.record), columns() - 1
        form = bar_format(last.record.name, part, facts(last.record, now - last.began), width)
        shape = {"total": part and 1.0, "ncols": width, "bar_format": form}
        if self._bar is None:
            from tqdm import tqdm  # imported here, as most commands never need it

            # Without its monitor thread, as malloc gives each new thread an arena of its own. Other bars keep theirs.
            bar = type("Bar", (tqdm,), {"monitor_interval": 0})
            self._bar = bar(initial=part or 0, file=sys.stderr, leave=False, **shape)
        else:
            vars(self._bar).update(n=part or 0, **shape)
            self._bar.refresh()


def bar_format(name: str, part: float | None, numbers: list[str], columns: int) -> str:
    """Return tqdm's format of a bar with its facts. They are left out, the last one first, where the line is too short.

    Args:
        name: name of the activity.
        part: finished part, 0 to 1; None if it is unknown, which has no bar.
        numbers: facts of the moment, the most important first.
        columns: most characters.
    """
    head, tail = (f"{name} ", "") if part is None else (f"{name} {part:4.0%} |", "| ")
    room = columns - len(head) - (0 if part is None else MIN_BAR + len(tail))
    while numbers and len(", ".join(numbers)) > room:
        numbers = numbers[:-1]
    text = (head, tail + ", ".join(numbers))
    return ("" if part is None else "{bar}").join(each.replace("{", "{{").replace("}", "}}") for each in text)


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def columns() -> int:
    """Return the characters of a line of the terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS


def share(record: Activity) -> float | None:
    """Return the finished part of an activity, 0 to 1; None if it is unknown."""
    return min(1.0, record.done / record.total) if record.total else None


def facts(record: Activity, seconds: float) -> list[str]:
    """Return the numbers of an activity that has lasted some seconds, the most important first."""
    if record.details:
        return list(record.details)
    numbers = [amount(record.done, record.total, record.unit)] if record.unit else []
    numbers.append(minutes(seconds))
    part = share(record)
    if part and seconds >= MIN_ETA_SECONDS and record.total and record.total >= MIN_ETA_TOTAL:
        numbers.append(f"{minutes(seconds * (1 - part) / part)} left")
    return numbers


def amount(done: float, total: float | None, unit: str) -> str:
    """Return a count, of a total if there is one, with its unit. Bytes (unit "B") have a prefix: 1.2 of 3.4 GB."""
    if unit != "B":
        return f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"
    largest = max(done, total or 0.0)
    prefix, factor = next((x for x in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if largest >= x[1]), ("kB", 1e3))
    of = "" if total is None else f" of {total / factor:,.1f}"
    return f"{done / factor:,.1f}{of} {prefix}"


def minutes(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def listener_of(progress: bool | Listener | None) -> Listener | None:
    """Return the listener that `EngineOptions.progress` selects; None for the logger.

    None selects the listener of this context, as of a command that opens an engine, if there is one.
    """
    if callable(progress):
        return progress if isinstance(progress, Display) else _serial(progress)
    if progress is None and (present := listener()) is not None:
        return present
    return _display() if progress or (progress is None and is_terminal()) else None


_display = cache(Display)  # one for all engines of this process


def _serial(to: Listener) -> Listener:
    """Return a listener that is called by one thread at a time."""
    lock = threading.RLock()

    def take(record: Activity) -> None:
        with lock:
            to(record)

    take.calls_me = lock._is_owned  # type: ignore[attr-defined]  # whether the present thread is within a call
    return take
