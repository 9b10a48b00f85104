"""Reading of tables as records: CSV and TSV with the csv module, Parquet and Arrow with pyarrow, which is optional."""

import base64
import csv
import datetime
import json
import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast, get_args, get_origin, get_type_hints

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.lines import read_lines, too_long, utf8_fault

_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,4000})(\.0*)?\s*", re.ASCII)
DELIMITERS = {"csv": ",", "tsv": "\t"}  # by format
_BATCH_ROWS = 256  # rows converted to Python at a time


def _kinds(hint: Any) -> frozenset[Any]:
    """Return the types in a type hint: tuple and str for tuple[str, ...], int and NoneType for int | None."""
    return frozenset({get_origin(hint) or hint}).union(*map(_kinds, get_args(hint)))


_SAMPLING = {name: _kinds(hint) for name, hint in get_type_hints(SamplingParams).items()}


class Record(NamedTuple):
    """One row of a table.

    Attributes:
        line: line on which the row starts, from 1.
        fields: cells by column, converted to values that JSON can hold.
        fault: why the row cannot be used; None if it can.
    """

    line: int
    fields: dict[str, Any]
    fault: str | None = None


class Cells(NamedTuple):
    """One record of a CSV file, possibly the header.

    Attributes:
        line: line on which the record starts, from 1.
        cells: cells in order.
        fault: why the record cannot be read; None if it can.
    """

    line: int
    cells: list[str]
    fault: str | None


# CSV and TSV with the quotes of RFC 4180: a quoted cell may hold line ends, so a record is one line or several.


_MOST_LINES = 1000  # most lines of a record: without a limit every stray quote would read the rest of the file


class _Feed(Iterator[str]):
    """Iterator of lines for the csv module. After a broken record `give_back` yields its lines again.

    Attributes:
        taken: lines (number, bytes) of the present record.
    """

    def __init__(self, lines: Iterator[bytes | None], most: int) -> None:
        self._lines, self._most = enumerate(lines, start=1), most
        self._again: deque[tuple[int, bytes | None]] = deque()
        self._size = 0
        self.taken: list[tuple[int, bytes | None]] = []

    def __next__(self) -> str:
        number, raw = self._again.popleft() if self._again else next(self._lines)
        self.taken.append((number, raw))
        self._size += len(raw or b"")
        if raw is None or self._size > self._most + 2:  # 2 bytes for the record's line end
            raise csv.Error(too_long(self._most))
        if len(self.taken) > _MOST_LINES:
            raise csv.Error(f"a quoted cell does not end within {_MOST_LINES} lines")
        return raw.decode("utf-8", "surrogateescape")

    def begin(self) -> None:
        self.taken.clear()
        self._size = 0

    def give_back(self) -> None:
        """Yield all lines of this record but the first again."""
        self._again.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]


def csv_table(file: BinaryIO, name: Path, form: str, most: int) -> tuple[list[str], Iterator[Record]]:
    """Return the names of the columns of a CSV or TSV file, and its rows, which are read as they are iterated.

    Args:
        file: the file, at its beginning.
        name: name of the file in messages.
        form: csv or tsv.
        most: most bytes of a row.

    Raises:
        InvalidInput: the file has no header.
    """
    records = _csv_records(file, DELIMITERS[form], most)
    header = next(records, None)
    if header is None or header.fault:
        fault = f"line {header.line} {header.fault}" if header else "it is empty"
        raise InvalidInput(f"input {name} has no header line that names the columns: {fault}")
    return header.cells, (_named(record, header.cells) for record in records)


def other_separator(columns: Sequence[str], form: str, as_tsv: str = "name it .tsv") -> str:
    """Return, for a message, the character that seems to separate the columns, and what to do; "" if there is none.

    Args:
        columns: names of the columns. With another separator there is one, which holds all names.
        form: format of the file; only csv and tsv have separators.
        as_tsv: what to do if tabs separate the columns.
    """
    found = re.search(r"[;\t|]", columns[0]) if len(columns) == 1 and form in DELIMITERS else None
    if found is None:
        return ""
    tabs = found[0] == "\t"
    return (f"they seem to be separated by {'tabs' if tabs else repr(found[0])};"
            f" {as_tsv if tabs else 'save the file with commas'}")  # fmt: skip


def _csv_records(file: BinaryIO, delimiter: str, most: int) -> Iterator[Cells]:
    """Yield the records of a CSV file, header first, without blank lines.

    If a record breaks the rules of quoting, only its first line is dropped and reading continues with the next line.
    A stray quote therefore does not consume the rest of the file.

    Args:
        most: most bytes of a record.
    """
    csv.field_size_limit(max(csv.field_size_limit(), most))  # the csv module has one limit for the whole process
    feed = _Feed(read_lines(file, most), most)
    while True:
        feed.begin()
        cells, fault = list[str](), None
        try:
            cells = next(csv.reader(feed, delimiter=delimiter, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            feed.give_back()
            fault = _csv_fault(str(error))
        raw = b"".join(raw for _, raw in feed.taken if raw is not None)
        if fault is None and not raw.strip(b" \r\n"):
            continue
        yield Cells(feed.taken[0][0], cells, utf8_fault(raw) or fault)


def _named(record: Cells, columns: list[str]) -> Record:
    """Return a record with the header's column names."""
    fault = record.fault
    if fault is None and len(record.cells) != len(columns):
        fault = f"has {len(record.cells)} cells, but the header has {len(columns)}"
    return Record(record.line, {} if fault else dict(zip(columns, record.cells, strict=True)), fault)


def _csv_fault(message: str) -> str:
    """Return the csv module's message without its advice for programmers."""
    return message if message.startswith("is longer") else f"invalid CSV: {message.split(' - ')[0]}"


def parsed_cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell.

    In a column named like a sampling field this is the number, boolean or list in the text, or None, for the default,
    if the cell is empty. In other columns it is the text itself. Whole numbers may end in .0 (pandas writes them so),
    booleans are true and false, lists are JSON, and a list of one may be its element alone.

    Args:
        name: name of the column.

    Raises:
        InvalidInput: the text is no value of this sampling field.
    """
    kinds = _SAMPLING.get(name)
    if kinds is None:
        return cell
    if not cell:
        return None
    try:
        return _parse(kinds, cell)
    except (ValueError, KeyError, RecursionError) as error:
        raise InvalidInput(
            f"column {name} is {cell[:50]!r}; as a sampling field it must be {_wanted(kinds)}"
            " (rename the column if it holds data)"
        ) from error


def _parse(kinds: frozenset[Any], cell: str) -> Any:
    if tuple in kinds:
        if cell.startswith("["):
            return json.loads(cell)
        return [cell] if str in kinds else [_whole(cell)]
    if bool in kinds:
        return {"true": True, "false": False}[cell.strip().lower()]
    return float(cell) if float in kinds else _whole(cell)


def _whole(cell: str) -> int:
    if (match := _WHOLE.fullmatch(cell)) is None:
        raise ValueError(cell)
    return int(match[1])


def _wanted(kinds: frozenset[Any]) -> str:
    if tuple in kinds:
        return "a JSON list" if str in kinds else "a JSON list of whole numbers, or one whole number"
    return "true or false" if bool in kinds else "a number" if float in kinds else "a whole number"


# Parquet, and Arrow IPC files and streams (.arrow, .feather version 2).


def arrow_columns(path: Path, name: Path, form: str) -> list[str]:
    """Return the names of the columns.

    Args:
        name: name of the file in messages.
        form: parquet or arrow.

    Raises:
        InvalidInput: the file cannot be opened.
    """
    try:
        schema, _ = _open(path, form)
    except ImportError as error:
        raise InvalidInput(
            f'input {name}: reading .{form} files needs pyarrow; pip install "flexengine[parquet]"'
        ) from error
    except Exception as error:  # pyarrow raises errors of its own, and others unchanged
        raise InvalidInput(f"input {name} cannot be read as .{form}: {_first_line(error)}") from error
    return list(schema.names)


def arrow_records(path: Path, name: Path, form: str, text_column: str) -> Iterator[Record]:
    """Yield the rows, converted _BATCH_ROWS at a time, with values that JSON can hold (see `_plain`).

    Args:
        name: name of the file in messages.
        form: parquet or arrow.
        text_column: bytes in this column are UTF-8 text. A row with other bytes has a fault.

    Raises:
        InvalidInput: the file is damaged.
    """
    import pyarrow as pa

    line = 0
    try:
        for batch in _open(path, form)[1]:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                for cells in rows_of(batch.slice(first, _BATCH_ROWS)):
                    line += 1
                    yield record_of(line, cells, text_column)
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


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
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


def record_of(line: int, cells: dict[str, Any], text_column: str) -> Record:
    """Return the record of a row's cells. It has a fault if a cell is an exception, or the text is not UTF-8."""
    fault = next((f"column {n}: {_first_line(v)}" for n, v in cells.items() if isinstance(v, Exception)), None)
    text = cells.get(text_column)
    if isinstance(text, bytes):
        fault = fault or utf8_fault(text)
        cells[text_column] = text if fault else text.decode("utf-8")
    return Record(line, {name: _plain(v) for name, v in cells.items() if not isinstance(v, Exception)}, fault)


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


def whole_number(name: str, value: Any) -> Any:
    """Return a cell's value. In a column named like a sampling field of whole numbers 9.0 becomes 9, as columns with
    gaps hold floats."""
    whole = int in _SAMPLING.get(name, ()) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
