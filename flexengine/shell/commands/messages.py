"""Messages of the commands on standard error, and how many of them are printed; tables and ages as text."""

import logging
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from flexengine.activity import listener, message
from flexengine.plan.formatting import count, plain

QUIET, NORMAL, VERBOSE = -1, 0, 1
_level = NORMAL


def set_verbosity(level: int) -> None:
    """Set how much the process prints: QUIET (errors only), NORMAL or VERBOSE. Each command sets it once, when it has
    read its options."""
    global _level
    _level = level


def verbosity() -> int:
    """Return QUIET, NORMAL or VERBOSE."""
    return _level


def say(text: str) -> None:
    """Print a message, unless -q is given."""
    if _level >= NORMAL:
        _print(text, logging.INFO)


def detail(text: str) -> None:
    """Print a message if -v is given."""
    if _level >= VERBOSE:
        _print(text, logging.DEBUG)


def say_error(text: str) -> None:
    """Print an error as one line."""
    _print(" ".join(text.split()), logging.ERROR)


def _print(text: str, level: int) -> None:
    """Print a line, above the bar if the command shows one. Nothing is printed if stderr is closed."""
    if listener() is not None:
        message(text, level)
    elif sys.stderr is not None:  # print(file=None) would print to stdout
        with suppress(OSError):
            print(f"flexengine: {plain(text)}", file=sys.stderr)


def table(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return the lines as text with aligned columns.

    Args:
        lines: cells of each line. The last cell of a line of fewer cells may be wider than its column.
        right: numbers of the columns that are aligned to the right.
    """
    most = max(map(len, lines))
    columns = ([line[i] for line in lines if i < len(line) - 1 or len(line) == most] for i in range(most))
    widths = [max(map(len, column)) for column in columns]
    sides = [str.rjust if number in right else str.ljust for number in range(most)]
    rows = ([side(cell, width) for side, cell, width in zip(sides, line, widths, strict=False)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in rows)


def ago(when: float) -> str:
    """Return the time since a moment, in seconds since 1970, in words, such as "3 days ago"."""
    seconds = max(0.0, time.time() - when)
    for unit, length in (("day", 24 * 3600), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{count(int(seconds // length), unit, f'{unit}s')} ago"
    return "just now"
