"""Reader of Parquet files, and of Arrow IPC files and streams (.arrow, .feather version 2), with pyarrow, which is
optional."""

import base64
import datetime
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from flexengine.errors import InvalidInput
from flexengine.job.reading import ReadOptions, ReadRows, TableRow, check_columns, row_of, utf8_fault, whole_number
from flexengine.job.rows import CONTEXT, PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.source import InputFile

_BATCH_ROWS = 256  # rows converted to Python at a time


def open_arrow(options: ReadOptions) -> ReadRows:
    """Return the reader of a Parquet or Arrow file, which pyarrow opens by its path."""
    texts = (options.column or "prompt", *((CONTEXT, *SCORED_KINDS) if options.score else ()))
    check_columns(options, arrow_table(options.source, texts)[0], options.accepted(PROMPT_KINDS))

    def rows(_: BinaryIO) -> Iterator[Row]:
        for index, record in enumerate(arrow_table(options.source, texts)[1]):
            yield row_of(index, record, options.column, whole_number, options.score)

    return rows


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
    except ImportError as error:
        raise InvalidInput(
            f'input {name}: reading .{form} files needs pyarrow; pip install "flexengine[parquet]"'
        ) from error
    except Exception as error:  # pyarrow raises errors of its own, and others unchanged
        raise InvalidInput(f"input {name} cannot be read as .{form}: {_first_line(error)}") from error
    return list(schema.names), _records(batches, name, texts)


def _records(batches: Iterator[Any], name: Path, texts: Container[str] | None) -> Iterator[TableRow]:
    import pyarrow as pa

    line = 0
    try:
        for batch in batches:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                for cells in records_of(batch.slice(first, _BATCH_ROWS)):
                    line += 1
                    yield record_of(line, cells, texts)
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(f"input {name} is damaged after row {line}: {_first_line(error)}") from error


def _open(path: Path, form: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the record batches of a file."""
    import pyarrow as pa

    if form == "parquet":
        import pyarrow.parquet as pq

        table: Any = cast(Any, pq).ParquetFile(path, buffer_size=2**20, pre_buffer=False)
        return table.schema_arrow, table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)
    source = pa.memory_map(str(path))
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # the datasets library writes .arrow files in the IPC stream format
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))


def records_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield rows as Python values. A cell that cannot be converted is the exception instead."""
    try:
        yield from batch.to_pylist()
    except (ValueError, ArithmeticError):  # text that is not UTF-8, or a time beyond Python's range
        columns = batch.schema.names
        for i in range(batch.num_rows):
            yield {name: _cell(column[i]) for name, column in zip(columns, batch.columns, strict=True)}


def _cell(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, ArithmeticError) as error:
        try:
            return str(scalar.cast("string").as_py())  # nanosecond times, which Python cannot represent
        except (ValueError, ArithmeticError, NotImplementedError):
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
