"""Readers of JSON lines, of JSON over several lines, and of text with a prompt on each line."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from flexengine.errors import InvalidInput
from flexengine.job import reading
from flexengine.job.documents import InvalidJson, elements, is_document
from flexengine.job.lines import json_object, read_lines, too_long, utf8_fault
from flexengine.job.reading import ReadOptions, ReadRows, plain_request
from flexengine.job.rows import PROMPT_KINDS, Row

_BATCH_KEYS = ("custom_id", "method", "url", "body")


def open_text(options: ReadOptions) -> ReadRows:
    """Return the reader of a file with a prompt on each line."""
    if options.column is not None:
        raise InvalidInput(f"input {options.name} has one prompt per line and no columns; leave the prompt column out")
    if options.score:
        raise InvalidInput(
            f"input {options.name} has one prompt per line, and --score (score=True in Python) scores no prompts; give"
            " texts as .jsonl or .csv with the field text"
        )

    def rows(file: BinaryIO) -> Iterator[Row]:
        for row, raw in _lines(options, file):
            fault = utf8_fault(raw)
            if row.error is None:
                row = row.refused(fault) if fault else Row(row.index, row.line, {"prompt": raw.decode("utf-8")})
            yield row

    return rows


def open_json(options: ReadOptions) -> ReadRows:
    """Return the reader of JSON lines, or of JSON over several lines. A line may be an OpenAI batch line."""
    with options.source.open() as file:
        numbered = _elements if is_document(file) else _lines
    # The kind of an unreadable line is unknown. Its result has the format of the file's first readable line.
    with options.source.open() as file:
        first = next((row for row in _json_rows(options, numbered, None, file) if row.fields), None)
    return partial(_json_rows, options, numbered, "" if first is not None and first.is_batch else None)


_Numbered = Callable[[ReadOptions, BinaryIO], Iterator[tuple[Row, bytes]]]


def _json_rows(options: ReadOptions, numbered: _Numbered, unreadable: str | None, file: BinaryIO) -> Iterator[Row]:
    for blank, raw in numbered(options, file):
        row = _json_row(blank, raw, options) if blank.error is None else blank
        yield row if row.fields else replace(row, custom_id=unreadable)


def _lines(options: ReadOptions, file: BinaryIO) -> Iterator[tuple[Row, bytes]]:
    """Yield each line that is not blank, without its line end, with an empty row, or a row with an error."""
    index = 0
    for line, raw in enumerate(read_lines(file, reading.MAX_LINE_BYTES), start=1):
        if raw is not None and not raw.strip():
            continue
        row = Row(index, line)
        yield (row.refused(too_long(reading.MAX_LINE_BYTES)), b"") if raw is None else (row, raw.rstrip(b"\r\n"))
        index += 1


def _elements(options: ReadOptions, file: BinaryIO) -> Iterator[tuple[Row, bytes]]:
    """Yield each element of an array, or each of several documents, with an empty row."""
    try:
        for index, (line, raw) in enumerate(elements(file, reading.MAX_LINE_BYTES)):
            yield Row(index, line), raw
    except InvalidJson as error:
        raise InvalidInput(f"input {options.name}, {error}") from error


def _json_row(row: Row, raw: bytes, options: ReadOptions) -> Row:
    try:
        fields = json_object(raw)
        row = Row(row.index, row.line, fields)
        if not is_batch_line(fields, (*PROMPT_KINDS, options.column)):
            return replace(row, request=plain_request(fields, options.column, options.score))
        from flexengine.job import openai  # most files have no such line

        row = replace(row, custom_id=openai.custom_id_of(fields))
        return replace(row, request=openai.request_of(fields))
    except InvalidInput as error:
        return row.refused(str(error))
    except RecursionError:
        return row.refused("nested too deeply")


def is_batch_line(fields: dict[str, Any], prompt_fields: Iterable[str | None]) -> bool:
    """Return whether a JSON line is an OpenAI batch line: it has all four keys, or at least two of them and none of the
    fields `prompt_fields`, among which None is ignored."""
    known = sum(key in fields for key in _BATCH_KEYS)
    return known == len(_BATCH_KEYS) or (known >= 2 and all(fields.get(p) is None for p in prompt_fields if p))
