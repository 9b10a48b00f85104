"""Lines of a file as bytes, so that one that cannot be read costs itself alone, and JSON objects of them."""

import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from flexengine.config import json_fault
from flexengine.errors import InvalidInput

BOM = b"\xef\xbb\xbf"
_STEP = 2**20


def read_lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """Lines with their ends, without a leading BOM; None for one over `most` bytes, which is never held."""
    first = True
    while raw := file.readline(most + 1):
        if over := len(raw) > most and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(_STEP)
        yield None if over else raw.removeprefix(BOM) if first else raw
        first = False


def too_long(most: int) -> str:
    """The fault of a line or record of over `most` bytes."""
    return f"is longer than {most:,} bytes"


def utf8_fault(raw: bytes) -> str | None:
    """Why the bytes are not UTF-8 text, or None if they are."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start}"
    return None


def json_object(raw: bytes) -> dict[str, Any]:
    """The object that a line holds. Raises InvalidInput; NaN and numbers beyond a float's range are not JSON."""
    if fault := utf8_fault(raw):
        raise InvalidInput(fault)
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"invalid JSON: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f'holds a JSON {type(value).__name__}; a row must be an object such as {{"prompt": ...}}')
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a number")
    return value
