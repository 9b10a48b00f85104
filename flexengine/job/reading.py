"""What a reader of one file format is: the type of the functions that `source.FORMATS` names, and what they share.

A bad row becomes a row with an error; only an unusable file raises.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flexengine.errors import InvalidInput
from flexengine.job.rows import PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.source import InputFile

MAX_LINE_BYTES = 64 * 2**20


class ReadOptions(NamedTuple):
    """An input, and how its rows are read.

    Attributes:
        name: name of the input, for messages.
        source: the open input.
        column: the prompt column, if one was given.
        score: whether rows without a prompt are scored.
    """

    name: Path
    source: InputFile
    column: str | None
    score: bool

    def accepted(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns of which a table must have one. default: without a prompt column."""
        scored = SCORED_KINDS if self.score else ()
        return (*scored, *(default if self.column is None else (self.column,)))


ReadRows = Callable[[BinaryIO], Iterator[Row]]  # yields the rows of the file, which is at its beginning
OpenReader = Callable[[ReadOptions], ReadRows]  # raises InvalidInput if no row of the file can be read


def plain_request(fields: dict[str, Any], column: str | None, score: bool) -> dict[str, Any]:
    """Return the request of a row whose prompt is in `column`, without other kinds of prompts.

    Args:
        fields: all fields of the row.
        column: becomes the prompt of the same name if it is one of PROMPT_KINDS, else `prompt`. None returns all
            fields.
        score: a row without this field is scored.

    Raises:
        InvalidInput: the row has no such field, and is not scored.
    """
    if column is None:
        return fields
    others = {name: value for name, value in fields.items() if name not in (*PROMPT_KINDS, column)}
    if fields.get(column) is None:
        if score:
            return others
        raise InvalidInput(f"has no {column!r}, which is to hold the prompt; it has {sorted(fields)}")
    return {**others, column if column in PROMPT_KINDS else "prompt": fields[column]}
