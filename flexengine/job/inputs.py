"""Input files into rows. A bad row becomes a row with an error; only a file that cannot be used at all raises."""

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
    """The rows of an input file, read anew from the beginning by every `iter()`, in memory independent of its length.

    path: the suffix tells the format: .jsonl, .ndjson, .json (one object per line; a line may be an OpenAI batch line,
        see `openai.is_batch_line`), .txt, .csv, .tsv, .parquet, .arrow, .feather. What is not a regular file (a pipe)
        can be read only once: it is copied to a temporary file first; without a suffix it holds JSON lines. "-" or
        /dev/stdin is standard input, from where it stands: JSON lines that are copied, too.
    prompt_column: the field or column that holds the prompt; other prompt fields are then data. One named messages or
        prompt_token_ids is read as such. None: any of PROMPT_KINDS; of .csv and .tsv, `prompt`.
    limit: at most so many rows.

    Raises InvalidInput at once for a missing or unreadable file, a directory, an unknown suffix, a JSON array of
    objects, a table that cannot be opened or lacks the column, and a `prompt_column` of a .txt file; while reading only
    if the file has changed since or a Parquet or Arrow file turns out to be damaged. Close it, or use it as a context
    manager.
    """

    def __init__(
        self, path: str | os.PathLike[str], prompt_column: str | None = None, limit: int | None = None
    ) -> None:
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
        """Removes the temporary copy, if there is one; without it that happens when the object goes."""
        if self._copy is not None:
            self._copy.close()

    def sha256(self) -> str:
        """Hex digest of all bytes of the input, whatever the limit."""
        digest = hashlib.sha256()
        with self._file.open("rb") as file:
            while block := file.read(_STEP):
                digest.update(block)
        return digest.hexdigest()

    def _readable(self) -> Path:
        """A regular file that holds the input's bytes."""
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
    """How many rows there are. Raises InvalidInput if OpenAI batch lines share a custom_id. Memory: see
    `openai.duplicate_ids`."""
    total, hashes = 0, array("q")
    for row in rows:
        total += 1
        if row.custom_id:
            hashes.append(hash(row.custom_id))
    if found := openai.duplicate_ids(rows, hashes):
        listed = ", ".join(f"{custom_id!r} (lines {first} and {second})" for custom_id, first, second in found)
        raise InvalidInput(f"custom_id must be unique, but found twice: {listed}")
    return total


class _Source(NamedTuple):
    """name: of the input, for messages. file: where its bytes are. column: that of the prompt, if one was named."""

    name: Path
    file: Path
    column: str | None


_Reader = Callable[[], Iterator[Row]]


def _is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe or a device: neither a regular file nor a directory."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _state(path: Path) -> tuple[int, ...] | None:
    """What tells one state of a file from another; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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

    # A line that cannot be read does not tell its kind: it is answered like the first one that can be.
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
    """Raises InvalidInput unless every column has a name of its own and one of `wanted` is there."""
    if double := sorted({name for name in columns if columns.count(name) > 1}):
        raise InvalidInput(f"input {source.name} has several columns named {double}; rename them")
    if not set(wanted) & set(columns):
        raise InvalidInput(
            f"input {source.name} has no column {' or '.join(wanted)}; its columns are {columns}:"
            " name the one with the prompts (--prompt-column)"
        )


def _filled(file: BinaryIO) -> Iterator[tuple[Row, bytes]]:
    """Lines that are not blank, without their ends, each with a row to be filled in or one with an error."""
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
        return replace(row, request=openai.request_of(fields) if batch else _asked(fields, column))
    except InvalidInput as error:
        return row.refused(str(error))
    except RecursionError:
        return row.refused("nested too deeply")


def _table_row(index: int, record: tables.Record, column: str | None, convert: Callable[[str, Any], Any]) -> Row:
    row = Row(index, record.line, record.fields)
    if record.fault is not None:
        return row.refused(record.fault)
    try:
        return replace(row, request={name: convert(name, v) for name, v in _asked(record.fields, column).items()})
    except InvalidInput as error:
        return row.refused(str(error))


def _asked(fields: dict[str, Any], column: str | None) -> dict[str, Any]:
    """The request of a row whose prompt is in `column`: under its own name if that is a kind of prompt, else as
    `prompt`; the other kinds are left out. Raises InvalidInput if the row has none."""
    if column is None:
        return fields
    if fields.get(column) is None:
        raise InvalidInput(f"has no {column!r}, which is to hold the prompt; it has {sorted(fields)}")
    asked = {name: value for name, value in fields.items() if name not in (*PROMPT_KINDS, column)}
    return {**asked, column if column in PROMPT_KINDS else "prompt": fields[column]}
