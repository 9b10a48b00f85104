"""Rows of Parquet and Arrow files, read in a process of its own, with limits.

Few bytes of a file can expand to any memory in one step of pyarrow, and damage can end the process, so no check before
bounds them. This module is also the program of the other process. It sends the names of the columns and their index,
the number and claimed rows of each unit (a row group or record batch), and rows in parts. If it ends early, the next
process continues at the first row that was not sent, and reads fewer rows at a time.
"""

import os
import pickle
import resource
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any, cast

from flexengine.errors import FlexError
from flexengine.job import read_json
from flexengine.job.arrow_rows import TableRow, first_line, record_of, records_of
from flexengine.job.arrow_sizes import parts
from flexengine.job.inputs import InputFile
from flexengine.job.own_process import last_line, set_limit, started
from flexengine.job.pandas_index import range_column

LEAST_BYTES, READ_BYTES = 2**26, 2**29  # least and most memory of the process, beside that of its libraries
LIBRARIES = 100 * 2**20  # bytes that a process takes before it reads, if it ends before it says so
COPIES = 3  # of a part's bytes in each process: as Arrow's or pickled bytes, as text, and in one more form
CPU_SECONDS = 60  # most time of the processor for one step
ROWS = (256, 16, 1)  # read at a time
MOST_REFUSED = 10**7  # error rows of a file
MOST_ENDS = 300  # processes that ended early one after another, without a finished row group or batch
_TOO_LARGE = f"{read_json.too_long(read_json.MAX_LINE_BYTES)}, or has over {read_json.MAX_VALUES:,} values; divide it"
_FILE = "/proc/self/fd/0"
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def most_bytes(memory: int | None) -> int:
    """Return the memory of the process, beside that of its libraries. memory: bytes of RAM that the user gave the job;
    None if none were given: which rows can be read must not depend on the memory that is free."""
    return READ_BYTES if memory is None else max(LEAST_BYTES, min(READ_BYTES, memory // 4))


def table_rows(source: InputFile, texts: Container[str] | None) -> Iterator[Any]:
    """Yield the names of the columns of a Parquet or Arrow file and its `RangeColumn`, then its rows. Raise ValueError
    if it is damaged, and FlexError if an error of Python ends the other process. `source.taken` becomes the memory of
    that process, and of its messages in this one."""
    named, line, refused, most = False, 1, 0, most_bytes(source.memory)
    unread = "takes too much memory or time to be read (docs/jobs.md has the limits); write the file with smaller"
    unit, total, done, size, ends = 0, -1, 0, ROWS[0], 0  # total: -1 is not known. ends: since the last finished unit
    own = part = 0  # most bytes of the other process, and of rows that it sent at once
    while ends < MOST_ENDS:
        request = pickle.dumps((source.form, texts, unit, done, size, line)).hex()
        with open(source.file, "rb") as file:
            errors = TemporaryFile()  # noqa: SIM115 - while the process runs
            process = started(__name__, str(most), request, stdin=file, stderr=errors, **_ENVIRONMENT)
        assert process.stdout is not None
        try:
            while True:
                kind, value = pickle.load(process.stdout)
                if kind == "error":
                    raise ValueError(value)
                if kind == "end":
                    return
                if kind == "taken":
                    own, part = max(own, min(value[0], LIBRARIES + most)), max(part, value[1])
                elif kind == "names" and not named:
                    named = True
                    yield value
                elif kind == "unit" and value != (unit, total):
                    done, size, ends = (done, size, ends) if value[0] == unit else (0, ROWS[0], 0)
                    unit, total = value
                elif kind == "rows":
                    done, line = done + len(value), line + len(value)
                    yield from value
        except (EOFError, pickle.UnpicklingError):  # it has ended
            code, reason = process.wait(), last_line(errors)
            own, ends = LIBRARIES + most, ends + 1
            if code > 0 and reason and "MemoryError" not in reason:  # neither a limit nor damage ends it so
                ended = f"the process that reads it ended with exit status {code}: {reason}"
                fault = f"input {source.name} cannot be read: {ended}"
                raise FlexError(f"{fault}; mend that, or convert the file to JSON lines") from None
        finally:
            source.taken = max(source.taken, own + COPIES * part)
            process.kill()
            process.wait()
            process.stdout.close()
            errors.close()
        if total < 0:
            raise ValueError(f"it {unread} parts (exit status {code})")
        if size > ROWS[-1]:
            size = ROWS[ROWS.index(size) + 1]
            continue
        if (refused := refused + total - done) > MOST_REFUSED:
            raise ValueError(f"row group or batch {unit} claims {total:,} rows, but {unread} ones")
        for _ in range(total - done):
            yield TableRow(line, {}, f"its row group or batch {unread} ones")
            line += 1
        unit, total, done = unit + 1, -1, 0  # of the same size: the units of a file are alike
    raise ValueError(f"{MOST_ENDS} row groups or batches one after another are too large: each {unread} ones")


def replies(
    path: str, form: str, texts: Container[str] | None, first: int, done: int, size: int, line: int
) -> Iterator[tuple[str, Any]]:
    """Yield the names of the columns and the `RangeColumn`, then from a unit on its number and rows, and records of
    these rows; before records, the bytes that they take in this process, and their size.

    Args:
        texts: as for `record_of`.
        first: the unit to begin with.
        done: rows of this unit that are left out.
        size: rows of this unit read at a time.
        line: number of the first row.
    """
    schema, rows, units = (_parquet if form == "parquet" else _arrow)(path, first, size)
    yield "names", (list(schema.names), range_column(schema, rows))
    for number, total, batches in units:
        yield "unit", (number, total)
        seen, skip, step = 0, done if number == first else 0, size if number == first else ROWS[0]
        for batch in batches:
            for start in range(0, batch.num_rows, step):
                piece = batch.slice(start, step)
                new = piece.slice(max(0, skip - seen))
                seen += piece.num_rows
                for part, taken in parts(new):
                    large = taken > read_json.MAX_LINE_BYTES
                    yield "taken", (0, 0) if large else (COPIES * taken, taken)
                    cells = [] if large else enumerate(records_of(part), line)
                    yield "rows", [TableRow(line, {}, _TOO_LARGE)] if large else [record_of(*c, texts) for c in cells]
                    line += part.num_rows
        if seen != total:
            raise ValueError(f"row group or batch {number} claims {total:,} rows, but has {seen:,}")
    yield "end", None


_Units = Iterator[tuple[int, int, Iterator[Any]]]
_Opened = tuple[Any, Callable[[], int], _Units]  # a schema, the number of rows, and the units


def _parquet(path: str, first: int, size: int) -> _Opened:
    import pyarrow.parquet as pq

    table: Any = cast(Any, pq).ParquetFile(path, buffer_size=2**20, pre_buffer=False)

    def units() -> _Units:
        for number in range(first, table.num_row_groups):
            group = table.metadata.row_group(number)
            # pyarrow ends the process for columns that a damaged footer lacks
            if group.num_columns != len(table.schema):
                raise ValueError(f"a row group has {group.num_columns} columns, but the schema has {len(table.schema)}")
            least = min((group.column(i).num_values for i in range(group.num_columns)), default=0)
            if not 0 <= group.num_rows <= least:
                raise ValueError(f"row group {number} claims {group.num_rows:,} rows, but a column {least:,} values")
            rows = size if number == first else ROWS[0]
            yield number, group.num_rows, table.iter_batches(rows, [number], use_threads=False)

    return table.schema_arrow, lambda: table.metadata.num_rows, units()


def _arrow(path: str, first: int, size: int) -> _Opened:
    import pyarrow as pa

    source, places, kept = pa.memory_map(path), pa.memory_map(path), None
    try:
        file = pa.ipc.open_file(source)
        places.seek(8)  # behind the magic number a file is a stream
    except pa.ArrowInvalid:  # the datasets library writes .arrow files in the IPC stream format
        with suppress(StopIteration):  # of an empty file
            pa.ipc.MessageReader.open_stream(places).read_next_message()
        kept = _Kept(source, places.tell())
        file = pa.ipc.open_stream(pa.PythonFile(kept, "r"))
    count = None if kept else file.num_record_batches

    def batch(number: int) -> Iterator[Any]:
        batch = file.read_next_batch() if count is None else file.get_batch(number)
        for column in batch.columns:  # offsets beyond a buffer would end the process
            try:
                column.validate(full=True)
            except ValueError as error:
                if "UTF8" not in str(error):  # text that is not UTF-8 costs its row alone
                    raise
        yield batch

    def units() -> _Units:
        number = 0
        for message, start, end in _messages(places):
            rows = message.type == "record batch"
            if kept and (number >= first or not rows):
                kept.keep(start, end)
            if rows and number >= first:
                yield number, _batch_rows(message), batch(number)
            number += rows
            if number == count:
                return
        if count not in (None, number):
            raise ValueError(f"it has {number} record batches, but {count} in its footer")

    def rows() -> int:
        stream = pa.memory_map(path)
        stream.seek(0 if kept else 8)
        return sum(_batch_rows(message) for message, _, _ in _messages(stream) if message.type == "record batch")

    return file.schema, rows, units()


def _messages(source: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the messages of a mapped stream from its position on, each with its beginning and its end."""
    import pyarrow as pa

    place = source.tell()
    for message in pa.ipc.MessageReader.open_stream(source):
        if source.tell() <= place:
            raise ValueError("a message has a negative size")
        yield message, place, (place := source.tell())


class _Kept:
    """The messages of a mapped stream that are not left out, as a file. schema: bytes of the first message."""

    closed = False

    def __init__(self, source: Any, schema: int) -> None:
        self._source, self._parts = source, deque([(0, schema)])

    def keep(self, start: int, end: int) -> None:
        """Add a message, with its place in the stream."""
        self._parts.append((start, end))

    def read(self, nbytes: int) -> Any:
        """Return bytes of one message, which are not copied."""
        if not self._parts:
            return b""
        start, end = self._parts.popleft()
        self._source.seek(start)
        data = self._source.read_buffer(min(nbytes, end - start))
        if data.size and start + data.size < end:
            self._parts.appendleft((start + data.size, end))
        return data


def _batch_rows(batch: Any) -> int:
    """Return how many rows a record batch has, from its message in the encoding of flatbuffers."""
    message = batch.metadata.to_pybytes()

    def field(table: int, number: int) -> int:
        names = table - struct.unpack_from("<i", message, table)[0]
        known = 4 + 2 * number < struct.unpack_from("<H", message, names)[0]
        offset: int = struct.unpack_from("<H", message, names + 4 + 2 * number)[0] if known else 0
        return table + offset if offset else 0

    header = field(struct.unpack_from("<I", message)[0], 2)
    length = field(header + struct.unpack_from("<I", message, header)[0], 0)
    rows: int = struct.unpack_from("<q", message, length)[0] if length else 0
    if rows < 0:
        raise ValueError(f"a record batch claims {rows:,} rows")
    return rows


def _limit_time() -> None:
    """Allow CPU_SECONDS for the next step."""
    set_limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_SECONDS)


def _statm() -> list[int]:
    """Return bytes of this process: 1 in RAM, 2 of these in files, 5 of data; see proc(5)."""
    with open("/proc/self/statm", "rb") as file:
        return [int(pages) * resource.getpagesize() for pages in file.read().split()]


def _serve(most: str, request: str) -> None:
    """Send the replies to the engine's process, or the first line of an error. Running out of memory ends it."""
    import pyarrow.parquet

    # Of data, not of addresses: Arrow files are mapped, not read.
    set_limit(resource.RLIMIT_DATA, _statm()[5] + int(most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_time()
    target = sys.stdout.buffer
    with suppress(BrokenPipeError):
        try:
            for kind, value in replies(_FILE, *pickle.loads(bytes.fromhex(request))):
                if kind == "taken":
                    own = _statm()[1] - _statm()[2] + pyarrow.default_memory_pool().max_memory()
                    value = value[0] + own, value[1]
                pickle.dump((kind, value), target, pickle.HIGHEST_PROTOCOL)
                target.flush()
                _limit_time()
        except MemoryError:
            os._exit(1)
        except BrokenPipeError:
            raise
        except Exception as error:  # pyarrow raises errors of its own, and others unchanged
            pickle.dump(("error", first_line(error)), target)
            target.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
