"""Readers of JSON lines, of JSON over several lines, and of text with a prompt on each line.

Lines are read as bytes, so that a bad line affects no other line. JSON over several lines are the elements of one
array, or documents one after the other. Memory holds one element and a part of the file. Elements are found by decoding
them, as only that finds their end. A bad row becomes a row with an error; only an unusable file raises.
"""

import codecs
import io
import json
import math
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from flexengine.errors import InvalidInput, json_fault, json_kind, size
from flexengine.job.inputs import InputFile, ReadRows
from flexengine.job.row_fields import RowRules, with_numbers
from flexengine.job.rows import CONTEXT, PANDAS_ROWS, PROMPT_KINDS, SCORED_KINDS, Row

MAX_LINE_BYTES = 64 * 2**20
MAX_VALUES = 2**21  # of a row: each takes about 100 bytes as a Python object
BOM = b"\xef\xbb\xbf"
BOMS = re.compile(b"(?:%b)*" % BOM)  # programs that join files leave several
_STEP = 2**20  # bytes read at a time
_MOST_STEP = 2**23  # of an element of several parts, which is decoded anew with each
_SEEN = 2**16  # bytes that the beginning of a file, with white space, may take
# An array whose first element is an object or is on another line, or which is empty; an object over several lines.
_BEGINNING = re.compile(rb"\s*(\[\s*(\{|\]\s*\Z)|\[[ \t]*\r?\n|\{[ \t]*\r?\n\s*[\"}])")
# A table as pandas writes it: by column, by row or as arrays. For a table that is too large to be read as a row.
_FRAME = re.compile(
    rb'\s*(\{\s*"([^"\\]|\\.)*"\s*:\s*\{\s*"0"\s*:|\{\s*("0"|"schema"|"columns"|"index")\s*:\s*[\[{]|\[\s*\[)'
)
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_NUMBERS = "0123456789.eE+-"
_LONGEST_WORD = 12  # characters: most of a word or escape that the end of the text may cut in two
# Finds the end of an element. Faults of numbers and control characters are left to the reader of the row.
_END = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
# Bytes of text and escapes of JSON for characters beyond U+FFFF and U+00FF
_FOUR_BYTES, _TWO_BYTES = re.compile(rb"[\xf0-\xf4]|\\u[dD][89abAB]"), re.compile(rb"[\xc4-\xef]|\\u")
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r"))  # those that JSON writes as \u0000
_BATCH_KEYS = ("custom_id", "method", "url", "body")


def open_text(source: InputFile, rules: RowRules) -> ReadRows:
    """Return the reader of a file with a prompt on each line."""
    if rules.column is not None:
        raise InvalidInput(f"input {source.name} has one prompt per line and no columns; leave the prompt column out")
    if rules.score:
        wrong = f"input {source.name} has one prompt per line, and --score (score=True in Python) scores no prompts"
        raise InvalidInput(f"{wrong}; give texts as .jsonl or .csv with the field text")

    def rows(file: BinaryIO) -> Iterator[Row]:
        for row, raw in _lines(file):
            fault = too_wide(raw) or utf8_fault(raw)
            if row.error is None:
                row = row.refused(fault) if fault else requested(row, {"prompt": raw.decode("utf-8")}, rules)
            yield row

    return rows


def open_json(source: InputFile, rules: RowRules) -> ReadRows:
    """Return the reader of JSON lines, or of JSON over several lines. A line may be an OpenAI batch line."""
    with source.open() as file:
        head = file.read(_SEEN)
    document = is_document(io.BytesIO(head))

    def rows(unreadable: str | None, file: BinaryIO) -> Iterator[Row]:
        found = elements(file, MAX_LINE_BYTES, source.name)
        whole = ((Row(index, line), raw) for index, (line, raw) in enumerate(found))
        for blank, raw in whole if document else _lines(file):
            row = _json_row(blank, raw, rules) if blank.error is None else blank
            yield row if row.fields else replace(row, custom_id=unreadable)

    # The kind of an unreadable line is unknown. Its result has the format of the file's first readable line.
    with source.open() as file:
        found = rows(None, file)
        begin = list(islice(found, 2))
        first = next((row for row in chain(begin, found) if row.fields), None)
    if len(begin) == 1 and (_is_frame(begin[0]) if first else _FRAME.match(head.removeprefix(BOM))):
        fault = "holds a whole table, as df.to_json() of pandas writes it; write a row per line instead"
        raise InvalidInput(f"input {source.name} {fault}: {PANDAS_ROWS}")
    return partial(rows, "" if first is not None and first.is_batch else None)


def _is_frame(row: Row) -> bool:
    """Return whether a file's only row is a table as pandas writes it: an object by column or by row, with equal keys;
    one of the formats split, tight and table; or a Series by row."""
    values, data, index = list(row.fields.values()), row.fields.get("data"), row.fields.get("index")
    by_name = all(isinstance(each, dict) and each.keys() == values[0].keys() for each in values)
    by_name = by_name and (len(values) > 1 or all(key.isdecimal() for each in values for key in each))
    packed = isinstance(data, list) and (isinstance(index, list) or "schema" in row.fields)
    series = [*row.fields] == [str(i) for i in range(len(values))]
    runs = any(isinstance(row.fields.get(name), str | list) for name in (*PROMPT_KINDS, CONTEXT, *SCORED_KINDS))
    return not runs and not isinstance(row.prompt, str | list) and (by_name or packed or series)


def _lines(file: BinaryIO) -> Iterator[tuple[Row, bytes]]:
    """Yield each line that is not blank, without its line end and a leading BOM, with an empty row, or a row with an
    error. A line over MAX_LINE_BYTES is skipped in pieces."""
    index, line = 0, 1
    while raw := file.readline(MAX_LINE_BYTES + 1):
        raw = BOMS.sub(b"", raw, 1) if line == 1 else raw
        if over := len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(2**20)
        if blank := not over and not raw.strip():
            line += skip_blank(file, string.whitespace.encode())
        else:
            row = Row(index, line)
            yield (row.refused(f"{too_long(MAX_LINE_BYTES)}; divide it"), b"") if over else (row, raw.rstrip(b"\r\n"))
        index, line = index + (not blank), line + 1


def skip_blank(file: BinaryIO, blank: bytes) -> int:
    """Skip lines of the bytes `blank` alone at the present position, and return how many. Some may be left."""
    count = 0
    while block := cast(io.BufferedReader, file).peek():
        end = block.rfind(b"\n", 0, len(block) - len(block.lstrip(blank))) + 1
        if not end:
            break
        file.read(end)
        count += block.count(b"\n", 0, end)
    return count


def requested(row: Row, fields: dict[str, Any], rules: RowRules) -> Row:
    """Return a row with its fields and request, or with an error."""
    row = Row(row.index, row.line, fields)
    try:
        return replace(row, request=rules.request(fields))
    except InvalidInput as error:
        return row.refused(str(error))


def _json_row(row: Row, raw: bytes, rules: RowRules) -> Row:
    try:
        special = dict[str, float | None]()  # NaN, infinities, and numbers beyond the range of a float
        given = json_object(raw, lambda text: special.setdefault(text, None if text == "NaN" else float(text)))
        fields = json_object(raw) if special else given
        row = Row(row.index, row.line, fields)
        if not is_batch_line(fields, (*PROMPT_KINDS, rules.column), rules.columns):
            row = requested(row, fields, rules)
            return row if fields is given else replace(row, request=with_numbers(row.request, given))
        from flexengine.job import openai  # most files have no such line

        row = replace(row, custom_id=openai.custom_id_of(fields))
        if isinstance(body := fields.get("body"), dict):
            fields = {**fields, "body": with_numbers(body, given["body"])}
        return replace(row, request=openai.request_of(fields))
    except InvalidInput as error:
        return row.refused(str(error))
    except RecursionError:
        return row.refused("nested too deeply")


def is_batch_line(fields: dict[str, Any], prompts: Iterable[str | None], columns: Sequence[str] = ()) -> bool:
    """Return whether a JSON line is an OpenAI batch line: it has all four keys, or at least two of them and none of the
    fields `prompts`, among which None is ignored. With a template it has all four, and none of the template's columns.
    """
    known = sum(key in fields for key in _BATCH_KEYS)
    if columns:
        return known == len(_BATCH_KEYS) and fields.keys().isdisjoint(columns)
    return known == len(_BATCH_KEYS) or (known >= 2 and all(fields.get(p) is None for p in prompts if p))


def is_document(file: BinaryIO) -> bool:
    """Return whether a file begins like JSON over several lines, not like JSON lines."""
    return _BEGINNING.match(file.read(_SEEN).removeprefix(BOM)) is not None


def elements(file: BinaryIO, most: int, name: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the line on which each element starts, from 1, and its bytes. Raise InvalidInput if the file is no valid
    JSON from some line on, or an element is longer than `most`.

    Args:
        most: most bytes of an element.
        name: name of the file in messages.
    """
    text = _Text(file, most, name)
    if array := text.next() == "[":
        text.skip()
    count = 0
    while (char := text.next()) and not (array and char == "]"):
        if array and count:
            if char != ",":
                raise text.invalid("a comma is missing between two rows")
            text.skip()
        yield text.element()
        count += 1
    if not array:
        return
    if not char:
        raise text.invalid("the array has no end, so the file is cut short")
    text.skip()
    if text.next():
        raise text.invalid("text follows the array")


class _Text:
    """Part of a file as text, from the present position on."""

    def __init__(self, file: BinaryIO, most: int, name: Path) -> None:
        # Bytes that are not UTF-8 are kept as half surrogate pairs, so that only their row is refused.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._file, self._most, self._name = file, most, name
        self._text, self._at, self._line, self._ended = "", 0, 1, False

    def next(self) -> str:
        """Skip white space and return the next character without skipping it; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._advance(match.end() if match else self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more(_STEP)

    def skip(self) -> None:
        """Skip a character."""
        self._advance(self._at + 1)

    def element(self) -> tuple[int, bytes]:
        """Return the line and the bytes of the element that begins here, and skip it."""
        self.next()
        end, step = self._end(), _STEP
        while end is None:
            if len(self._text) - self._at > self._most:
                raise self.invalid(f"the row {too_long(self._most)}")
            if sys.getsizeof(self._text) > 2 * self._most:
                raise self.invalid(f"the row takes over {size(2 * self._most)} in memory")
            if fault := too_many(self._text[self._at :].encode("utf-8", "surrogateescape")):
                raise self.invalid(f"the row {fault}")
            self._more(step)
            end, step = self._end(), min(2 * step, _MOST_STEP)
        line, raw = self._line, self._text[self._at : end].encode("utf-8", "surrogateescape")
        if len(raw) > self._most:
            raise self.invalid(f"the row {too_long(self._most)}")
        self._advance(end)
        return line, raw

    def invalid(self, fault: str) -> InvalidInput:
        """Return the error for a fault at the present position."""
        place = f"input {self._name}, line {self._line}"
        return InvalidInput(f"{place}: {fault}; repair the file, or write one JSON object per line")

    def _end(self) -> int | None:
        """Return the end of the element that begins here; None if more of the file is needed to find the end."""
        try:
            end = _END.raw_decode(self._text, self._at)[1]
        except RecursionError:
            raise self.invalid("invalid JSON: nested too deeply") from None
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _LONGEST_WORD
            if cut and not self._ended:
                return None
            self._advance(error.pos)
            raise self.invalid(f"invalid JSON: {json_reason(error)}") from error
        if self._ended:
            return end
        number = self._text[self._at] in "-0123456789"  # "1" may be the beginning of "1.5"
        goes_on = end == len(self._text) or (number and self._text[end] in _IN_NUMBERS)
        return None if goes_on else end

    def _more(self, count: int) -> None:
        block = self._file.read(count)
        self._ended = not block
        self._text = self._text[self._at :] + self._decoder.decode(block, final=not block)
        self._at = 0

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end


def too_long(most: int) -> str:
    """Return the fault of a line or record of over `most` bytes."""
    return f"is longer than {f'{most >> 20} MiB' if most >> 20 else size(most)}"


def too_wide(raw: bytes | bytearray) -> str | None:
    """Return the fault of text that takes over 2 * MAX_LINE_BYTES in memory; None if the text takes less.

    In Python one character beyond U+FFFF makes every character 4 bytes wide. In JSON a control character has 6 bytes.
    """
    if 6 * len(raw) <= 2 * MAX_LINE_BYTES:
        return None
    width = 4 if _FOUR_BYTES.search(raw) else 2 if _TWO_BYTES.search(raw) else 1
    controls = len(raw) - len(raw.translate(None, _CONTROLS))
    wide = width * len(raw.translate(None, bytes(range(0x80, 0xC0))))
    if wide + 5 * controls <= 2 * MAX_LINE_BYTES:
        return None
    named = f"{controls:,} control characters" if 5 * controls > wide else f"characters of {width} bytes each"
    return f"takes over {size(2 * MAX_LINE_BYTES)} in memory, with {named}; shorten it"


def utf8_fault(raw: bytes) -> str | None:
    """Return why the bytes are not UTF-8 text, or None if they are."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}; save the file as UTF-8"
    return None


def too_many(raw: bytes) -> str | None:
    """Return the fault of JSON of over MAX_VALUES commas, colons and open brackets outside strings; None if it has
    fewer. Two bytes may be a list, which takes 64 bytes in Python."""
    if sum(map(raw.count, (b",", b":", b"[", b"{"))) <= MAX_VALUES:
        return None
    import numpy as np  # few files have such a row

    bare = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    count = quotes = 0
    for first in range(0, len(bare), _STEP):
        part = bare[first : first + _STEP]
        inside = np.cumsum(part == ord('"'), dtype=np.int64) + quotes
        count += int(np.count_nonzero(np.isin(part, list(b",:[{")) & (inside % 2 == 0)))
        quotes = int(inside[-1])
    return f"has over {MAX_VALUES:,} values" if count > MAX_VALUES else None


def json_object(raw: bytes, constant: Callable[[str], Any] = lambda _: None) -> dict[str, Any]:
    """Return the JSON object in a line. Raise InvalidInput if the line holds no object. constant:
    returns the value of NaN, Infinity and -Infinity, which Python and pandas write, and of 1e400."""
    if fault := too_wide(raw) or utf8_fault(raw) or too_many(raw):
        raise InvalidInput(fault)

    def finite(text: str) -> Any:
        return constant(text) if math.isinf(value := float(text)) else value

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=constant, parse_float=finite)
    except json.JSONDecodeError as error:  # its own text counts lines within this line
        raise InvalidInput(f"invalid JSON: {json_reason(error)} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"invalid JSON: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f'holds {json_kind(value)}; a row must be an object such as {{"prompt": ...}}')
    return value


def json_reason(error: json.JSONDecodeError) -> str:
    """Return why a text is no JSON. Python's own advice on a byte order mark is for programmers."""
    if error.msg == "Extra data":
        further = {",": "a comma after the object (remove it)", "{": "a second object (give each its own line)"}
        return further.get(error.doc[error.pos : error.pos + 1], error.msg)
    return "a byte order mark (BOM)" if "BOM" in error.msg else error.msg.removesuffix(" at")
