"""Errors of rows by kind, in bounded memory: messages that differ only in numbers and quoted text are one kind."""

import re
from dataclasses import dataclass

from flexengine.job.rows import without_place

MOST_KINDS = 30
MOST_CHARACTERS = 300  # of a stored message

_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]?|\d[\d,.]*")


@dataclass
class ErrorKind:
    """Rows whose errors are of one kind.

    Attributes:
        count: number of rows.
        row: number of the first row.
        message: the first row's error, at most MOST_CHARACTERS characters.
    """

    count: int
    row: int
    message: str


class Errors:
    """Counts of errors by kind.

    Attributes:
        kinds: by pattern, in the order of their first rows; at most MOST_KINDS.
        others: rows with errors of further kinds.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}
        self.others = 0

    def add(self, row: int, message: str) -> None:
        """Add a row's error."""
        short = message[: 4 * MOST_CHARACTERS]
        pattern = _VARIES.sub("*", without_place(short))[:MOST_CHARACTERS]
        if (kind := self.kinds.get(pattern)) is not None:
            kind.count += 1
        elif len(self.kinds) < MOST_KINDS:
            cut = message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - 4] + " ..."
            self.kinds[pattern] = ErrorKind(1, row, cut)
        else:
            self.others += 1

    def by_count(self) -> list[ErrorKind]:
        """Return the kinds, the most frequent first."""
        return sorted(self.kinds.values(), key=lambda kind: -kind.count)
