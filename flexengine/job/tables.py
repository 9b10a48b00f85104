"""Tables of rows: what the readers of CSV, Parquet and Arrow files share."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from flexengine.config import SamplingParams, meant
from flexengine.errors import InvalidInput
from flexengine.job.reading import ReadOptions, plain_request
from flexengine.job.rows import Row

DELIMITERS = {"csv": ",", "tsv": "\t"}  # by format
_AS_TSV = "give --input-format tsv (input_format='tsv' in Python)"


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
