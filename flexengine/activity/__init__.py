"""Reports of long work: what is done, why, how long it takes, and how far it is.

Code that may take longer than a second runs inside `activity(...)` and calls `advance` or `tick`. Reports go to the
listener of the present context, which `reporting` sets: an engine sets its own, a command one for all its engines.
Without a listener, reports go to the logger "flexengine". Nothing here starts a thread.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar

from flexengine.words import rewording

INTERVAL = 0.5  # seconds between two reports of one activity
MESSAGE = "message"  # name of a record that is a text only

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
    """Work that is under way. Its methods may be called from any thread; reports never overlap. listener: receives the
    reports; None for the logger. record: the first report."""

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
    """Report the block as one activity. Must not enclose a `yield` of a generator. name, text, total, unit, level: see
    `Activity`."""
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
    """Report one line of text. level: logging.DEBUG, INFO or WARNING."""
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


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


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
        return _serial(progress)
    if progress is None and (present := listener()) is not None:
        return present
    return _display() if progress or (progress is None and is_terminal()) else None


@cache
def _display() -> Listener:
    """Return the display of all engines of this process. Most jobs are shown by a command, or not at all."""
    display: Listener = resolve_name("flexengine.activity.display:Display")()  # it imports this module
    return display


def _serial(to: Listener) -> Listener:
    """Return a listener that is called by one thread at a time."""
    lock = threading.RLock()

    def take(record: Activity) -> None:
        with lock:
            to(record)

    take.calls_me = lock._is_owned  # type: ignore[attr-defined]  # whether the present thread is within a call
    return take
