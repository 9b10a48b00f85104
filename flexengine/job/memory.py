"""Memory that reading a row takes."""

import sys
from collections.abc import Sequence
from typing import Any

# Bytes of memory for a byte of a row without fields, and most for such a row: values, mostly, whose number is limited.
_ROW_FACTOR, _MOST_ROW = 24, 5 * 2**26
_VALUE = 32  # bytes that a value of a row takes besides its own: gaps, and places in lists of them
_TEXT = sys.getsizeof(chr(0x100)) - 4  # bytes of a text that is not ASCII, without its characters
_MOST_TEXT = 2**27  # bytes of a row's text in memory; see `read_json.too_wide`


def row_memory(length: int, fields: dict[str, Any], made: Sequence[Any] = ()) -> int:
    """Return the bytes of memory that reading a row of `length` bytes takes: its bytes and their text, each twice while
    parts are joined, and the fields of this row and of the one before. If it has no fields, they may have been made
    before its fault was found.

    Rows of 14 and 40 MB of text, escapes, lists, numbers, keys and cells took 41 to 89 % of this, and with NaN or
    Infinity in them up to all. made: values that were made from the fields, as the text of a template.
    """
    if not fields:
        return min(_ROW_FACTOR * length, _MOST_ROW)
    held, width, rest = 0, 1, [fields, *made]
    while rest:
        value = rest.pop()
        held += sys.getsizeof(value) + _VALUE
        if isinstance(value, str) and not value.isascii():
            width = max(width, min(4, (sys.getsizeof(value) - _TEXT) // (len(value) + 1)))  # bytes of a character
        rest += (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    joined = sum(map(sys.getsizeof, made))  # while a text is made, its parts stay
    return 2 * (length + min(width * length, _MOST_TEXT) + held) + joined
