"""Readers of tables: of CSV and TSV files; of Parquet files, and of Arrow IPC files and streams
(.arrow, .feather version 2), with pyarrow, which is optional.
"""

import base64
import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, NamedTuple, cast, get_args, get_origin, get_type_hints

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, json_fault, meant, shown
from flexengine.job import read_json
from flexengine.job.arrow_messages import messages
from flexengine.job.arrow_sizes import MOST_READ_BYTES, parts
from flexengine.job.csv_records import csv_records
from flexengine.job.inputs import InputFile, ReadRows
from flexengine.job.parquet_pages import BATCH_ROWS, batch_rows
from flexengine.job.read_json import plain_request, utf8_fault
from flexengine.job.rows import CONTEXT, PROMPT_KINDS, SCORED_KINDS, Row

DELIMITERS = {"csv": ",", "tsv": "\t"}  # by format
_AS_TSV = "give --input-format tsv (input_format='tsv' in Python)"
_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,4000})(\.0*)?\s*", re.ASCII)
_UNREAD = f"its row group or batch takes over {MOST_READ_BYTES:,} bytes to be read; write the file with smaller ones"
_TOO_LARGE = f"{read_json.too_long(read_json.MAX_LINE_BYTES)}, or has over {read_json.MAX_VALUES:,} values"


def _kinds(hint: Any) -> frozenset[Any]:
    """Return the types in a type hint: tuple and str for tuple[str, ...], int and NoneType for int | None."""
    return frozenset({get_origin(hint) or hint}).union(*map(_kinds, get_args(hint)))


SAMPLING_TYPES = {name: _kinds(hint) for name, hint in get_type_hints(SamplingParams).items()}


class TableRow(NamedTuple):
    """One row of a table."""

    line: int  # line on which the row starts, from 1
    fields: dict[str, Any]  # cells by column, converted to values that JSON can hold
    fault: str | None = None  # why the row cannot be used; None if it can


def check_columns(source: InputFile, columns: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidInput if two columns share a name, or none of the columns `wanted` exists."""
    if double := sorted(name for name, count in Counter(columns).items() if count > 1):
        raise InvalidInput(f"input {source.name} has several columns named {double}; rename them")
    if set(wanted) & set(columns):
        return
    lacks = f"input {source.name} has no column {' or '.join(wanted)}; its columns are {columns}"
    if seems := other_separator(columns, source.form, _AS_TSV):
        raise InvalidInput(f"{lacks}: {seems}")
    name = meant(wanted[0], columns) or "NAME"
    raise InvalidInput(
        f"{lacks}: name the one with the prompts: --prompt-column {quote(name)} (prompt_column={name!r} in Python)"
    )


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


def open_table(source: InputFile, column: str | None, score: bool) -> ReadRows:
    """Return the reader of a table. pyarrow opens Parquet and Arrow files by their path."""
    if in_text := source.form in DELIMITERS:
        column = column or "prompt"
        if column in PROMPT_KINDS[1:]:
            raise InvalidInput(f"input {source.name}: cells are text and cannot hold {column}; use .jsonl or .parquet")
    texts = (column or "prompt", *((CONTEXT, *SCORED_KINDS) if score else ()))
    convert = _scored_cell if score else parsed_cell

    def table(file: BinaryIO) -> tuple[list[str], Iterator[TableRow]]:
        return csv_table(file, source) if in_text else arrow_table(source, texts)

    def row_of(index: int, record: TableRow) -> Row:
        row = Row(index, record.line, record.fields)
        try:
            if record.fault is not None:
                raise InvalidInput(record.fault)
            request = plain_request(record.fields, column, score)
            cells = {name: convert(name, value) for name, value in request.items()} if in_text else request
            return replace(row, request=cells)
        except InvalidInput as error:
            return row.refused(str(error))

    with source.open() as file:
        columns, _ = table(file)
    prompts = PROMPT_KINDS if column is None else (column,)
    check_columns(source, columns, (*SCORED_KINDS, *prompts) if score else prompts)
    return lambda file: (row_of(index, record) for index, record in enumerate(table(file)[1]))


def csv_table(file: BinaryIO, source: InputFile) -> tuple[list[str], Iterator[TableRow]]:
    """Return the names of the columns of a CSV or TSV file, and its rows, which are read as they are iterated. Raise
    InvalidInput if the file has no header."""
    records = csv_records(file, DELIMITERS[source.form], read_json.MAX_LINE_BYTES)
    line, columns, fault = next(records, (0, [], "it is empty"))
    if fault:
        fault = f"line {line} {fault}" if line else fault
        raise InvalidInput(f"input {source.name} has no header line that names the columns: {fault}")

    def named() -> Iterator[TableRow]:
        for line, cells, fault in records:
            if fault is None and len(cells) != len(columns):
                fault = f"has {len(cells)} cells, but the header has {len(columns)}"
            yield TableRow(line, {} if fault else dict(zip(columns, cells, strict=True)), fault)

    return columns, named()


def _scored_cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell of a row that is scored or generates: an empty cell is no value, and choices are a
    JSON list. Other cells are as for `parsed_cell`."""
    if not cell and name in ("prompt", CONTEXT, *SCORED_KINDS):
        return None
    if name != "choices":
        return parsed_cell(name, cell)
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"choices is {shown(cell)}, which is no JSON list: {json_fault(error)}") from error


def parsed_cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell.

    In a column named like a sampling field this is the number, boolean or list in the text, or None, for the default,
    if the cell is empty. In other columns it is the text itself. Whole numbers may end in .0 (pandas writes them so),
    booleans are true and false, lists and objects are JSON, and a list of one may be its element alone.

    Raises:
        InvalidInput: the text is no value of this sampling field.
    """
    kinds = SAMPLING_TYPES.get(name)
    if kinds is None:
        return cell
    if not cell:
        return None
    try:
        if Mapping in kinds:
            return json.loads(cell)
        if tuple in kinds:
            return json.loads(cell) if cell.startswith("[") else [cell if str in kinds else _whole(cell)]
        if bool in kinds:
            return {"true": True, "false": False}[cell.strip().lower()]
        return float(cell) if float in kinds else _whole(cell)
    except (ValueError, KeyError, RecursionError) as error:
        wanted = "true or false" if bool in kinds else "a number" if float in kinds else "a whole number"
        wanted = "a JSON object" if Mapping in kinds else wanted
        if tuple in kinds:
            wanted = "a JSON list" if str in kinds else "a JSON list of whole numbers, or one whole number"
        raise InvalidInput(
            f"column {name} is {cell[:50]!r}; as a sampling field it must be {wanted} (rename the column if it holds"
            " data)"
        ) from error


def _whole(cell: str) -> int:
    if (match := _WHOLE.fullmatch(cell)) is None:
        raise ValueError(cell)
    return int(match[1])


def arrow_table(source: InputFile, texts: Container[str] | None) -> tuple[list[str], Iterator[TableRow]]:
    """Return the names of the columns of a Parquet or Arrow file, and its rows, which are read as they are iterated.

    Values are those that JSON can hold (see `_plain`). Iterating raises InvalidInput if the file is damaged.

    Args:
        texts: as for `record_of`.

    Raises:
        InvalidInput: the file cannot be opened.
    """
    name, form = source.name, source.form
    try:
        schema, batches = _open(source.file, form)
        names = list(schema.names)  # which may not be UTF-8
    except ImportError as error:
        raise InvalidInput(
            f'input {name}: reading .{form} files needs pyarrow; pip install "flexengine[parquet]"'
        ) from error
    except Exception as error:  # pyarrow raises errors of its own, and others unchanged
        raise InvalidInput(f"input {name} cannot be read as .{form}: {_first_line(error)}") from error
    return names, _records(batches, name, texts)


def _records(batches: Iterator[Any], name: Path, texts: Container[str] | None) -> Iterator[TableRow]:
    line = 0
    try:
        for batch in batches:
            for cells in _cells(batch):
                line += 1
                yield TableRow(line, {}, cells) if isinstance(cells, str) else record_of(line, cells, texts)
    except Exception as error:  # pyarrow raises errors of its own, and others unchanged
        raise InvalidInput(f"input {name} is damaged after row {line}: {_first_line(error)}") from error


def _cells(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Yield the cells of each row of a batch, or why the row is not read. batch: the number of its rows if it cannot be
    read within the memory."""
    if isinstance(batch, int):
        yield from repeat(_UNREAD, batch)
        return
    for first in range(0, batch.num_rows, BATCH_ROWS):
        for part, size in parts(batch.slice(first, BATCH_ROWS)):
            yield from [_TOO_LARGE] if size > read_json.MAX_LINE_BYTES else records_of(part)


def _open(path: Path, form: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the record batches of a file. Instead of a batch that takes too much memory, the iterator
    has the number of its rows."""
    import pyarrow as pa

    if form == "parquet":
        import pyarrow.parquet as pq

        table: Any = cast(Any, pq).ParquetFile(path, buffer_size=2**20, pre_buffer=False)
        return table.schema_arrow, _parquet_batches(path, table)
    source = pa.memory_map(str(path))
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # the datasets library writes .arrow files in the IPC stream format
        source.seek(0)
        file = pa.ipc.open_stream(source)
    return file.schema, _arrow_batches(path, file, source)


def _parquet_batches(path: Path, table: Any) -> Iterator[Any]:
    for number, (total, rows) in enumerate(batch_rows(path, table.schema)):
        if rows:
            yield from table.iter_batches(rows, [number], use_threads=False)
        else:
            yield total


def _arrow_batches(path: Path, file: Any, source: Any) -> Iterator[Any]:
    known = list(messages(path))
    if sum(message.size for message in known if message.is_dictionary) > MOST_READ_BYTES // 2:
        raise ValueError(f"its dictionaries take over {MOST_READ_BYTES // 2:,} bytes; write it without dictionaries")
    for number, message in enumerate(message for message in known if not message.is_dictionary):
        if message.size > MOST_READ_BYTES:
            source.seek(message.end)
            yield message.rows
            continue
        batch = file.get_batch(number) if hasattr(file, "get_batch") else file.read_next_batch()
        for column in batch.columns:  # offsets beyond a buffer would end the process
            try:
                column.validate(full=True)
            except ValueError as error:
                if "UTF8" not in str(error):  # text that is not UTF-8 costs its row alone
                    raise
        yield batch


def records_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Return rows as Python values. A cell that cannot be converted is the exception instead."""
    batch = _with_text_times(batch)
    try:
        return iter(batch.to_pylist())
    except Exception:  # text that is not UTF-8, a time beyond Python's range, an unknown time zone
        columns = list(zip(batch.schema.names, batch.columns, strict=True))
        return ({name: _cell(column[i]) for name, column in columns} for i in range(batch.num_rows))


def _with_text_times(batch: Any) -> Any:
    """Return the batch with times of day in nanoseconds, which Python's do not have, as text."""
    for number, column in enumerate(batch.columns):
        if "time64[ns]" in str(column.type):
            with suppress(Exception):  # in a type that is not converted, such as a union
                batch = batch.set_column(number, batch.schema.names[number], column.cast(_with_texts(column.type)))
    return batch


def _with_texts(kind: Any) -> Any:
    """Return the type with text for times of day in nanoseconds."""
    import pyarrow as pa

    if kind == pa.time64("ns"):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_texts(field.type)) for field in kind])
    return pa.list_(_with_texts(kind.value_type)) if pa.types.is_list(kind) else kind


def _cell(scalar: Any) -> Any:
    import pyarrow as pa

    try:
        return scalar.as_py()
    except Exception as error:
        with suppress(Exception):  # in a time zone that is not known here
            return scalar.cast(pa.timestamp(scalar.type.unit, "UTC")).as_py()
        with suppress(Exception):
            return str(scalar.cast("string").as_py())  # nanosecond times, which Python cannot represent
        return error


def record_of(line: int, cells: dict[str, Any], texts: Container[str] | None) -> TableRow:
    """Return the record of a row's cells. It has a fault if a cell is an exception, or if bytes in one of the columns
    `texts` are not UTF-8.

    Args:
        texts: columns in which bytes are text. None reads bytes of every column as text if they are UTF-8.
    """
    fault = next((f"column {n}: {_first_line(v)}" for n, v in cells.items() if isinstance(v, Exception)), None)
    for name, value in cells.items():
        if isinstance(value, bytes) and (texts is None or name in texts):
            wrong = utf8_fault(value)
            fault = fault or (wrong if texts is not None else None)
            cells[name] = value if wrong else value.decode("utf-8")
    return TableRow(line, {name: _plain(v) for name, v in cells.items() if not isinstance(v, Exception)}, fault)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold. Infinity and NaN become None, dates and times ISO 8601 text, bytes base64, and
    other types (decimals, durations, UUIDs) text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    return str(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
