"""Reading of input files as rows. A bad row becomes a row with an error; only an unusable file raises."""

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, NamedTuple

from flexengine.activity import advance
from flexengine.config import json_fault, meant, shown
from flexengine.errors import InvalidInput
from flexengine.job import openai, tables
from flexengine.job.documents import InvalidJson, elements, is_document
from flexengine.job.lines import json_object, read_lines, too_long, utf8_fault
from flexengine.job.rows import CONTEXT, PROMPT_KINDS, SCORED_KINDS, Row
from flexengine.job.source import Source
from flexengine.job.streams import STDIN

MAX_LINE_BYTES = 64 * 2**20
_AS_TSV = "give --input-format tsv (input_format='tsv' in Python)"
_STEP = 2**20


class Rows:
    """The rows of an input file. Every `iter()` reads the file again from its beginning. Memory does not grow with the
    file. Use as a context manager, or call `close`.

    Iterating raises InvalidInput if the file has changed since it was opened, if compressed data, a Parquet or an Arrow
    file is damaged, or if an array in JSON is invalid from some line on.

    Attributes:
        path: the input.
        form: its format, one of `source.FORMATS`.
        prompt_column: the argument of this name.
        chat: the argument of this name.
        score: the argument of this name.
    """

    def __init__(
        self, path: str | os.PathLike[str], prompt_column: str | None = None, limit: int | None = None,
        form: str | None = None, chat: bool = False, score: bool = False,
    ) -> None:  # fmt: skip
        """Open an input file.

        Args:
            path: a file, or a stream (a pipe, a device, /dev/fd/3), which is copied to a temporary file as it can be
                read only once. "-" is standard input from its present position.
            prompt_column: field or column that holds the prompt; other prompt fields are then data. A column named
                messages or prompt_token_ids is read as such. None reads any of PROMPT_KINDS, or `prompt` in CSV and
                TSV files.
            limit: most rows to read; None reads all.
            form: one of `source.FORMATS`; None takes the format of the file's suffix, jsonl for a stream without one.
                A jsonl line may be an OpenAI batch line, see `openai.is_batch_line`.
            chat: run each prompt that is text as a user's message, through the model's chat template. Rows with
                messages or token ids, and OpenAI batch lines, are run as they are.
            score: score rows without a prompt; see `Row.scored`.

        Raises:
            InvalidInput: the file is missing, unreadable or a directory; its format is unknown; a table cannot be
                opened or lacks the column; or `prompt_column` is given for a txt file.
        """
        self.path = Path(STDIN if path == "-" else path)
        self.prompt_column, self.chat, self.score = prompt_column, chat, score
        self._limit = None if limit is None else min(limit, sys.maxsize)
        self._source = Source(self.path, form)
        self.form = self._source.form
        try:
            self._state = self._source.state
            self._read = _READERS[self.form](_Input(self.path, self._source, prompt_column, score))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Row]:
        if self._source.state != self._state:
            raise InvalidInput(f"input {self.path} has changed since it was opened; start the job again")
        rows = islice(self._read(), self._limit)
        if not (self.chat or self.score):
            return rows
        chat, score = self.chat, self.score
        return (row if row.is_batch else replace(row, chat=chat, scored=score) for row in rows)

    def __enter__(self) -> "Rows":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary copy, if there is one. Without this call it is removed with the object."""
        self._source.close()

    @property
    def size(self) -> int:
        """Bytes of the input, before decompression; 0 if it is gone."""
        state = self._source.state
        return state[2] if state else 0

    def sha256(self) -> str:
        """Return the hex digest of all bytes of the input after decompression, including those beyond `limit`."""
        digest = hashlib.sha256()
        with self._source.open() as file:
            while block := file.read(_STEP):
                digest.update(block)
        return digest.hexdigest()


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


class _Input(NamedTuple):
    """An input that is open.

    Attributes:
        name: name of the input, for messages.
        source: the open input.
        column: the prompt column, if one was given.
        score: whether rows without a prompt are scored.
    """

    name: Path
    source: Source
    column: str | None
    score: bool

    def wanted(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns of which a table must have one. default: without a prompt column."""
        scored = SCORED_KINDS if self.score else ()
        return (*scored, *(default if self.column is None else (self.column,)))


_Reader = Callable[[], Iterator[Row]]


def _text(given: _Input) -> _Reader:
    if given.column is not None:
        raise InvalidInput(f"input {given.name} has one prompt per line and no columns; leave the prompt column out")
    if given.score:
        raise InvalidInput(f"input {given.name} has one prompt per line, and --score (score=True in Python) scores no"
                           " prompts; give texts as .jsonl or .csv with the field text")  # fmt: skip

    def rows() -> Iterator[Row]:
        for row, raw in _lines(given):
            yield _text_row(row, raw) if row.error is None else row

    return rows


def _json(given: _Input) -> _Reader:
    with given.source.open() as file:
        numbered = _elements if is_document(file) else _lines

    def rows(unreadable: str | None = None) -> Iterator[Row]:
        for row, raw in numbered(given):
            read = _json_row(row, raw, given) if row.error is None else row
            yield read if read.fields else replace(read, custom_id=unreadable)

    # The kind of an unreadable line is unknown. Its result has the format of the file's first readable line.
    first = next((row for row in rows() if row.fields), None)
    return partial(rows, "" if first is not None and first.is_batch else None)


def _csv(given: _Input) -> _Reader:
    form, column = given.source.form, given.column or "prompt"
    if column in PROMPT_KINDS[1:]:
        raise InvalidInput(f"input {given.name}: cells are text and cannot hold {column}; use .jsonl or .parquet")
    with given.source.open() as file:
        columns, _ = tables.csv_table(file, given.name, form, MAX_LINE_BYTES)
    _check_columns(given, columns, given.wanted(("prompt",)))
    convert = _scored_cell if given.score else tables.parsed_cell

    def rows() -> Iterator[Row]:
        with given.source.open() as file:
            _, records = tables.csv_table(file, given.name, form, MAX_LINE_BYTES)
            for index, record in enumerate(records):
                yield _table_row(index, record, column, convert, given.score)

    return rows


def _arrow(given: _Input) -> _Reader:
    file, form = given.source.file, given.source.form
    columns = tables.arrow_columns(file, given.name, form)
    _check_columns(given, columns, given.wanted(PROMPT_KINDS))
    texts = (given.column or "prompt", *((CONTEXT, *SCORED_KINDS) if given.score else ()))

    def rows() -> Iterator[Row]:
        for index, record in enumerate(tables.arrow_records(file, given.name, form, texts)):
            yield _table_row(index, record, given.column, tables.whole_number, given.score)

    return rows


_READERS: dict[str, Callable[[_Input], _Reader]] = {
    "jsonl": _json, "txt": _text, "csv": _csv, "tsv": _csv, "parquet": _arrow, "arrow": _arrow,
}  # fmt: skip


def _check_columns(given: _Input, columns: list[str], wanted: tuple[str, ...]) -> None:
    """Raise InvalidInput if two columns share a name, or none of the columns `wanted` exists."""
    if double := sorted({name for name in columns if columns.count(name) > 1}):
        raise InvalidInput(f"input {given.name} has several columns named {double}; rename them")
    if set(wanted) & set(columns):
        return
    lacks = f"input {given.name} has no column {' or '.join(wanted)}; its columns are {columns}"
    if seems := tables.other_separator(columns, given.source.form, _AS_TSV):
        raise InvalidInput(f"{lacks}: {seems}")
    name = meant(wanted[0], columns) or "NAME"
    raise InvalidInput(f"{lacks}: name the one with the prompts: --prompt-column {quote(name)} (prompt_column={name!r}"
                       " in Python)")  # fmt: skip


def _lines(given: _Input) -> Iterator[tuple[Row, bytes]]:
    """Yield each line that is not blank, without its line end, with an empty row, or a row with an error."""
    index = 0
    with given.source.open() as file:
        for line, raw in enumerate(read_lines(file, MAX_LINE_BYTES), start=1):
            if raw is not None and not raw.strip():
                continue
            row = Row(index, line)
            yield (row.refused(too_long(MAX_LINE_BYTES)), b"") if raw is None else (row, raw.rstrip(b"\r\n"))
            index += 1


def _elements(given: _Input) -> Iterator[tuple[Row, bytes]]:
    """Yield each element of an array, or each of several documents, with an empty row."""
    with given.source.open() as file:
        try:
            for index, (line, raw) in enumerate(elements(file, MAX_LINE_BYTES)):
                yield Row(index, line), raw
        except InvalidJson as error:
            raise InvalidInput(f"input {given.name}, {error}") from error


def _text_row(row: Row, raw: bytes) -> Row:
    if fault := utf8_fault(raw):
        return row.refused(fault)
    return Row(row.index, row.line, {"prompt": raw.decode("utf-8")})


def _json_row(row: Row, raw: bytes, given: _Input) -> Row:
    try:
        fields = json_object(raw)
    except InvalidInput as error:
        return row.refused(str(error))
    column = given.column
    batch = openai.is_batch_line(fields, (*PROMPT_KINDS, column))
    row = Row(row.index, row.line, fields, custom_id=openai.custom_id_of(fields) if batch else None)
    try:
        return replace(row, request=openai.request_of(fields) if batch else _request(fields, column, given.score))
    except InvalidInput as error:
        return row.refused(str(error))
    except RecursionError:
        return row.refused("nested too deeply")


def _table_row(
    index: int, record: tables.Record, column: str | None, convert: Callable[[str, Any], Any], score: bool
) -> Row:  # fmt: skip
    row = Row(index, record.line, record.fields)
    if record.fault is not None:
        return row.refused(record.fault)
    try:
        request = _request(record.fields, column, score)
        return replace(row, request={name: convert(name, value) for name, value in request.items()})
    except InvalidInput as error:
        return row.refused(str(error))


def _scored_cell(name: str, cell: str) -> Any:
    """Return the value of a CSV cell of a row that is scored or generates: an empty cell is no value, and choices are a
    JSON list. Other cells are as for `tables.parsed_cell`."""
    if not cell and name in ("prompt", CONTEXT, *SCORED_KINDS):
        return None
    if name != "choices":
        return tables.parsed_cell(name, cell)
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"choices is {shown(cell)}, which is no JSON list: {json_fault(error)}") from error


def _request(fields: dict[str, Any], column: str | None, score: bool) -> dict[str, Any]:
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
