"""Rows of Arrow arrays as values that JSON can hold."""

import base64
import datetime
import math
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from flexengine.errors import cut
from flexengine.job.foreign import OVERRIDES
from flexengine.job.read_json import utf8_fault

_NANOSECONDS = "time64[ns]"  # in the name of a type that is or has such times of day
_DAY = 24 * 3600 * 10**9  # nanoseconds


class TableRow(NamedTuple):
    """One row of a table."""

    line: int  # line on which the row starts, from 1
    fields: dict[str, Any]  # cells by column, converted to values that JSON can hold
    fault: str | None = None  # why the row cannot be used; None if it can
    numbers: Mapping[str, Any] = {}  # cells that have infinities, by column; `fields` has these as None


def records_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Return rows as Python values. A cell that cannot be converted is the exception instead."""
    if not any(_NANOSECONDS in str(kind) for kind in batch.schema.types):
        try:
            return iter(batch.to_pylist())
        except MemoryError:
            raise
        except Exception:  # text that is not UTF-8, a time beyond Python's range, an unknown time zone
            pass
    columns = list(zip(batch.schema.names, batch.columns, strict=True))
    return ({name: _cell(column[i]) for name, column in columns} for i in range(batch.num_rows))


def _value(scalar: Any) -> Any:
    """Return a scalar as a Python value. Times of day in nanoseconds, which Python's do not have, become text."""
    import pyarrow as pa

    if scalar.type == pa.time64("ns"):
        if scalar.is_valid and not 0 <= scalar.value < _DAY:
            raise ValueError(f"{scalar.value} ns is no time of day")
        return scalar.cast(pa.string()).as_py()
    if _NANOSECONDS not in str(scalar.type) or not scalar.is_valid:
        return scalar.as_py()
    if isinstance(scalar, pa.StructScalar):
        return {name: _value(each) for name, each in scalar.items()}
    if isinstance(scalar, pa.MapScalar):
        return [tuple(_value(pair).values()) for pair in scalar.values]
    if hasattr(scalar, "values"):  # a list of any kind
        return [_value(each) for each in scalar.values]
    return _value(scalar.value)  # of a dictionary, a run, a union or an extension type


def _cell(scalar: Any) -> Any:
    import pyarrow as pa

    try:
        return _value(scalar)
    except MemoryError:
        raise
    except Exception as error:
        with suppress(Exception):  # in a time zone that is not known here
            return scalar.cast(pa.timestamp(scalar.type.unit, "UTC")).as_py()
        with suppress(Exception):
            return str(scalar.cast("string").as_py())  # nanosecond times, which Python cannot represent
        return error


def record_of(line: int, cells: dict[str, Any], texts: Container[str] | None) -> TableRow:
    """Return the record of a row's cells. It has a fault if a cell is an exception, or if bytes in one of the columns
    `texts` are not UTF-8. texts: columns in which bytes are text. None reads bytes of every column as text if they are
    UTF-8."""
    fault = next((f"column {cut(n)}: {first_line(v)}" for n, v in cells.items() if isinstance(v, Exception)), None)
    for name, value in cells.items():
        if isinstance(value, bytes) and (texts is None or name in texts):
            wrong = utf8_fault(value)
            fault = fault or (wrong if texts is not None else None)
            cells[name] = value if wrong else value.decode("utf-8")
    fields = {name: _plain(v) for name, v in cells.items() if not isinstance(v, Exception)}
    seen = (name for name in fields if name in OVERRIDES or isinstance(cells[name], float))
    numbers = {name: value for name in seen if (value := _plain(cells[name], True)) != fields[name]}
    return TableRow(line, fields, fault, numbers)


def _plain(value: Any, infinite: bool = False) -> Any:
    """Return a value that JSON can hold. NaN becomes None, and so do infinities unless `infinite` is true; dates and
    times become ISO 8601 text, bytes base64, and other types (decimals, durations, UUIDs) text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) or (infinite and not math.isnan(value)) else None
    if isinstance(value, (list, tuple)):
        return [_plain(v, infinite) for v in value]
    if isinstance(value, dict):
        return {str(key): _plain(v, infinite) for key, v in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    return str(value)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its name."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
