"""A job and its results: the rows that remain to be run, the journal, the output file, and resuming."""

import errno
import hashlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from flexengine.activity import activity, advance, message
from flexengine.config import Result
from flexengine.errors import InvalidInput, size
from flexengine.job.files import descriptor, explained, file_state, full_disk, size_of, whole_file, whole_stdout
from flexengine.job.inputs import InputRows
from flexengine.job.journal import DONE, FAILED, Journal
from flexengine.job.manifest import INPUT_DIGEST, Manifest
from flexengine.job.results import Encode, journal_path, line_encoder
from flexengine.job.rows import Row

Describe = Callable[[Manifest], Manifest]
_STEP = 2**20
_OTHER_WRITER = "has been written by another program while the job ran; rename it"
_INPUT_CHANGED = "the input has changed while the job ran; restore it"


class PendingRows:
    """The rows that remain to be run, in order. They can be iterated as often as `rows`. finished: one byte per row, 0
    if the row must be run. Rows beyond its end must be run. readers: how many read the input at the same time."""

    def __init__(self, rows: InputRows, finished: bytes, readers: int = 1) -> None:
        self._rows, self._finished, self._readers = rows, finished, readers

    @property
    def reading(self) -> int:
        """Most bytes of memory that reading took so far, by all readers."""
        return self._readers * self._rows.reading

    def __iter__(self) -> Iterator[Row]:
        return (row for row in self._rows if row.index >= len(self._finished) or not self._finished[row.index])


class JobStore(AbstractContextManager["JobStore"]):
    """A job of a file: its rows, and where their results are stored or printed. Use as a context manager."""

    def __init__(self, rows: InputRows) -> None:
        self.rows, self.total = rows, rows.scan().total  # this reads the input once, unless it has been scanned
        # Set by `begin`: rows that had a result when the job was resumed; whether all have one and the output file is
        # written; local time at which the job's first run began.
        self.resumed, self.finished, self.began = 0, False, datetime.now()

    @property
    @abstractmethod
    def done(self) -> int:
        """Rows that have a result without an error."""

    @property
    @abstractmethod
    def failed(self) -> int:
        """Rows that have a result with an error."""

    @abstractmethod
    def begin(self, describe: Describe, model: str) -> Iterable[Row]:
        """Return the rows to run. describe: return the job's manifest, given the manifest of the run that began the
        job, which is empty if there was none. Raise InvalidInput if the journal is of a job with another manifest, or
        the output file has been changed."""

    @abstractmethod
    def take(self, result: Result) -> None:
        """Store or print the result of a row. Raise OSError if it cannot be written."""

    @abstractmethod
    def standing(self) -> str:
        """Return the message for an interrupted job."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that `save_settings` stored first, in this or an earlier run; {} if there are none."""
        return {}

    def save_settings(self, settings: dict[str, Any]) -> None:
        """Store choices of the engine that all results of the job must share, unless settings are stored already.
        Called before the first result."""

    def save(self, at_once: bool = True) -> None:
        """Sync all results so far to the disk. at_once: False syncs only if the last sync was at least SYNC_SECONDS
        ago."""

    def end(self) -> None:
        """Write the output file. Called when every row has a result."""


class PrintedJob(JobStore):
    """A job whose results go to stdout, a device or a pipe. It has no journal and cannot be resumed.

    Results come in any order. Each is written as soon as all earlier rows are written. The rows are iterated meanwhile,
    so that memory holds only results that wait for an earlier row. output: a device or pipe; None is stdout.
    """

    def __init__(self, rows: InputRows, output: str | os.PathLike[str] | None = None) -> None:
        super().__init__(rows)
        self._output, self._in_order = output, iter(rows)
        self._waiting: dict[int, Result] = {}
        self._next = self._failed = 0

    @property
    def done(self) -> int:
        return self._next + len(self._waiting) - self._failed

    @property
    def failed(self) -> int:
        return self._failed

    def __enter__(self) -> "PrintedJob":
        if self._output is None:
            self._file: BinaryIO = whole_stdout()
            return self
        try:
            number = descriptor(self._output)  # opening an open file by name would begin it anew, and empty it
            self._file = open(self._output if number is None else os.dup(number), "wb")
        except OSError as error:
            raise InvalidInput(f"output {self._output} cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._output is None:
                self._file.flush()
            else:
                self._file.close()
        except OSError:
            if kind is None:
                raise  # else the first error is the one to report
        if kind is None and self._next != self.total:
            raise RuntimeError(f"row {self._next} of {self.total} was never finished")

    def begin(self, describe: Describe, model: str) -> Iterable[Row]:
        self._encode = line_encoder(model, int(time.time()))
        return PendingRows(self.rows, b"", readers=2)

    def take(self, result: Result) -> None:
        if result.index < self._next or result.index in self._waiting:
            raise RuntimeError(f"row {result.index} was finished twice")
        self._waiting[result.index] = result
        self._failed += result.error is not None
        try:
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._file.write(self._encode(next(self._in_order), ready))
                self._next += 1
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            remedy = "free space there, or name a plain file as output, whose job can be continued"
            reason = f"results cannot be written ({error.strerror}); {remedy}"
            raise OSError(error.errno, reason, self._output or "stdout") from error

    def standing(self) -> str:
        ended = self.done + self.failed
        return f"interrupted: {ended} of {self.total} rows were done; with --output they would have been stored"


class JournalJob(JobStore):
    """A job whose results go to a journal beside the output file. The output file is written at the end.

    The journal stays. If the same command is run again, it does nothing if the job is finished, writes a lost output
    file again without computing, and runs further rows if the limit is larger. Arguments as for `open_job`. Raise
    InvalidInput if another process writes this output, or the output file exists but its journal does not.
    """

    def __init__(
        self, rows: InputRows, output: str | os.PathLike[str], path: Path, restart: bool = False, retry: bool = False
    ) -> None:
        super().__init__(rows)
        self._output, self._restart, self._retry, self._model = output, restart, retry, ""
        self._seen: tuple[int, ...] | None = None  # the output file when the job began
        if os.path.exists(output) and not path.exists() and not restart:
            fault = f"output {output} exists and would be replaced; name another output"
            raise InvalidInput(f"{fault}, or give --restart (restart=True in Python) to replace it")
        self.journal = Journal(path)
        if self.journal.damaged and not restart:
            again = "their rows are run again" if self.journal.manifest else "the job starts over"
            try:
                message(f"journal {path} was damaged: {size(self.journal.dropped_bytes)} at its end dropped, {again}")
            except BaseException:  # of a listener
                self.journal.close()
                raise

    @property
    def done(self) -> int:
        return self.journal.count(DONE, self.total)

    @property
    def failed(self) -> int:
        return self.journal.count(FAILED, self.total)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._explained():
                self.journal.close()
        except OSError:
            if kind is None:
                raise  # else the first error is the one to report

    def begin(self, describe: Describe, model: str) -> Iterable[Row]:
        journal = self.journal
        manifest = describe({} if self._restart else journal.manifest or {})
        if self._restart:
            journal.restart()
        if journal.manifest is None:
            replaces = self._restart and os.path.exists(self._output)
            with explained(journal.path):
                journal.begin(manifest, int(time.time()), replaces)
        else:
            from flexengine.job.same_job import check_same, rewritten  # most jobs are not resumed

            check_same(journal.manifest, manifest, journal.path)
            if names := rewritten(journal.manifest, manifest):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                message(
                    f"model file {names[0]}{more} was written since the job began; its size and samples of its contents"
                    " are the same, so the job continues; --verify (verify=True in Python) compares all contents"
                )
        self.began = journal.began
        self._model = (journal.manifest or {}).get("model", model)  # the first run's, as an output has one model name
        self._seen = file_state(self._output)
        size = None
        if self._seen is not None:
            size = self._seen[0]
            self._check_longer()
            self._check_own(size)
        finished = journal.finished(self.total, self._retry)
        self.resumed = finished.count(1)
        whole = self.resumed == self.total
        self.finished = whole and not journal.outdated and journal.output == (self.total, size)
        return () if whole else PendingRows(self.rows, finished)

    def _check_own(self, size: int) -> None:
        """Raise InvalidInput if the output file, of `size` bytes, was not written by this job, or was edited since."""
        journal = self.journal
        if not journal.wrote and not journal.damaged:
            fault = f"output {self._output} exists, but this job has not written it"
            raise InvalidInput(f"{fault}; rename it, and the same command writes the job's output")
        if journal.output and size != journal.output[1] and not self._is_cut_short(journal.output[0]):
            fault = f"output {self._output} has {size:,} bytes, not the {journal.output[1]:,} that the job wrote"
            raise InvalidInput(f"{fault}; rename it, and the same command writes it again")

    def _check_longer(self) -> None:
        """Raise InvalidInput if the output file has more rows than this job will write."""
        if self._restart or self.journal.rows <= self.total:
            return
        with open(self._output, "rb") as file:
            rows = sum(block.count(b"\n") for block in iter(lambda: file.read(_STEP), b""))
        if rows > self.total:
            raise InvalidInput(
                f"output {self._output} has {rows} rows, and would be replaced by the first {self.total}; raise --limit"
                " (limit in Python) or leave it out, or rename the output, and the same command writes these rows from"
                " the journal"
            )

    def _is_cut_short(self, rows: int) -> bool:
        """Return whether the output file is a beginning of the output of the first `rows` rows."""
        encode = self._encoder()
        with open(self._output, "rb") as file:
            for row, result in zip(islice(self.rows, rows), self.journal.results(range(rows)), strict=False):
                line = encode(row, result)
                if (part := file.read(len(line))) != line:
                    return line.startswith(part)  # true only if the file ends within this line
            return not file.read(1)

    def _encoder(self) -> Encode:
        return line_encoder(self._model, self.journal.created)

    def take(self, result: Result) -> None:
        with self._explained():
            self.journal.add(result)

    @property
    def settings(self) -> dict[str, Any]:
        return self.journal.settings

    def save_settings(self, settings: dict[str, Any]) -> None:
        if not self.journal.settings:
            with self._explained():
                self.journal.set(settings)

    def save(self, at_once: bool = True) -> None:
        with self._explained():
            self.journal.sync(at_once)

    def end(self) -> None:
        digest, encode = hashlib.sha256(), self._encoder()
        with self._explained():
            if self.rows.changed:
                raise OSError(errno.ESTALE, _INPUT_CHANGED)
            if file_state(self._output) not in (None, self._seen):
                raise OSError(errno.EEXIST, f"output {self._output} {_OTHER_WRITER}")
            results = self.journal.results(range(self.total))
            with whole_file(self._output) as file:
                for row, result in zip(self.rows.hashed(digest), results, strict=True):
                    file.write(encode(row, result))
                    advance()
                if digest.hexdigest() != (self.journal.manifest or {}).get(INPUT_DIGEST):
                    raise OSError(errno.ESTALE, _INPUT_CHANGED)
                self.journal.forget_output()
            self.journal.add_output(self.total, os.path.getsize(self._output))

    def standing(self) -> str:
        return f"interrupted: {self._remedy()}; rows that were under way begin anew"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add what to free on a full disk, and the command that continues the job, to the message of an OSError."""
        try:
            yield
        except OSError as error:
            journal, finished = self.journal.path, self.done + self.failed
            # What the rest of the journal and the output file take. An output line holds the fields of its row, too.
            record = size_of(journal) // max(1, finished)
            needed = record * (2 * self.total - finished) + self.rows.size
            full = full_disk(error, journal.parent, needed, journal)
            message = f"{error.strerror}: {full}" if full else error.strerror
            raise OSError(error.errno, f"{message}; {self._remedy()}", str(self._output)) from error

    def _remedy(self) -> str:
        """Return how many rows are done and which command continues the job."""
        command = "the same command without --restart (restart=True in Python)" if self._restart else "the same command"
        return f"{self.done + self.failed} of {self.total} rows are done; run {command} again to continue"


def open_job(
    rows: InputRows, output: str | os.PathLike[str] | None, restart: bool = False, retry_errors: bool = False
) -> JobStore:
    """Return the job of an input file, with its journal open if the output is a plain file. No model is needed. Raise
    InvalidInput if OpenAI batch lines share a custom_id, an argument needs a journal, another process writes this
    output, or the output file exists but its journal does not.

    Args:
        output: a file, device or pipe; None is stdout.
        restart: delete the results of earlier runs.
        retry_errors: run failed rows again.
    """
    with activity("reading", f"reading {rows.path}", unit="rows"):
        rows.scan()
    if output is not None and (path := journal_path(output)) is not None:
        return JournalJob(rows, output, path, restart, retry_errors)
    if restart or retry_errors:
        option = "--restart (restart=True in Python)" if restart else "--retry-errors (retry_errors=True in Python)"
        raise InvalidInput(f"{option} needs an output (--output) that is a plain file, which has a journal; name one")
    return PrintedJob(rows, output)
