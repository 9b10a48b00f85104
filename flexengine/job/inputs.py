"""Reading of input files as rows. A bad row becomes a row with an error; only an unusable file raises."""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from flexengine.activity import advance
from flexengine.errors import InvalidInput
from flexengine.job import openai, tables
from flexengine.job.lines import BOM, json_object, read_lines, too_long, utf8_fault
from flexengine.job.rows import PROMPT_KINDS, Row

MAX_LINE_BYTES = 64 * 2**20
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ACCEPTED = (
    ".jsonl, .ndjson and .json (one JSON object per line), .txt (one prompt per line), .csv and .tsv (with a header),"
    " .parquet, .arrow and .feather"
)
STDIN = "/dev/stdin"
_STEP = 2**20


class Rows:
    """The rows of an input file. Every `iter()` reads the file again from its beginning. Memory does not grow with the
    file. Use as a context manager, or call `close`.

    Iterating raises InvalidInput if the file has changed since it was opened, or a Parquet or Arrow file is damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str], prompt_column: str | None = None, limit: int | None = None
    ) -> None:
        """Open an input file.

        Args:
            path: the suffix decides the format: .jsonl, .ndjson, .json (one object per line, which may be an OpenAI
                batch line, see `openai.is_batch_line`), .txt, .csv, .tsv, .parquet, .arrow, .feather. A pipe or device
                can be read only once, so it is copied to a temporary file; without a suffix it holds JSON lines. "-" or
                /dev/stdin is standard input from its present position, which is copied and holds JSON lines.
            prompt_column: field or column that holds the prompt; other prompt fields are then data. A column named
                messages or prompt_token_ids is read as such. None reads any of PROMPT_KINDS, or `prompt` in .csv and
                .tsv files.
            limit: most rows to read; None reads all.

        Raises:
            InvalidInput: the file is missing, unreadable, a directory, or a JSON array of objects; its suffix is
                unknown; a table cannot be opened or lacks the column; or `prompt_column` is given for a .txt file.
        """
        self.path = Path(STDIN if path == "-" else path)
        self._limit = None if limit is None else min(limit, sys.maxsize)
        self._copy: Any = None
        self._stream = self.path == Path(STDIN) or _is_stream(self.path)
        form = _json if self._stream and not self.path.suffix else _FORMATS.get(self.path.suffix.lower())
        if form is None:
            raise InvalidInput(f"input {path} has suffix {self.path.suffix!r}; accepted are {_ACCEPTED}")
        try:
            self._file = self._readable()
            self._state = _state(self._file)
            self._read = form(_Source(self.path, self._file, prompt_column))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Row]:
        if _state(self._file) != self._state:
            raise InvalidInput(f"input {self.path} has changed since it was opened; start the job again")
        return islice(self._read(), self._limit)

    def __enter__(self) -> "Rows":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary copy, if there is one. Without this call it is removed with the object."""
        if self._copy is not None:
            self._copy.close()

    def sha256(self) -> str:
        """Return the hex digest of all bytes of the input, including those beyond `limit`."""
        digest = hashlib.sha256()
        with self._file.open("rb") as file:
            while block := file.read(_STEP):
                digest.update(block)
        return digest.hexdigest()

    def _readable(self) -> Path:
        """Return a regular file that holds the input's bytes: the input, or a temporary copy of a pipe or device."""
        if self.path.is_dir():
            raise InvalidInput(f"input {self.path} is a directory; it must be a file: {_ACCEPTED}")
        try:
            standard = self.path == Path(STDIN)
            with open(0 if standard else self.path, "rb", closefd=not standard) as file:
                if not self._stream:
                    return self.path
                self._copy = tempfile.NamedTemporaryFile(  # noqa: SIM115 - it lives as long as this object
                    prefix="flexengine-input-", suffix=self.path.suffix
                )
                shutil.copyfileobj(file, self._copy, _STEP)
                self._copy.flush()
        except OSError as error:
            fault = "cannot be read" if self._copy is None else "cannot be copied to a temporary file"
            raise InvalidInput(f"input {self.path} {fault} ({error.strerror}); give a file: {_ACCEPTED}") from error
        return Path(self._copy.name)


def survey(rows: Iterable[Row]) -> int:
    """Return the number of rows. Raise InvalidInput if OpenAI batch lines share a custom_id. For the memory that this
    takes see `openai.duplicate_ids`."""
    total, hashes = 0, array("q")
    for row in rows:
        total += 1
        advance()
        if row.custom_id:
            hashes.append(hash(row.custom_id))
    if repeated := openai.duplicate_ids(rows, hashes):
        listed = ", ".join(f"{custom_id!r} (lines {first} and {second})" for custom_id, first, second in repeated)
        raise InvalidInput(f"every custom_id must be unique, but these are found twice: {listed}; change one of each")
    return total


class _Source(NamedTuple):
    """An input that is open.

    Attributes:
        name: name of the input, for messages.
        file: regular file that holds its bytes.
        column: the prompt column, if one was given.
    """

    name: Path
    file: Path
    column: str | None


_Reader = Callable[[], Iterator[Row]]


def _is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe or a device: neither a regular file nor a directory."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _state(path: Path) -> tuple[int, ...] | None:
    """Return device, inode, size and time of a file, by which a change is noticed; None if the file is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _text(source: _Source) -> _Reader:
    if source.column is not None:
        raise InvalidInput(f"input {source.name} has one prompt per line and no columns; leave the prompt column out")

    def rows() -> Iterator[Row]:
        with source.file.open("rb") as file:
            for row, raw in _filled(file):
                yield _text_row(row, raw) if row.error is None else row

    return rows


def _json(source: _Source) -> _Reader:
    if _is_array(source.file):
        made = quote(f"{source.name.with_suffix('')}-rows.jsonl")
        raise InvalidInput(f"input {source.name} is a JSON array; rows are one JSON object per line: make them with"
                           f" jq -c '.[]' {quote(str(source.name))} > {made}")  # fmt: skip

    def rows(unreadable: str | None = None) -> Iterator[Row]:
        with source.file.open("rb") as file:
            for row, raw in _filled(file):
                read = _json_row(row, raw, source.column) if row.error is None else row
                yield read if read.fields else replace(read, custom_id=unreadable)

    # The kind of an unreadable line is unknown. Its result has the format of the file's first readable line.
    first = next((row for row in rows() if row.fields), None)
    return partial(rows, "" if first is not None and first.is_batch else None)


def _is_array(file: Path) -> bool:
    """Return whether a file begins like a JSON array of objects."""
    with file.open("rb") as stream:
        return re.match(rb"\s*\[\s*\{", stream.read(_STEP).removeprefix(BOM)) is not None


def _csv(source: _Source) -> _Reader:
    delimiter, column = _DELIMITERS[source.name.suffix.lower()], source.column or "prompt"
    if column in PROMPT_KINDS[1:]:
        raise InvalidInput(f"input {source.name}: cells are text and cannot hold {column}; use .jsonl or .parquet")
    with source.file.open("rb") as file:
        header = next(tables.csv_records(file, delimiter, MAX_LINE_BYTES), None)
    if header is None or header.fault:
        what = f"line {header.line} {header.fault}" if header else "it is empty"
        raise InvalidInput(f"input {source.name} has no header line that names the columns: {what}")
    columns = header.cells
    _check_columns(source, columns, (column,))

    def rows() -> Iterator[Row]:
        with source.file.open("rb") as file:
            records = islice(tables.csv_records(file, delimiter, MAX_LINE_BYTES), 1, None)
            for index, record in enumerate(records):
                yield _table_row(index, tables.named(record, columns), column, tables.parsed_cell)

    return rows


def _arrow(source: _Source) -> _Reader:
    columns = tables.arrow_columns(source.file, source.name)
    _check_columns(source, columns, PROMPT_KINDS if source.column is None else (source.column,))

    def rows() -> Iterator[Row]:
        for index, record in enumerate(tables.arrow_records(source.file, source.name, source.column or "prompt")):
            yield _table_row(index, record, source.column, tables.whole_number)

    return rows


_FORMATS: dict[str, Callable[[_Source], _Reader]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _json),
    ".txt": _text,
    **dict.fromkeys(_DELIMITERS, _csv),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), _arrow),
}


def _check_columns(source: _Source, columns: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidInput if two columns share a name, or none of the columns `wanted` exists."""
    if double := sorted({name for name in columns if columns.count(name) > 1}):
        raise InvalidInput(f"input {source.name} has several columns named {double}; rename them")
    if not set(wanted) & set(columns):
        raise InvalidInput(
            f"input {source.name} has no column {' or '.join(wanted)}; its columns are {columns}:"
            " name the one with the prompts (--prompt-column)"
        )


def _filled(file: BinaryIO) -> Iterator[tuple[Row, bytes]]:
    """Yield each line that is not blank, without its line end, with an empty row, or a row with an error."""
    index = 0
    for line, raw in enumerate(read_lines(file, MAX_LINE_BYTES), start=1):
        if raw is not None and not raw.strip():
            continue
        row = Row(index, line)
        yield (row.refused(too_long(MAX_LINE_BYTES)), b"") if raw is None else (row, raw.rstrip(b"\r\n"))
        index += 1


def _text_row(row: Row, raw: bytes) -> Row:
    if fault := utf8_fault(raw):
        return row.refused(fault)
    return Row(row.index, row.line, {"prompt": raw.decode("utf-8")})


def _json_row(row: Row, raw: bytes, column: str | None) -> Row:
    try:
        fields = json_object(raw)
    except InvalidInput as error:
        return row.refused(str(error))
    batch = openai.is_batch_line(fields, (*PROMPT_KINDS, column))
    row = Row(row.index, row.line, fields, custom_id=openai.custom_id_of(fields) if batch else None)
    try:
        return replace(row, request=openai.request_of(fields) if batch else _request(fields, column))
    except InvalidInput as error:
        return row.refused(str(error))
    except RecursionError:
        return row.refused("nested too deeply")


def _table_row(index: int, record: tables.Record, column: str | None, convert: Callable[[str, Any], Any]) -> Row:
    row = Row(index, record.line, record.fields)
    if record.fault is not None:
        return row.refused(record.fault)
    try:
        return replace(row, request={name: convert(name, v) for name, v in _request(record.fields, column).items()})
    except InvalidInput as error:
        return row.refused(str(error))


def _request(fields: dict[str, Any], column: str | None) -> dict[str, Any]:
    """Return the request of a row whose prompt is in `column`, without other kinds of prompts.

    Args:
        column: becomes the prompt of the same name if it is one of PROMPT_KINDS, else `prompt`. None returns all
            fields.

    Raises:
        InvalidInput: the row has no such field.
    """
    if column is None:
        return fields
    if fields.get(column) is None:
        raise InvalidInput(f"has no {column!r}, which is to hold the prompt; it has {sorted(fields)}")
    others = {name: value for name, value in fields.items() if name not in (*PROMPT_KINDS, column)}
    return {**others, column if column in PROMPT_KINDS else "prompt": fields[column]}
