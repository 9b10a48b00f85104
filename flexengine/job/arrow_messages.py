"""Sizes of the record batches of an Arrow IPC file or stream after decompression, from its messages alone."""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_DICTIONARY, _RECORDS = 2, 3  # kinds of messages, as in Message.fbs
_MAGIC = b"ARROW1\0\0"  # of files; a stream has none


class ArrowMessage(NamedTuple):
    """A message with data.

    Attributes:
        is_dictionary: whether it holds a dictionary, else rows.
        size: bytes of its compressed buffers after decompression. Other buffers are mapped, not read.
        end: its end in the file.
    """

    is_dictionary: bool
    rows: int
    size: int
    end: int


def messages(path: os.PathLike[str]) -> Iterator[ArrowMessage]:
    """Yield the messages with data up to the first that is damaged."""
    with open(path, "rb") as file:
        at = len(_MAGIC) if file.read(len(_MAGIC)) == _MAGIC else 0
        while True:
            try:
                file.seek(at)
                (first,) = struct.unpack("<I", file.read(4))
                (length,) = struct.unpack("<I", file.read(4)) if first == 0xFFFFFFFF else (first,)
                if not length:
                    return
                data, body = file.read(length), file.tell()
                message = _Table(data, struct.unpack_from("<I", data)[0])
                kind, at = message.number(1, "B"), body + message.number(3, "q")
                if kind in (_DICTIONARY, _RECORDS):
                    batch = message.table(2) if kind == _RECORDS else message.table(2).table(1)
                    yield ArrowMessage(kind == _DICTIONARY, batch.number(0, "q"), _unpacked(batch, file, body), at)
            except (struct.error, ValueError, OSError):
                return


def _unpacked(batch: "_Table", file: BinaryIO, body: int) -> int:
    """Return the bytes of a batch's buffers after decompression, which stand before each; 0 without compression."""
    if not batch.place(3):
        return 0
    total, place = 0, batch.target(2)
    (count,) = struct.unpack_from("<I", batch.data, place)
    for i in range(count):
        offset, length = struct.unpack_from("<qq", batch.data, place + 4 + 16 * i)
        if length:
            file.seek(body + offset)
            total += max(struct.unpack("<q", file.read(8))[0], 0)  # -1: this buffer is not compressed
    return total


class _Table:
    """A table of flatbuffers."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]

    def place(self, field: int) -> int:
        """Return where a field stands; 0 if it is absent."""
        if 4 + 2 * field >= struct.unpack_from("<H", self.data, self._fields)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self.data, self._fields + 4 + 2 * field)[0]
        return self._at + offset if offset else 0

    def number(self, field: int, form: str) -> int:
        """Return a number; 0 if it is absent."""
        place = self.place(field)
        return int(struct.unpack_from(f"<{form}", self.data, place)[0]) if place else 0

    def target(self, field: int) -> int:
        """Return the place to which a field points."""
        place = self.place(field)
        return place + int(struct.unpack_from("<I", self.data, place)[0])

    def table(self, field: int) -> "_Table":
        return _Table(self.data, self.target(field))
