"""Messages of the commands on standard error, and how many of them are printed."""

import logging
import sys
from contextlib import suppress

from flexengine.activity import listener, message
from flexengine.plan.formatting import plain

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
