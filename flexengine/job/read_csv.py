"""Reader of CSV and TSV files with the csv module.

Cells have the quotes of RFC 4180: a quoted cell may hold line ends, so a record is one line or several.
"""

import csv
import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO

from flexengine.errors import InvalidInput, json_fault, shown
from flexengine.job import reading
from flexengine.job.rows import CONTEXT, PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.source import InputFile

_MOST_LINES = 1000  # of a record: without a limit every stray quote would read the rest of the file
_Cells = tuple[int, list[str], str | None]  # line on which a record starts, its cells, and why it cannot be read
_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,4000})(\.0*)?\s*", re.ASCII)


def open_csv(options: reading.ReadOptions) -> reading.ReadRows:
    """Return the reader of a CSV or TSV file."""
    source, column = options.source, options.column or "prompt"
    if column in PROMPT_KINDS[1:]:
        raise InvalidInput(
            f"input {options.source.name}: cells are text and cannot hold {column}; use .jsonl or .parquet"
        )
    with source.open() as file:
        columns, _ = csv_table(file, source)
    reading.check_columns(options, columns, options.accepted(("prompt",)))
    convert = _scored_cell if options.score else parsed_cell

    def rows(file: BinaryIO) -> Iterator[Row]:
        _, records = csv_table(file, source)
        for index, record in enumerate(records):
            yield reading.row_of(index, record, column, convert, options.score)

    return rows


class _Feed(Iterator[str]):
    """Iterator of lines for the csv module. After a broken record `give_back` yields its lines again."""

    def __init__(self, lines: Iterator[bytes | None], most: int) -> None:
        self._lines, self._most = enumerate(lines, start=1), most
        self._again: deque[tuple[int, bytes | None]] = deque()
        self._size = 0
        self.taken: list[tuple[int, bytes | None]] = []  # lines (number, bytes) of the present record

    def __next__(self) -> str:
        number, raw = self._again.popleft() if self._again else next(self._lines)
        self.taken.append((number, raw))
        self._size += len(raw or b"")
        if raw is None or self._size > self._most + 2:  # 2 bytes for the record's line end
            raise csv.Error(reading.too_long(self._most))
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


def csv_table(file: BinaryIO, source: InputFile) -> tuple[list[str], Iterator[reading.TableRow]]:
    """Return the names of the columns of a CSV or TSV file, and its rows, which are read as they are iterated. Raise
    InvalidInput if the file has no header."""
    records = _csv_records(file, reading.DELIMITERS[source.form], reading.MAX_LINE_BYTES)
    line, columns, fault = next(records, (0, [], "it is empty"))
    if fault:
        fault = f"line {line} {fault}" if line else fault
        raise InvalidInput(f"input {source.name} has no header line that names the columns: {fault}")
    return columns, (_named(*record, columns) for record in records)


def _csv_records(file: BinaryIO, delimiter: str, most: int) -> Iterator[_Cells]:
    """Yield the records of a CSV file, header first, without blank lines.

    If a record breaks the rules of quoting, only its first line is dropped and reading continues with the next line.
    A stray quote therefore does not consume the rest of the file.
    """
    csv.field_size_limit(max(csv.field_size_limit(), most))  # the csv module has one limit for the whole process
    feed = _Feed(reading.read_lines(file, most), most)
    while True:
        feed.begin()
        cells, fault = list[str](), None
        try:
            cells = next(csv.reader(feed, delimiter=delimiter, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            feed.give_back()
            fault = str(error)  # without the csv module's advice for programmers
            if fault.startswith("new-line character"):
                fault = "has a carriage return (CR) that ends no line; save the file with line ends LF or CRLF"
            elif not fault.startswith("is longer"):
                fault = f"invalid CSV: {fault.split(' - ')[0]}"
        raw = b"".join(raw for _, raw in feed.taken if raw is not None)
        if fault is None and not raw.strip(b" \r\n"):
            continue
        yield feed.taken[0][0], cells, reading.utf8_fault(raw) or fault


def _named(line: int, cells: list[str], fault: str | None, columns: list[str]) -> reading.TableRow:
    if fault is None and len(cells) != len(columns):
        fault = f"has {len(cells)} cells, but the header has {len(columns)}"
    return reading.TableRow(line, {} if fault else dict(zip(columns, cells, strict=True)), fault)


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
    booleans are true and false, lists are JSON, and a list of one may be its element alone.

    Raises:
        InvalidInput: the text is no value of this sampling field.
    """
    kinds = reading.SAMPLING_TYPES.get(name)
    if kinds is None:
        return cell
    if not cell:
        return None
    try:
        if tuple in kinds:
            return json.loads(cell) if cell.startswith("[") else [cell if str in kinds else _whole(cell)]
        if bool in kinds:
            return {"true": True, "false": False}[cell.strip().lower()]
        return float(cell) if float in kinds else _whole(cell)
    except (ValueError, KeyError, RecursionError) as error:
        wanted = "true or false" if bool in kinds else "a number" if float in kinds else "a whole number"
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
