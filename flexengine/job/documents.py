"""Rows in JSON over several lines: the elements of one array, or documents one after the other.

Memory holds one element and a part of the file. Elements are found by decoding them, as only that finds their end.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from flexengine.errors import InvalidInput
from flexengine.job.lines import BOM, json_reason, too_long

_STEP = 2**20  # bytes read at a time
_SEEN = 2**16  # bytes that the beginning of a file, with white space, may take
# An array whose first element is an object or is on another line, or which is empty; an object over several lines.
_BEGINNING = re.compile(rb"\s*(\[\s*(\{|\]\s*\Z)|\[[ \t]*\r?\n|\{[ \t]*\r?\n\s*[\"}])")
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_NUMBERS = "0123456789.eE+-"
_LONGEST_WORD = 12  # characters: most of a word or escape that the end of the text may cut in two
# Finds the end of an element. Faults of numbers and control characters are left to the reader of the row.
_END = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)


def is_document(file: BinaryIO) -> bool:
    """Return whether a file begins like JSON over several lines, not like JSON lines."""
    return _BEGINNING.match(file.read(_SEEN).removeprefix(BOM)) is not None


def elements(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the line on which each element starts, from 1, and its bytes.

    Args:
        most: most bytes of an element.

    Raises:
        InvalidJson: the file is no valid JSON from some line on, or an element is longer than `most`.
    """
    text = _Text(file, most)
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


class InvalidJson(InvalidInput):
    """JSON that is invalid from some line on. The message begins with the line."""


class _Text:
    """Part of a file as text, from the present position on. most: most bytes of an element."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        # Bytes that are not UTF-8 are kept as half surrogate pairs, so that only their row is refused.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._file, self._most = file, most
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
            self._more(step)
            end, step = self._end(), 2 * step
        line, raw = self._line, self._text[self._at : end].encode("utf-8", "surrogateescape")
        if len(raw) > self._most:
            raise self.invalid(f"the row {too_long(self._most)}")
        self._advance(end)
        return line, raw

    def invalid(self, fault: str) -> InvalidJson:
        """Return the error for a fault at the present position."""
        return InvalidJson(f"line {self._line}: {fault}; repair the file, or write one JSON object per line")

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
