"""What a reader of one file format is: the type of the functions that `source.FORMATS` names; and what readers share,
among them those of tables.

A bad row becomes a row with an error; only an unusable file raises.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any, BinaryIO, NamedTuple, get_args, get_origin, get_type_hints

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, json_fault, json_kind, meant
from flexengine.job.rows import PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.source import InputFile

MAX_LINE_BYTES = 64 * 2**20
BOM = b"\xef\xbb\xbf"
DELIMITERS = {"csv": ",", "tsv": "\t"}  # by format
_AS_TSV = "give --input-format tsv (input_format='tsv' in Python)"


class ReadOptions(NamedTuple):
    """An input, and how its rows are read."""

    source: InputFile
    column: str | None
    score: bool  # whether rows without a prompt are scored

    def accepted(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns of which a table must have one. default: without a prompt column."""
        scored = SCORED_KINDS if self.score else ()
        return (*scored, *(default if self.column is None else (self.column,)))


ReadRows = Callable[[BinaryIO], Iterator[Row]]  # yields the rows of the file, which is at its beginning
OpenReader = Callable[[ReadOptions], ReadRows]  # raises InvalidInput if no row of the file can be read


def plain_request(fields: dict[str, Any], column: str | None, score: bool) -> dict[str, Any]:
    """Return the request of a row whose prompt is in `column`, without other kinds of prompts.

    Args:
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
    """One row of a table."""

    line: int  # line on which the row starts, from 1
    fields: dict[str, Any]  # cells by column, converted to values that JSON can hold
    fault: str | None = None  # why the row cannot be used; None if it can


def check_columns(options: ReadOptions, columns: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidInput if two columns share a name, or none of the columns `wanted` exists."""
    if double := sorted({name for name in columns if columns.count(name) > 1}):
        raise InvalidInput(f"input {options.source.name} has several columns named {double}; rename them")
    if set(wanted) & set(columns):
        return
    lacks = f"input {options.source.name} has no column {' or '.join(wanted)}; its columns are {columns}"
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
        as_tsv: what to do if tabs separate the columns.
    """
    separator = re.search(r"[;\t|]", columns[0]) if len(columns) == 1 and form in DELIMITERS else None
    if separator is None:
        return ""
    tabs = separator[0] == "\t"
    remedy = as_tsv if tabs else "save the file with commas"
    return f"they seem to be separated by {'tabs' if tabs else repr(separator[0])}; {remedy}"


# Lines as bytes, so that a bad line affects no other line, and JSON objects in lines.


def read_lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """Yield lines with their line ends, without a leading BOM. A line over `most` bytes is skipped in pieces, and None
    is yielded for it."""
    first = True
    while raw := file.readline(most + 1):
        if over := len(raw) > most and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(2**20)
        yield None if over else raw.removeprefix(BOM) if first else raw
        first = False


def too_long(most: int) -> str:
    """Return the fault of a line or record of over `most` bytes."""
    return f"is longer than {most:,} bytes"


def utf8_fault(raw: bytes) -> str | None:
    """Return why the bytes are not UTF-8 text, or None if they are."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}; save the file as UTF-8"
    return None


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raise InvalidInput if the line holds none, or holds NaN or numbers beyond a
    float's range."""
    if fault := utf8_fault(raw):
        raise InvalidInput(fault)
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:  # its own text counts lines within this line
        raise InvalidInput(f"invalid JSON: {json_reason(error)} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"invalid JSON: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f'holds {json_kind(value)}; a row must be an object such as {{"prompt": ...}}')
    return value


def json_reason(error: json.JSONDecodeError) -> str:
    """Return why a text is no JSON. Python's own advice on a byte order mark is for programmers."""
    return "a byte order mark (BOM)" if "BOM" in error.msg else error.msg.removesuffix(" at")


def _finite(text: str) -> float:
    if text in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{text} is not a JSON number")
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value
