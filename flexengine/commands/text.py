"""Tables and ages for people."""

import time
from collections.abc import Collection, Sequence

from flexengine.plan.words import count


def table(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return the lines as text with aligned columns. right: numbers of the columns that are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.rjust if number in right else str.ljust for number in range(len(widths))]
    rows = ([side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in rows)


def ago(when: float) -> str:
    """Return the time since a moment, in seconds since 1970, in words, such as "3 days ago"."""
    seconds = max(0.0, time.time() - when)
    for unit, length in (("day", 24 * 3600), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{count(int(seconds // length), unit, f'{unit}s')} ago"
    return "just now"
