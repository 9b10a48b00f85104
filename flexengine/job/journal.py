"""The journal of a job: every finished row as soon as it is finished, in a file that outlives the process.

A record is one line: 8 hex digits (the CRC-32 of what follows), a space, JSON, a newline. The first record holds the
manifest; then {"index": i, "result": {...}} for rows in the order they finish, a later record of a row replacing an
earlier one, {"settings": {...}} for choices of the engine that later runs keep to, {"output": [n, m]} whenever an
output file of the first n rows, m bytes, was put in place, and {"output": []} before that one is replaced.
"""

import errno
import fcntl
import json
import os
import stat
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from flexengine.config import Completion, Result
from flexengine.errors import InvalidInput
from flexengine.job.results import sync_directory

TODO, DONE, FAILED = 0, 1, 2
SYNC_SECONDS = 1.0
_SETTLED, _RETRIED = (bytes(made) + bytes(253) for made in ((0, 1, 1), (0, 1, 0)))  # by state
_MANIFEST = b'{"manifest":'


class Record(NamedTuple):
    """A record and where it lies: bytes [offset, end) of the journal, its newline included."""

    offset: int
    end: int
    value: dict[str, Any]


@dataclass(frozen=True)
class Dropped:
    """What recovery left out: `bytes` at the end; `damaged` if they were more than a record cut short."""

    bytes: int = 0
    damaged: bool = False


def encode_record(value: dict[str, Any]) -> bytes:
    """One line of a journal. ASCII only, so that half a surrogate pair in a text survives."""
    body = json.dumps(value, separators=(",", ":"), default=vars).encode("ascii")
    return b"%08x %b\n" % (zlib.crc32(body), body)


def decode_record(line: bytes) -> dict[str, Any] | None:
    """The value of a whole line, or None if it is not as it was written."""
    if line[8:9] != b" " or not line.endswith(b"\n") or b"%08x" % zlib.crc32(line[9:-1]) != line[:8]:
        return None
    try:
        value = json.loads(line[9:])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_records(file: BinaryIO) -> Iterator[Record]:
    """The records from the beginning up to the first that is not whole."""
    offset = 0
    for line in file:
        if (value := decode_record(line)) is None:
            return
        yield Record(offset, offset + len(line), value)
        offset += len(line)


def result_of(value: dict[str, Any]) -> Result:
    """The Result in a row's record."""
    fields = dict(value["result"])
    if fields.get("samples") is not None:
        fields["samples"] = [Completion(**sample) for sample in fields["samples"]]
    return Result(value["index"], **fields)


class Journal:
    """The journal at `path`, locked for this process; made if it is not there. Use as a context manager.

    Kept in memory are nine bytes per row (where its last record begins, and its state), never the results.
    A record goes to the operating system at once, in one write, so kill -9 loses nothing that was finished.

    Attributes: manifest (None: a new journal), created (seconds since 1970 of its first start), dropped (what recovery
    left out), settings (see set), output (rows and bytes of the output file that is up to date with the journal; None:
    there is none, or it is about to be replaced).
    Raises InvalidInput if another process holds the journal, or the file cannot be one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        try:
            self._forget()
            self.dropped = self._recover()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self) -> None:
        self.manifest: dict[str, Any] | None = None
        self.created = 0
        self.settings: dict[str, Any] = {}
        self.output: tuple[int, int] | None = None
        self._offsets, self._states = array("q"), bytearray()
        self._end = 0
        self._synced = (0, 0.0)  # up to which byte by this process, and when

    def _recover(self) -> Dropped:
        size = os.fstat(self._file).st_size
        with open(self._file, "rb", closefd=False) as file:
            self._check_ours(file)
            for record in read_records(file):
                if not self._note(record):
                    break
                self._end = record.end
            file.seek(self._end)
            damaged = file.readline().endswith(b"\n")  # a record cut short by a kill has no end
        self._truncate()
        self._synced = (self._end, 0.0)
        return Dropped(size - self._end, damaged)

    def _check_ours(self, file: BinaryIO) -> None:
        """A foreign file of this name must not be emptied as a damaged journal would be."""
        head = file.read(9 + len(_MANIFEST))
        file.seek(0)
        digits = all(c in b"0123456789abcdef" for c in head[:8]) and head[8:9] in (b" ", b"")
        if not digits and head[9:] != _MANIFEST:
            raise InvalidInput(f"{self.path} is no journal of this program; move it away or name another --output")

    def _note(self, record: Record) -> bool:
        """Takes a record into the index. False: it should be the first and is not."""
        value = record.value
        if self.manifest is None:
            if not isinstance(value.get("manifest"), dict) or not isinstance(value.get("created"), int):
                return False
            self.manifest, self.created = value["manifest"], value["created"]
        elif isinstance(output := value.get("output"), list) and len(output) in (0, 2):
            self.output = (output[0], output[1]) if output else None
        elif isinstance(value.get("settings"), dict):
            self.settings = value["settings"]
        elif isinstance(index := value.get("index"), int) and isinstance(value.get("result"), dict) and index >= 0:
            self._place(index, record.offset, value["result"].get("error") is not None)
        return True

    def _place(self, index: int, offset: int, failed: bool) -> None:
        missing = index + 1 - len(self._states)
        if missing > 0:
            self._offsets.extend([-1] * missing)
            self._states.extend(bytes(missing))
        self._offsets[index], self._states[index] = offset, FAILED if failed else DONE
        self.output = None

    def restart(self) -> None:
        """Empties the journal."""
        self._forget()
        self._truncate()

    def begin(self, manifest: dict[str, Any], created: int) -> None:
        """Writes the first record of a new journal. created: seconds since 1970."""
        self._append({"manifest": manifest, "created": created})
        self.manifest, self.created = manifest, created
        self.sync()
        sync_directory(self.path.parent)

    def add(self, result: Result) -> None:
        """Keeps a finished row. Raises OSError if it cannot be written; what was written before stays valid."""
        fields = {name: value for name, value in vars(result).items() if name != "index" and value is not None}
        offset = self._append({"index": result.index, "result": fields})
        self._place(result.index, offset, result.error is not None)

    def set(self, settings: dict[str, Any]) -> None:
        """Notes choices that results depend on and no caller made; later runs of the job find them in `settings`."""
        self._append({"settings": settings})
        self.settings = dict(settings)

    def add_output(self, rows: int, nbytes: int) -> None:
        """Notes that the output file, of `nbytes` bytes, holds the first `rows` rows as they stand in the journal."""
        self._append({"output": [rows, nbytes]})
        self.output = (rows, nbytes)
        self.sync()

    def forget_output(self) -> None:
        """Notes that the output file is about to be replaced, so that its size is not known any more."""
        if self.output is not None:
            self._append({"output": []})
            self.output = None
            self.sync()

    def state(self, index: int) -> int:
        """TODO, DONE or FAILED."""
        return self._states[index] if index < len(self._states) else TODO

    def count(self, state: int, rows: int) -> int:
        """How many of the first `rows` rows are in this state, DONE or FAILED."""
        return self._states.count(state, 0, rows)

    def settled(self, rows: int, retry_failed: bool = False) -> bytes:
        """For each of at most the first `rows` rows 1, or 0 if it is still to be run."""
        return bytes(self._states[:rows]).translate(_RETRIED if retry_failed else _SETTLED)

    def results(self, rows: Iterable[int]) -> Iterator[Result]:
        """The results of these rows, read again one by one.

        Raises RuntimeError if there is none of a row, OSError if the file is not as it was written."""
        with open(self._file, "rb", closefd=False) as file:
            for index in rows:
                if self.state(index) == TODO:
                    raise RuntimeError(f"row {index} was never finished")
                file.seek(self._offsets[index])
                value = decode_record(file.readline())
                if value is None or value.get("index") != index:
                    raise OSError(errno.EIO, f"the record of row {index} has changed since it was written")
                yield result_of(value)

    def sync(self) -> None:
        """Puts what was written so far on the disk itself."""
        if self._end > self._synced[0]:
            end = self._end
            os.fsync(self._file)
            self._synced = (end, time.monotonic())

    def sync_if_due(self) -> None:
        """sync(), at most once a second: it takes longer than a sweep of a small model, and only a crash of the
        machine, not of this process, could lose what the operating system holds."""
        if time.monotonic() - self._synced[1] >= SYNC_SECONDS:
            self.sync()

    def close(self) -> None:
        """Gives the lock back. A journal without a manifest leaves no file."""
        if self.manifest is None:
            self.path.unlink(missing_ok=True)
        else:
            self.sync()
        os.close(self._file)

    def _append(self, value: dict[str, Any]) -> int:
        line = encode_record(value)
        begin = self._end
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._file, line[written:], begin + written)
        except OSError:
            self._truncate()  # half a record helps nobody
            raise
        self._end = begin + len(line)
        return begin

    def _truncate(self) -> None:
        if os.fstat(self._file).st_size > self._end:
            os.ftruncate(self._file, self._end)


def _open_locked(path: Path) -> int:
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise InvalidInput(f"journal {path} cannot be opened for writing: {error.strerror}") from error
        try:
            if _lock(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, path: Path) -> bool:
    """Locks an open journal. False: whoever had it has removed it in the meantime."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise InvalidInput(f"journal {path} is not a plain file; move it away or name another --output")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidInput(
            f"{_owner(file)} is writing this output already ({path} is locked); wait for it or name another --output"
        ) from None
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _owner(file: int) -> str:
    """Who holds the lock, as far as the system tells."""
    inode = os.fstat(file).st_ino
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5].endswith(f":{inode}"):
                return f"process {words[4]}"
    except (OSError, IndexError):
        pass
    return "another process"
