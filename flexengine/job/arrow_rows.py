"""Rows of Arrow arrays as values that JSON can hold."""

import base64
import datetime
import math
import re
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from flexengine.errors import cut
from flexengine.job.foreign import FOREIGN, OVERRIDES, TOOLS
from flexengine.job.read_json import utf8_fault

# In the name of a type that is or has dates and times whose conversion by pyarrow has limits or depends on pandas.
_TIMES = re.compile(r"time64\[ns\]|timestamp\[|duration\[|date(32|64)\[")
_READ = frozenset({*OVERRIDES, *FOREIGN, TOOLS, "messages"})  # columns whose infinities may be refused
_IN_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH = datetime.datetime(1970, 1, 1)
_DAY = 24 * 3600 * 10**9  # nanoseconds


class TableRow(NamedTuple):
    """One row of a table."""

    line: int  # line on which the row starts, from 1
    fields: dict[str, Any]  # cells by column, converted to values that JSON can hold
    fault: str | None = None  # why the row cannot be used; None if it can
    numbers: Mapping[str, Any] = {}  # cells that have infinities, by column; `fields` has these as None


def records_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Return rows as Python values. A cell that cannot be converted is the exception instead."""
    if not any(_TIMES.search(str(kind)) for kind in batch.schema.types):
        try:
            return iter(batch.to_pylist())
        except MemoryError:
            raise
        except Exception:  # text that is not UTF-8
            pass
    columns = list(zip(batch.schema.names, batch.columns, strict=True))
    return ({name: _cell(column[i]) for name, column in columns} for i in range(batch.num_rows))


def _value(scalar: Any) -> Any:
    """Return a scalar as a Python value. Timestamps, durations and times of day in nanoseconds become text, with all
    their digits. Raise ValueError for dates and times beyond Python's range."""
    import pyarrow as pa

    if not scalar.is_valid or not _TIMES.search(str(scalar.type)):
        return scalar.as_py()
    try:
        if pa.types.is_timestamp(scalar.type):
            return _timestamp(scalar.value, scalar.type)
        if pa.types.is_duration(scalar.type):
            return _duration(scalar.value, scalar.type.unit)
        if pa.types.is_date(scalar.type):
            return scalar.as_py()
    except (OverflowError, ValueError) as error:
        fault = f"{scalar.value} of type {scalar.type} is beyond the range of Python's dates and times"
        raise ValueError(f"{fault}; repair it, or make the column text or a number") from error
    if scalar.type == pa.time64("ns"):
        if not 0 <= scalar.value < _DAY:
            raise ValueError(f"{scalar.value} ns is no time of day")
        return scalar.cast(pa.string()).as_py()
    if isinstance(scalar, pa.StructScalar):
        return {name: _value(each) for name, each in scalar.items()}
    if isinstance(scalar, pa.MapScalar):
        return [tuple(_value(pair).values()) for pair in scalar.values]
    if hasattr(scalar, "values"):  # a list of any kind
        return [_value(each) for each in scalar.values]
    return _value(scalar.value)  # of a dictionary, a run, a union or an extension type


def _timestamp(value: int, kind: Any) -> str:
    """Return a timestamp as ISO 8601 text, in its time zone, or in UTC if the zone is not known here."""
    span, nanoseconds = _parts(value, kind.unit)
    time = _EPOCH + span
    if kind.tz:
        time = time.replace(tzinfo=datetime.UTC).astimezone(_zone(kind.tz))
    if nanoseconds % 1000 == 0:
        return time.isoformat()
    text = time.isoformat(timespec="microseconds")
    end = len("2000-01-01T00:00:00.000000")
    return f"{text[:end]}{nanoseconds % 1000:03}{text[end:]}"


def _duration(value: int, unit: str) -> str:
    """Return a duration as text, as Python writes it."""
    span, nanoseconds = _parts(value, unit)
    if nanoseconds % 1000 == 0:
        return str(span)
    return f"{span - datetime.timedelta(microseconds=span.microseconds)}.{nanoseconds:09}"


def _parts(value: int, unit: str) -> tuple[datetime.timedelta, int]:
    """Return a time in whole microseconds, and the nanoseconds of its last second."""
    seconds, rest = divmod(value, _IN_SECOND[unit])
    nanoseconds = rest * (10**9 // _IN_SECOND[unit])
    return datetime.timedelta(seconds=seconds, microseconds=nanoseconds // 1000), nanoseconds


@lru_cache(100)
def _zone(name: str) -> datetime.tzinfo:
    """Return the time zone of a name, or of an offset such as +01:00; UTC if it is not known."""
    try:
        if name[0] in "+-":
            return datetime.datetime.strptime(name, "%z").tzinfo or datetime.UTC
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return datetime.UTC


def _cell(scalar: Any) -> Any:
    try:
        return _value(scalar)
    except MemoryError:
        raise
    except UnicodeDecodeError as error:
        return ValueError(utf8_fault(error.object))
    except Exception as error:
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
    seen = (name for name in fields if name in _READ or isinstance(cells[name], float))
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
