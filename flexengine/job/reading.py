"""What a reader of one file format is: the type of the functions that `source.FORMATS` names; and what readers share,
among them those of tables.

A bad row becomes a row with an error; only an unusable file raises.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, NamedTuple, get_args, get_origin, get_type_hints

from flexengine.config import SamplingParams, meant
from flexengine.errors import InvalidInput
from flexengine.job.rows import PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.source import InputFile

MAX_LINE_BYTES = 64 * 2**20
DELIMITERS = {"csv": ",", "tsv": "\t"}  # by format
_AS_TSV = "give --input-format tsv (input_format='tsv' in Python)"


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


def _kinds(hint: Any) -> frozenset[Any]:
    """Return the types in a type hint: tuple and str for tuple[str, ...], int and NoneType for int | None."""
    return frozenset({get_origin(hint) or hint}).union(*map(_kinds, get_args(hint)))


SAMPLING_TYPES = {name: _kinds(hint) for name, hint in get_type_hints(SamplingParams).items()}


class TableRow(NamedTuple):
    """One row of a table.

    Attributes:
        line: line on which the row starts, from 1.
        fields: cells by column, converted to values that JSON can hold.
        fault: why the row cannot be used; None if it can.
    """

    line: int
    fields: dict[str, Any]
    fault: str | None = None


def check_columns(options: ReadOptions, columns: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidInput if two columns share a name, or none of the columns `wanted` exists."""
    if double := sorted({name for name in columns if columns.count(name) > 1}):
        raise InvalidInput(f"input {options.name} has several columns named {double}; rename them")
    if set(wanted) & set(columns):
        return
    lacks = f"input {options.name} has no column {' or '.join(wanted)}; its columns are {columns}"
    if seems := other_separator(columns, options.source.form, _AS_TSV):
        raise InvalidInput(f"{lacks}: {seems}")
    name = meant(wanted[0], columns) or "NAME"
    raise InvalidInput(
        f"{lacks}: name the one with the prompts: --prompt-column {quote(name)} (prompt_column={name!r} in Python)"
    )


def row_of(index: int, record: TableRow, column: str | None, convert: Callable[[str, Any], Any], score: bool) -> Row:
    """Return the row of a record of a table. convert: return the value of a cell, given its column and the cell."""
    row = Row(index, record.line, record.fields)
    if record.fault is not None:
        return row.refused(record.fault)
    try:
        request = plain_request(record.fields, column, score)
        return replace(row, request={name: convert(name, value) for name, value in request.items()})
    except InvalidInput as error:
        return row.refused(str(error))


def whole_number(name: str, value: Any) -> Any:
    """Return a cell's value. In a column named like a sampling field of whole numbers 9.0 becomes 9, as columns with
    gaps hold floats."""
    whole = int in SAMPLING_TYPES.get(name, ()) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def other_separator(columns: Sequence[str], form: str, as_tsv: str = "name it .tsv") -> str:
    """Return, for a message, the character that seems to separate the columns, and what to do; "" if there is none.

    Args:
        columns: names of the columns. With another separator there is one, which holds all names.
        form: format of the file; only csv and tsv have separators.
        as_tsv: what to do if tabs separate the columns.
    """
    separator = re.search(r"[;\t|]", columns[0]) if len(columns) == 1 and form in DELIMITERS else None
    if separator is None:
        return ""
    tabs = separator[0] == "\t"
    remedy = as_tsv if tabs else "save the file with commas"
    return f"they seem to be separated by {'tabs' if tabs else repr(separator[0])}; {remedy}"
