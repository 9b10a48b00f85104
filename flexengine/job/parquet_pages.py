"""Memory that rows of a Parquet file take while they are read, from the headers and levels of its pages.

A page of few bytes may hold a cell of gigabytes: compressed, repeated by a dictionary, or as a list of equal values.
pyarrow decodes whole rows, so their sizes must be known before.
"""

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from flexengine.job.arrow_sizes import MOST_READ_BYTES, READ_BYTES

MAX_PAGE_BYTES = 2**27
BATCH_ROWS = 256  # rows read at a time, at most
_VALUE_BYTES = 16  # of a number with its levels and offsets
_SMALL = 4096  # bytes and values of chunks whose pages are not looked at: a wide table has thousands
_HEADER_BYTES = (2**10, 2**16, 2**22)  # bytes read for a header; its statistics may be long
_DICTIONARY_PAGE, _DATA_PAGES, _V2 = 2, (0, 3), 3  # numbers of page types, as in parquet.thrift
_LEVELS_RLE = 3
# Fields of the footer and of a column's metadata, and numbers of types and encodings
_ROW_GROUPS = 4
_TYPE, _ENCODINGS, _CODEC, _VALUES, _UNCOMPRESSED, _FIRST_DATA, _FIRST_DICTIONARY = 1, 2, 4, 5, 6, 9, 11
_BYTE_ARRAY, _DELTA_BYTE_ARRAY = 6, 7
_CODECS = ("", "snappy", "gzip", "", "brotli", "lz4_raw", "zstd", "lz4_raw")  # by number; "" is none, or not known here


class ParquetChunk(NamedTuple):
    """Sizes of a column of a row group.

    Attributes:
        page: bytes of the largest page after decompression.
        values: most values of a row.
        row: bytes of the pages that hold a row, at most.
        all_values, all_bytes: of the whole chunk.
        cell: bytes of the largest cell that may repeat without taking bytes of a page.
    """

    page: int
    values: int
    row: int
    all_values: int
    all_bytes: int
    cell: int

    def bytes_of(self, rows: int) -> int:
        """Return the most bytes that a number of rows take."""
        values = min(rows * self.values, self.all_values)
        return values * (_VALUE_BYTES + self.cell) + min(rows * self.row, self.all_bytes)


def batch_rows(path: os.PathLike[str], schema: Any) -> Iterator[tuple[int, int]]:
    """Yield the rows of each row group, and how many may be read at a time; 0 if one row may take MOST_READ_BYTES.

    The footer is read here, as pyarrow ends the process for columns that a damaged one lacks.

    Args:
        schema: schema of the file, of pyarrow.
    """
    with open(path, "rb") as file:
        for group in _row_groups(file):
            if len(group[1]) != len(schema):
                raise ValueError(f"a row group has {len(group[1])} columns, but the schema has {len(schema)}")
            yield group[3], _rows_at_a_time(file.fileno(), [column[3] for column in group[1]], schema)


def _rows_at_a_time(file: int, columns: list[dict[int, Any]], schema: Any) -> int:
    chunks = list[ParquetChunk]()
    for number, column in enumerate(columns):
        small = max(column[_VALUES], column[_UNCOMPRESSED]) <= _SMALL
        if column[_VALUES] and not (small and len(columns) > _SMALL):
            chunk = _chunk(file, column, schema.column(number).max_repetition_level)
            if chunk.page > MAX_PAGE_BYTES:
                return 0
            chunks.append(chunk)
    if sum(chunk.page + chunk.bytes_of(1) for chunk in chunks) > MOST_READ_BYTES:
        return 0
    rows = BATCH_ROWS
    while rows > 1 and sum(chunk.bytes_of(rows) for chunk in chunks) > READ_BYTES:
        rows //= 2
    return rows


def _chunk(file: int, column: dict[int, Any], depth: int) -> ParquetChunk:
    """Return the sizes of a column. depth: its largest repetition level."""
    rows = _RowSizes(depth, column[_VALUES])
    page = total = cell = 0
    of_bytes = column[_TYPE] == _BYTE_ARRAY
    # A cell may begin like the one before, without taking bytes.
    shared = of_bytes and _DELTA_BYTE_ARRAY in column[_ENCODINGS]
    for header, body in _pages(file, column):
        size = max(header[2], header[3])
        page, total = max(page, size), total + size
        if size > MAX_PAGE_BYTES:
            break
        cell = max(cell, page if shared else 0)
        if header[1] != _DICTIONARY_PAGE:
            rows.add(header, body, column[_CODEC], _VALUE_BYTES + cell)
        elif of_bytes:
            data = _decompressed(column[_CODEC], body(), header[2])
            cell = size if data is None else _longest(data)
    return ParquetChunk(page, rows.finish(), rows.bytes, column[_VALUES], total, cell)


class _RowSizes:
    """Most values and bytes of a row, from the repetition levels of a chunk's data pages."""

    def __init__(self, depth: int, values: int) -> None:
        self._depth, self._total = depth, values
        self._seen = self._start = self._most = self._open = 0  # _open: bytes of pages that hold the last row
        self.bytes = 0

    def add(self, header: dict[int, Any], body: Any, codec: int, value_bytes: int) -> None:
        """Add a data page. body: return its bytes in the file; value_bytes: most bytes of a value."""
        v2 = header[1] == _V2
        about, start = header[8 if v2 else 5], self._start
        # A chunk of few values takes little, wherever its rows begin.
        if self._depth and self._total * value_bytes > READ_BYTES // 8:
            if v2:
                self._starts(body()[: about[6]], about[1])
            elif about[4] == _LEVELS_RLE and (data := _decompressed(codec, body(), header[2])):
                self._starts(data[4 : 4 + int.from_bytes(data[:4], "little")], about[1])
        self.bytes = max(self.bytes, self._open + header[2])
        begins = not self._depth or start != self._start
        self._open = header[2] if begins else self._open + header[2]
        self._seen += about[1]

    def finish(self) -> int:
        """Return the most values of a row."""
        return max(self._most, self._total - self._start) if self._depth else 1

    def _starts(self, levels: bytes, count: int) -> None:
        """Find the rows that start in a page: values of level 0."""
        width, at, done = self._depth.bit_length(), 0, 0
        while done < count and at < len(levels):
            head, at = _varint(levels, at)
            run = head >> 1
            if head & 1:
                step = 2**16 * width
                for first in range(at, min(at + run * width, len(levels)), step):
                    bits = np.frombuffer(levels[first : min(first + step, at + run * width)], np.uint8)
                    level = np.unpackbits(bits[: len(bits) // width * width], bitorder="little").reshape(-1, width)
                    self._begin(self._seen + done + (first - at) * 8 // width + np.flatnonzero(~level.any(axis=1)))
                at, run = at + run * width, run * 8
            else:
                if levels[at] == 0:
                    begin = self._seen + done
                    self._begin(np.array([begin, min(begin + run, self._seen + count) - 1]), inner=1)
                at += (width + 7) // 8
            done += run

    def _begin(self, places: Any, inner: int | None = None) -> None:
        """Add places at which rows start. inner: most values between them; None is by their differences."""
        if len(places):
            gaps = int(np.diff(places).max()) if inner is None and len(places) > 1 else inner or 0
            self._most = max(self._most, int(places[0]) - self._start, gaps)
            self._start = int(places[-1])


def _pages(file: int, column: dict[int, Any]) -> Iterator[tuple[dict[int, Any], Any]]:
    """Yield the header of each page of a chunk, and a function that reads its bytes."""
    values, at = 0, column[_FIRST_DATA]
    at = min(at, column.get(_FIRST_DICTIONARY) or at)
    while values < column[_VALUES]:
        header, length = _header(file, at)
        if min(header[2], header[3]) < 0:
            raise ValueError("a page has a negative size")
        at += length
        yield header, lambda size=header[3], at=at: os.pread(file, size, at)
        at += header[3]
        if header[1] in _DATA_PAGES:
            values += header[8 if header[1] == _V2 else 5][1]


def _header(file: int, at: int) -> tuple[dict[int, Any], int]:
    for size in _HEADER_BYTES:
        try:
            return _struct(os.pread(file, size, at), 0)
        except IndexError:
            continue
    raise ValueError("the header of a page cannot be read")


def _decompressed(codec: int, data: bytes, size: int) -> Any:
    """Return the bytes of a page; None if they cannot be decompressed here."""
    import pyarrow as pa

    if not codec:
        return data
    try:
        return pa.Codec(_CODECS[codec]).decompress(data, decompressed_size=size, asbytes=True)
    except (ValueError, OSError):  # the older framing of LZ4, or damage, which the reader of rows will name
        return None


def _longest(data: bytes) -> int:
    """Return the bytes of the longest text of a dictionary: a length of 4 bytes before each."""
    most = at = 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        most, at = max(most, length), at + 4 + length
    return most


# Thrift's compact protocol, in which headers are written
def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _field(data: bytes, at: int, number: int) -> tuple[int, int, int]:
    """Return number and type of a field, and where its value stands. number: of the field before. Type 0 is the end of
    the struct."""
    head, at = data[at], at + 1
    if head >> 4 or not head:
        return number + (head >> 4), head & 15, at
    number, at = _varint(data, at)
    return number >> 1 ^ -(number & 1), head & 15, at


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by their numbers, and where it ends. Texts are left out."""
    found = dict[int, Any]()
    number, kind, at = _field(data, at, 0)
    while kind:
        found[number], at = _value(data, at, kind)
        number, kind, at = _field(data, at, number)
    return found, at


def _list(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the length of a list, the type of its elements, and where they begin."""
    head, at = data[at], at + 1
    count, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
    return count, head & 15, at


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        value, at = _varint(data, at)
        return value >> 1 ^ -(value & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        data[at + size - 1]
        return None, at + size
    if kind == 9:
        values = list[Any]()
        count, kind, at = _list(data, at)
        for _ in range(count):
            item, at = _value(data, at, kind) if kind > 2 else (None, at + 1)
            values.append(item)
        return values, at
    if kind == 12:
        return _struct(data, at)
    raise ValueError(f"a header has a field of type {kind}")


def _row_groups(file: BinaryIO) -> Iterator[dict[int, Any]]:
    """Yield the metadata of each row group, from the file's footer."""
    file.seek(-8, os.SEEK_END)
    size = int.from_bytes(file.read(4), "little")
    file.seek(-8 - size, os.SEEK_END)
    data = file.read(size)
    number, kind, at = _field(data, 0, 0)
    while number != _ROW_GROUPS:
        _, at = _value(data, at, kind)
        number, kind, at = _field(data, at, number)
    count, _, at = _list(data, at)
    for _ in range(count):
        group, at = _struct(data, at)
        yield group
