"""Reports of long work as text: bars on a terminal, plain lines elsewhere."""

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from flexengine.activity import MESSAGE, Activity, is_terminal, minutes

LINE_SECONDS = 10.0  # between two plain lines of one activity
QUICK_SECONDS = 2.0  # an activity of level DEBUG prints no plain line before
MIN_ETA_SECONDS, MIN_ETA_TOTAL = 2.0, 20  # seconds of an activity, and its total, for which remaining time is shown
COLUMNS = 80  # of a terminal that does not tell its width
MIN_BAR = 5  # characters of the bar itself


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
    as no job should fail by it. May be called by several threads. level: messages of a lower level are left out; see
    `Activity.level`. `all_ends` prints a line at the end of every activity, also of quick ones and on a terminal.
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
