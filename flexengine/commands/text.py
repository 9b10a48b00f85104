"""Tables and ages for people."""

import time
from collections.abc import Collection, Sequence

from flexengine.plan.formatting import count


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
