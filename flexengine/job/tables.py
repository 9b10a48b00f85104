"""Tables into records: CSV and TSV by the csv module, Parquet and Arrow files by pyarrow, which is optional."""

import base64
import csv
import datetime
import json
import math
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast, get_args, get_origin, get_type_hints

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.lines import read_lines, too_long, utf8_fault

_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,4000})(\.0*)?\s*", re.ASCII)
_BATCH_ROWS = 256  # converted to Python at a time


def _kinds(hint: Any) -> frozenset[Any]:
    """The types a hint is made of: of tuple[str, ...] tuple and str, of int | None int and NoneType."""
    return frozenset({get_origin(hint) or hint}).union(*map(_kinds, get_args(hint)))


_SAMPLING = {name: _kinds(hint) for name, hint in get_type_hints(SamplingParams).items()}


class Record(NamedTuple):
    """One row of a table. line: where it starts, from 1. fields: its cells as JSON can hold them. fault: why it
    cannot be used, or None."""

    line: int
    fields: dict[str, Any]
    fault: str | None = None


class Cells(NamedTuple):
    """One record of a CSV file, header or not. line: where it starts, from 1. fault: why it cannot be read, or None."""

    line: int
    cells: list[str]
    fault: str | None


# CSV and TSV, quoted as RFC 4180 says: a quoted cell may hold line ends, so a record is one line or several.


_MOST_LINES = 1000  # of a record: else each stray quote would cost reading the rest of the file


class _Feed(Iterator[str]):
    """Hands lines to the csv module; those of a record that came to nothing can be handed out again.

    taken: lines (number, bytes) of the record that is being read.
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
        if raw is None or self._size > self._most + 2:  # the record's end does not count
            raise csv.Error(too_long(self._most))
        if len(self.taken) > _MOST_LINES:
            raise csv.Error(f"a quoted cell does not end within {_MOST_LINES} lines")
        return raw.decode("utf-8", "surrogateescape")

    def begin(self) -> None:
        self.taken.clear()
        self._size = 0

    def give_back(self) -> None:
        """Hands out again all lines of this record but the first."""
        self._again.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]


def csv_records(file: BinaryIO, delimiter: str, most: int) -> Iterator[Cells]:
    """The records of a CSV file, header first. Blank lines are no records.

    A record that breaks the rules of quoting costs its first line only: reading goes on with the next line, so that
    a quote too many does not swallow the rest of the file. most: bytes of a record.
    """
    csv.field_size_limit(max(csv.field_size_limit(), most))  # the module's one limit, for the whole process
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


def named(record: Cells, columns: list[str]) -> Record:
    """The record with the header's names."""
    fault = record.fault
    if fault is None and len(record.cells) != len(columns):
        fault = f"has {len(record.cells)} cells, but the header has {len(columns)}"
    return Record(record.line, {} if fault else dict(zip(columns, record.cells, strict=True)), fault)


def _csv_fault(message: str) -> str:
    """The csv module's words, without its advice to programmers."""
    return message if message.startswith("is longer") else f"invalid CSV: {message.split(' - ')[0]}"


def parsed_cell(name: str, cell: str) -> Any:
    """The value of a CSV cell: in a column named like a sampling field the number, truth value or list that the text
    stands for, None if it is empty (the default holds); in any other column the text itself.

    Whole numbers may end in .0 (as pandas writes them), truth values are true and false, lists are JSON, and a list
    of one may be its element alone. Raises InvalidInput for a text that is none of these.
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
            " (data needs a column of another name)"
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


def arrow_columns(path: Path, name: Path) -> list[str]:
    """Names of the columns. Raises InvalidInput, which calls the file `name`, if it cannot be opened."""
    try:
        schema, _ = _open(path)
    except ImportError as error:
        raise InvalidInput(
            f'input {name}: {path.suffix} files are read by pyarrow; pip install "flexengine[parquet]"'
        ) from error
    except Exception as error:  # pyarrow has errors of its own and lets others pass
        raise InvalidInput(f"input {name} cannot be read as {path.suffix}: {_first_line(error)}") from error
    return list(schema.names)


def arrow_records(path: Path, name: Path, text_column: str) -> Iterator[Record]:
    """The rows, converted some at a time, with what JSON cannot hold made into text (`_plain`).

    text_column: bytes in it are UTF-8 text; a row where they are not is faulty. Raises InvalidInput, which calls the
    file `name`, where the file turns out to be damaged.
    """
    import pyarrow as pa

    line = 0
    try:
        for batch in _open(path)[1]:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                for cells in rows_of(batch.slice(first, _BATCH_ROWS)):
                    line += 1
                    yield record_of(line, cells, text_column)
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(f"input {name} is damaged after row {line}: {_first_line(error)}") from error


def _open(path: Path) -> tuple[Any, Iterator[Any]]:
    """Schema and record batches."""
    import pyarrow as pa

    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        table: Any = cast(Any, pq).ParquetFile(path, buffer_size=2**20, pre_buffer=False)
        return table.schema_arrow, table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)
    source = pa.memory_map(str(path))
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # what the datasets library saves is the stream that such a file wraps
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Rows as Python values; a cell that cannot be converted is its exception."""
    try:
        yield from batch.to_pylist()
    except (ValueError, ArithmeticError):  # text that is not UTF-8, a time that Python cannot tell
        columns = batch.schema.names
        for i in range(batch.num_rows):
            yield {name: _cell(column[i]) for name, column in zip(columns, batch.columns, strict=True)}


def _cell(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, ArithmeticError) as error:
        try:
            return str(scalar.cast("string").as_py())  # times finer than Python's
        except (ValueError, ArithmeticError, NotImplementedError):
            return error


def record_of(line: int, cells: dict[str, Any], text_column: str) -> Record:
    fault = next((f"column {n}: {_first_line(v)}" for n, v in cells.items() if isinstance(v, Exception)), None)
    text = cells.get(text_column)
    if isinstance(text, bytes):
        fault = fault or utf8_fault(text)
        cells[text_column] = text if fault else text.decode("utf-8")
    return Record(line, {name: _plain(v) for name, v in cells.items() if not isinstance(v, Exception)}, fault)


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite are null, times ISO 8601 text, bytes base64, and
    whatever else (decimals, durations, UUIDs) text."""
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
    """A sampling field's value; 9.0 is 9 in one that takes whole numbers, as a column with gaps may hold them."""
    whole = int in _SAMPLING.get(name, ()) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
