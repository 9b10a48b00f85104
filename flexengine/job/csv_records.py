"""Records of CSV and TSV files, with the quotes of RFC 4180. A quoted cell may hold line ends, so a record is one line
or several. A broken record costs its first line alone."""

import io
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import BinaryIO, cast

from flexengine.errors import InvalidInput
from flexengine.job.delimiters import stated_delimiter
from flexengine.job.read_json import BOMS, MAX_VALUES, skip_blank, too_long, too_wide, utf8_fault

CsvRecord = tuple[int, list[str], str | None]  # line on which a record starts, its cells, and why it cannot be read
_QUOTES = 'double each quote inside a quoted cell (""), as a backslash is text here'
_NO_END = f"invalid CSV: a quoted cell has no end; {_QUOTES}, or remove a quote that opens no cell"
_LINE_END = b"\r\n"
_LINE_COST = 256  # bytes that take as long to read again as a line does
_MOST_DEAD = 2**15  # places that are remembered
_LATE_BYTES = 2**16  # of a quoted cell in text that was read again too often


def csv_records(file: BinaryIO, delimiter: str, most: int) -> Iterator[CsvRecord]:
    """Yield the records of a file, header first, without blank lines and a first line that states the delimiter.

    If a record breaks the rules of quoting, or is longer than `most` bytes, only its first line is dropped and reading
    continues with the next line. A stray quote therefore does not consume the rest of the file, and the cells before it
    on its line are kept.
    """
    record = _Record(file, most)
    while record.begin():
        cells, fault = list[str](), None
        try:
            cells = record.cells(delimiter)
        except UnicodeDecodeError:
            fault = utf8_fault(bytes(record.raw))
        except _WholeRecord as error:
            fault = str(error)
        except InvalidInput as error:
            record.give_back()
            fault = utf8_fault(bytes(record.raw)) or str(error)
            if isinstance(error, _DeadEnd):
                before = list(takewhile(lambda cell: b"\n" not in cell, error.before))
                cells = [str(cell, "utf-8", "replace") for cell in before]
        yield record.line, cells, fault


class _WholeRecord(InvalidInput):
    """The record has a fault, but its end is known."""


class _DeadEnd(InvalidInput):
    """No record ends in the text that follows, wherever it begins."""

    before: Sequence[bytes] = ()  # the cells before the one that has the fault


class _Record:
    """The present record of a file."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._most = cast(io.BufferedReader, file), most
        self._again = _reader(b"")  # lines of a broken record after its first, to be read again
        self._reread = 0  # bytes of lines that were read again more than once, and _LINE_COST for each
        self._is_again = False  # whether this record begins in `_again`
        self._dead = set[int]()  # line (times 2**32) and column of cells after which no record ends
        self.line = 1  # on which it starts
        self.raw = bytearray()  # its bytes as far as they are read

    def begin(self) -> bool:
        """Read the first line of the next record. Return False at the end of the file."""
        first, stated = self.line == 1 and not self.raw, False
        while True:
            self.line += self.raw.count(b"\n")
            self.raw = bytearray()
            self._is_again = bool(self._again.peek())
            self._reread *= self._is_again
            if not self._more():
                return False
            if first:
                self.raw = bytearray(BOMS.sub(b"", self.raw, 1))
                first, stated = not stated and stated_delimiter(self.raw) is not None, True
                if first:
                    continue
            if self._is_too_long() or self.raw.strip(_LINE_END):
                return True
            self.line += skip_blank(self._again if self._again.peek() else self._file, _LINE_END)

    def cells(self, delimiter: str) -> list[str]:
        """Return the cells, reading more lines while a quoted cell is open.

        Raises:
            InvalidInput: the record is longer than allowed, or breaks the rules of quoting.
            UnicodeDecodeError: a cell is not UTF-8.
        """
        self._check_size()
        mark = delimiter.encode()
        if b'"' not in self.raw and not too_wide(self.raw):
            if self.raw.count(mark) >= MAX_VALUES:
                raise _too_many()
            return str(self._checked(self.raw.rstrip(_LINE_END)), "utf-8").split(delimiter)
        found, places = list[bytes](), list[int]()
        try:
            end = self._scan(mark, found, places)
            if self.raw[end:].strip(_LINE_END):
                found.pop()
                raise _DeadEnd(f"invalid CSV: {delimiter!r} expected after '\"'; {_QUOTES}")
        except _DeadEnd as error:
            error.before = found
            if len(self._dead) + len(places) > _MOST_DEAD:
                self._dead.clear()
            self._dead.update(places)
            raise
        if fault := too_wide(self.raw):
            raise _WholeRecord(fault)
        return [str(cell, "utf-8") for cell in found]

    def _scan(self, mark: bytes, found: list[bytes], places: list[int]) -> int:
        """Add the cells to `found`, and lines and columns of the first ones to `places`. Return where the last ends."""
        at = seen = begin = 0  # begin: of the line of the cell
        line = self.line
        while at >= 0:
            if lines := self.raw.count(b"\n", seen, at):
                line, begin = line + lines, self.raw.rfind(b"\n", seen, at) + 1
            seen, place = at, line << 32 | at - begin
            if place in self._dead:
                raise _DeadEnd(_NO_END)
            if len(places) < _MOST_DEAD:
                places.append(place)
            cell, end = self._quoted(at) if self.raw.startswith(b'"', at) else self._plain(at, mark)
            found.append(bytes(cell))
            if len(found) > MAX_VALUES:
                raise _too_many()
            at = end + 1 if self.raw.startswith(mark, end) else -1
        return end

    def give_back(self) -> None:
        """Keep the first line alone. The others are read again."""
        if end := self.raw.find(b"\n") + 1:
            if rest := len(self.raw) - end:
                self._reread += self._is_again * (rest + _LINE_COST * self.raw.count(b"\n"))
                if self._again.peek():  # the record lies in it
                    self._again.seek(-rest, io.SEEK_CUR)
                else:
                    self._again = _reader(bytes(self.raw[end:]))
                del self.raw[end:]
            return
        while (piece := self._file.readline(2**20)) and not piece.endswith(b"\n"):
            pass
        self.raw = bytearray(piece[-1:])

    def _quoted(self, at: int) -> tuple[bytearray, int]:
        """Return the quoted cell that begins at a position, and where it ends."""
        end = at
        while True:
            seen = end + 1
            while (end := self.raw.find(b'"', seen)) < 0:
                seen = len(self.raw)
                if not self._more(quoted=True):
                    raise _DeadEnd(_NO_END)
                self._check_size()
                if len(self.raw) > self._most_quoted():
                    raise InvalidInput("invalid CSV: a quoted cell has no end here; too many quotes before have none")
            if not self.raw.startswith(b'"', end + 1):
                return self.raw[at + 1 : end].replace(b'""', b'"'), end + 1
            end += 1

    def _most_quoted(self) -> int:
        """Return the bytes of a record with a quoted cell over several lines. Text is not read again without end."""
        often = self._reread // (4 * self._most)
        return self._most + len(_LINE_END) if not often else _LATE_BYTES if often == 1 else 0

    def _plain(self, at: int, delimiter: bytes) -> tuple[bytearray, int]:
        end = self.raw.find(delimiter, at)
        cell = self.raw[at:] if end < 0 else self.raw[at:end]
        cell = self._checked(cell.rstrip(_LINE_END) if end < 0 else cell)
        return cell, at + len(cell)

    def _checked(self, text: bytearray) -> bytearray:
        if b"\r" in text:
            raise _DeadEnd("has a carriage return (CR) that ends no line; save the file with line ends LF or CRLF")
        return text

    def _more(self, quoted: bool = False) -> bool:
        """Read the next line, or as much of it as is allowed. Return False at the end of the file. quoted: read several
        lines if no quote is in them."""
        room = self._most + len(_LINE_END) + 1 - len(self.raw)
        source = self._again if self._again.peek() else self._file
        block = source.peek()[:room] if quoted else b'"'
        read = source.readline(room) if b'"' in block else source.read(len(block))
        if b'"' in block and not read.endswith(b"\n"):
            read += self._file.readline(room - len(read))
        self.raw += read
        return bool(read)

    def _is_too_long(self) -> bool:
        return len(self.raw) > self._most + len(_LINE_END)

    def _check_size(self) -> None:
        if self._is_too_long():
            raise InvalidInput(f"{too_long(self._most)}; if a quote opens no cell here, remove it, else divide the row")


def _too_many() -> InvalidInput:
    return InvalidInput(f"has over {MAX_VALUES:,} cells")


def _reader(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(cast(io.RawIOBase, io.BytesIO(data)))
