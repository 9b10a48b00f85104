"""Lines of a file as bytes, so that a bad line affects no other line, and JSON objects in lines."""

import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from flexengine.config import json_fault, json_kind
from flexengine.errors import InvalidInput

BOM = b"\xef\xbb\xbf"
_STEP = 2**20


def read_lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """Yield lines with their line ends, without a leading BOM. A line over `most` bytes is skipped in pieces, and None
    is yielded for it."""
    first = True
    while raw := file.readline(most + 1):
        if over := len(raw) > most and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(_STEP)
        yield None if over else raw.removeprefix(BOM) if first else raw
        first = False


def too_long(most: int) -> str:
    """Return the fault of a line or record of over `most` bytes."""
    return f"is longer than {most:,} bytes"


def utf8_fault(raw: bytes) -> str | None:
    """Return why the bytes are not UTF-8 text, or None if they are."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}; save the file as UTF-8"
    return None


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raise InvalidInput if the line holds none, or holds NaN or numbers beyond a
    float's range."""
    if fault := utf8_fault(raw):
        raise InvalidInput(fault)
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:  # its own text counts lines within this line
        raise InvalidInput(f"invalid JSON: {json_reason(error)} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"invalid JSON: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f'holds {json_kind(value)}; a row must be an object such as {{"prompt": ...}}')
    return value


def json_reason(error: json.JSONDecodeError) -> str:
    """Return why a text is no JSON. Python's own advice on a byte order mark is for programmers."""
    return "a byte order mark (BOM)" if "BOM" in error.msg else error.msg.removesuffix(" at")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value
