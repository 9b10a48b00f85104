"""The journal of a job: a file to which every finished row is appended at once, so that it survives the process.

A record is one line: 8 hex digits (the CRC-32 of the JSON), a space, JSON, a newline. The first record holds the
manifest, and the time at which the job began, in seconds (`created`) and as local time (`local`). The other records are

    {"index": i, "result": {...}}   a finished row; a later record of a row replaces an earlier one
    {"settings": {...}}             choices of the engine, which later runs of the job must use again
    {"output": [n, m]}              an output file of the first n rows, m bytes, was written
    {"output": []}                  the output file is about to be replaced
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
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from flexengine.config import Completion, Result, Score, sync_path
from flexengine.errors import InvalidInput

TODO, DONE, FAILED = 0, 1, 2
SYNC_SECONDS = 1.0
# Translation tables from a row's state to 1 if the row is finished, else 0; _RETRIED runs failed rows again.
_FINISHED, _RETRIED = (bytes(states) + bytes(253) for states in ((0, 1, 1), (0, 1, 0)))
_MANIFEST = b'{"manifest":'


def encode_record(value: dict[str, Any]) -> bytes:
    """Return a record as a line of the journal. The JSON is ASCII, so that halves of surrogate pairs survive."""
    body = json.dumps(value, separators=(",", ":"), default=vars).encode("ascii")
    return b"%08x %b\n" % (zlib.crc32(body), body)


def decode_record(line: bytes) -> dict[str, Any] | None:
    """Return the value of a line, or None if the line is incomplete or damaged."""
    if line[8:9] != b" " or not line.endswith(b"\n") or b"%08x" % zlib.crc32(line[9:-1]) != line[:8]:
        return None
    try:
        value = json.loads(line[9:])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def value_of(result: Result) -> dict[str, Any]:
    """Return the value of a row's record."""
    fields = {name: value for name, value in result.columns().items() if name != "index" and value is not None}
    return {"index": result.index, "result": fields}


def result_of(value: dict[str, Any]) -> Result:
    """Return the Result in the value of a row's record."""
    fields = dict(value["result"])
    if fields.get("samples") is not None:
        fields["samples"] = [Completion(**sample) for sample in fields["samples"]]
    if fields.get("scores") is not None:
        fields["scores"] = [Score(**score) for score in fields["scores"]]
    return Result(value["index"], **fields)


class Journal(AbstractContextManager["Journal"]):
    """The journal at `path`, locked for this process, and created if the file does not exist. Use as a context manager.

    Memory holds nine bytes per row (offset of its last record, and its state), no results. A record is passed to the
    operating system at once, in one write, so kill -9 loses no finished row.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock a journal. Raise InvalidInput if another process has locked it, or the file is no journal."""
        self.path = path
        self._file = _open_locked(path)
        try:
            self._forget()
            # Bytes at the end that recovery dropped, and whether these were a whole record, not one that a kill cut.
            self.dropped_bytes, self.damaged = self._recover()
        except BaseException:
            os.close(self._file)
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        self.manifest: dict[str, Any] | None = None  # None if the journal is new
        # When the job began, in seconds since 1970, and as local time, which chat templates of all runs read.
        self.created, self.began = 0, datetime.now()
        self.settings: dict[str, Any] = {}
        # Rows and bytes of the output file as it was written last; None for none, or if it is about to be replaced.
        self.output: tuple[int, int] | None = None
        self.outdated = False  # whether rows have got results since the output file was written
        self.wrote = False  # whether one was written or was about to be, or the job replaces one of another job
        self._offsets, self._states = array("q"), bytearray()
        self._end = 0
        self._synced = (0, 0.0)  # end of the bytes that this process has synced, and time.monotonic() of the last sync

    def _recover(self) -> tuple[int, bool]:
        size = os.fstat(self._file).st_size
        with open(self._file, "rb", closefd=False) as file:
            head = file.read(9 + len(_MANIFEST))
            file.seek(0)
            digits = all(c in b"0123456789abcdef" for c in head[:8]) and head[8:9] in (b" ", b"")
            if not digits and head[9:] != _MANIFEST:  # recovery would empty it like a damaged journal
                raise InvalidInput(f"{self.path} is no journal of this program; move it away or name another output")
            for line in file:
                value = decode_record(line)
                if value is None or not self._note(value):
                    break
                self._end += len(line)
            file.seek(self._end)
            damaged = file.readline().endswith(b"\n")  # a record that a kill cut short has no newline
        self._truncate()
        self._synced = (self._end, 0.0)
        return size - self._end, damaged

    def _note(self, value: dict[str, Any]) -> bool:
        """Take in the record at `_end`, read or just written. Return False if the first record is no manifest."""
        if self.manifest is None:
            if not isinstance(value.get("manifest"), dict) or not isinstance(value.get("created"), int):
                return False
            self.manifest, self.created = value["manifest"], value["created"]
            local = value.get("local")  # absent in older journals
            self.began = datetime.fromisoformat(local) if local else datetime.fromtimestamp(self.created)
            self.wrote = value.get("replaces") is True
        elif isinstance(output := value.get("output"), list) and len(output) in (0, 2):
            self.output, self.outdated, self.wrote = (output[0], output[1]) if output else None, False, True
        elif isinstance(value.get("settings"), dict):
            self.settings = value["settings"]
        elif isinstance(index := value.get("index"), int) and isinstance(value.get("result"), dict) and index >= 0:
            missing = max(0, index + 1 - len(self._states))
            self._offsets.extend([-1] * missing)
            self._states.extend(bytes(missing))
            failed = value["result"].get("error") is not None
            self._offsets[index], self._states[index] = self._end, FAILED if failed else DONE
            self.outdated = True
        return True

    def restart(self) -> None:
        """Remove all records."""
        self._forget()
        self._truncate()

    def begin(self, manifest: dict[str, Any], created: int, replaces: bool = False) -> None:
        """Write the first record of a new journal.

        Args:
            created: seconds since 1970.
            replaces: whether the job replaces an output file of another job, also if it is continued later.
        """
        value = {"manifest": manifest, "created": created, "local": datetime.fromtimestamp(created).isoformat()}
        self._append(value | ({"replaces": True} if replaces else {}))
        self.sync()
        sync_path(self.path.parent)

    def add(self, result: Result) -> None:
        """Append a finished row. Raise OSError if it cannot be written; earlier records stay valid."""
        self._append(value_of(result))

    def set(self, settings: dict[str, Any]) -> None:
        """Append choices that the engine made and on which results depend. Later runs of the job read `settings`."""
        self._append({"settings": settings})

    def add_output(self, rows: int, nbytes: int) -> None:
        """Append that the output file, of `nbytes` bytes, holds the present results of the first `rows` rows."""
        self._append({"output": [rows, nbytes]})
        self.sync()

    def forget_output(self) -> None:
        """Append that the output file is about to be replaced, so that its size is unknown from now on."""
        if self.output is not None or not self.wrote:
            self._append({"output": []})
            self.sync()

    def state(self, index: int) -> int:
        """Return the state of a row: TODO, DONE or FAILED."""
        return self._states[index] if index < len(self._states) else TODO

    @property
    def rows(self) -> int:
        """Number of rows up to the last one that has a result."""
        return len(self._states)

    def count(self, state: int, rows: int) -> int:
        """Return how many of the first `rows` rows are in a state, DONE or FAILED."""
        return self._states.count(state, 0, rows)

    def finished(self, rows: int, retry_failed: bool = False) -> bytes:
        """Return a byte for each of at most the first `rows` rows: 1 if the row is finished, 0 if it must be run.
        retry_failed: return 0 for failed rows, too."""
        return bytes(self._states[:rows]).translate(_RETRIED if retry_failed else _FINISHED)

    def results(self, rows: Iterable[int]) -> Iterator[Result]:
        """Yield the results of these rows, each read from the file.

        Raises:
            RuntimeError: a row has no result.
            OSError: the file has changed since it was written.
        """
        with open(self._file, "rb", closefd=False) as file:
            for index in rows:
                if self.state(index) == TODO:
                    raise RuntimeError(f"row {index} was never finished")
                file.seek(self._offsets[index])
                value = decode_record(file.readline())
                if value is None or value.get("index") != index:
                    raise OSError(errno.EIO, f"the record of row {index} has changed since it was written")
                yield result_of(value)

    def sync(self, at_once: bool = True) -> None:
        """Sync all records to the disk. at_once: False syncs only if the last sync was SYNC_SECONDS ago: a sync
        takes longer than a sweep of a small model, and only a crash of the machine can lose unsynced records."""
        if self._end > self._synced[0] and (at_once or time.monotonic() - self._synced[1] >= SYNC_SECONDS):
            end = self._end
            os.fsync(self._file)
            self._synced = (end, time.monotonic())

    def close(self) -> None:
        """Sync and unlock the journal. Delete the file if it has no manifest."""
        try:
            if self.manifest is None:
                self.path.unlink(missing_ok=True)
            else:
                self.sync()
        finally:
            os.close(self._file)

    def _append(self, value: dict[str, Any]) -> None:
        line, written = encode_record(value), 0
        try:
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._end + written)
        except OSError:
            self._truncate()  # remove the incomplete record
            raise
        self._note(value)
        self._end += len(line)

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
    """Lock an open journal. Return False if another process has removed the file since it was opened. Raise
    InvalidInput if another process has locked the journal, or the file is not a plain file."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise InvalidInput(f"journal {path} is not a plain file; move it away or name another output")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fault = f"{_owner(file)} is writing this output already ({path} is locked)"
        raise InvalidInput(f"{fault}; wait for it or name another output") from None
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _owner(file: int) -> str:
    """Return the process that holds the lock, as text: its id if /proc/locks lists it, else "another process"."""
    inode = os.fstat(file).st_ino
    try:
        for words in map(str.split, Path("/proc/locks").read_text().splitlines()):
            if words[1:2] == ["FLOCK"] and words[5].endswith(f":{inode}"):
                return f"process {words[4]}"
    except (OSError, IndexError):
        pass
    return "another process"
