"""A job from its first row to its output: what is still to be run, where results go, when it is finished."""

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import TracebackType
from typing import Any

from flexengine.config import Result
from flexengine.errors import InvalidInput
from flexengine.job.inputs import Rows
from flexengine.job.journal import DONE, FAILED, Journal
from flexengine.job.manifest import INPUT_DIGEST, Manifest, check_same, rewritten
from flexengine.job.results import Encode, ResultWriter, journal_path, line_encoder, write_output
from flexengine.job.rows import Row

Describe = Callable[[Manifest], Manifest]


class Pending:
    """The rows still to be run, in order; may be read any number of times, as `rows` may.

    settled: one byte per row, 0 for a row that is to be run; rows beyond its end are. It must not change any more.
    """

    def __init__(self, rows: Iterable[Row], settled: bytes) -> None:
        self._rows, self._settled = rows, settled

    def __iter__(self) -> Iterator[Row]:
        return (row for row in self._rows if row.index >= len(self._settled) or not self._settled[row.index])


class Job(ABC):
    """Where the results of a job of `total` rows go. Use as a context manager.

    done, failed: rows that have a result, without and with an error. resumed: how many had one at the start.
    finished: there is nothing to do, not even an output file to be put together.
    note: what to tell people, at the start and after `begin`; empty if nothing.
    """

    def __init__(self, rows: Rows, total: int) -> None:
        self.rows, self.total = rows, total
        self.resumed, self.finished, self.note = 0, False, ""

    @property
    @abstractmethod
    def done(self) -> int: ...

    @property
    @abstractmethod
    def failed(self) -> int: ...

    def __enter__(self) -> "Job":
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def begin(self, describe: Describe, model: str) -> Iterable[Row]:
        """Return the rows to run.

        Args:
            describe: gives the job's manifest from that of the run that began it, which is empty if there was none.
            model: the name that OpenAI batch lines carry.

        Raises:
            InvalidInput: results of an earlier run belong to another manifest, or its output has been changed.
        """

    @abstractmethod
    def take(self, result: Result) -> None:
        """Keeps the result of a row. Raises OSError if it cannot be written."""

    @abstractmethod
    def standing(self) -> str:
        """What to tell people when the job is interrupted."""

    @property
    def settings(self) -> dict[str, Any]:
        """What `keep` was told first, in this run or an earlier one; empty if nothing."""
        return {}

    def keep(self, settings: dict[str, Any]) -> None:  # noqa: B027 - nothing to do where nothing is kept
        """Choices of the engine that all results of the job are to share, told before the first of them."""

    def save(self, at_once: bool = True) -> None:  # noqa: B027
        """Puts all results so far on the disk; unless `at_once`, only if that has not been done for a while."""

    def end(self) -> None:  # noqa: B027
        """To be called when every row has a result: puts the output in place."""


class PrintedJob(Job):
    """Results go to stdout (output None), a device or a pipe, in input order. Nothing is kept to go on from."""

    def __init__(self, rows: Rows, total: int, output: str | None = None) -> None:
        super().__init__(rows, total)
        self._writer = ResultWriter(rows, output)

    @property
    def done(self) -> int:
        return self._writer.done

    @property
    def failed(self) -> int:
        return self._writer.failed

    def __enter__(self) -> "PrintedJob":
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)
        if kind is None and self.done + self.failed != self.total:
            raise RuntimeError(f"{self.total} rows came in, {self.done + self.failed} results out")

    def begin(self, describe: Describe, model: str) -> Iterable[Row]:
        self._writer.encode = line_encoder(model, int(time.time()))
        return self.rows

    def take(self, result: Result) -> None:
        self._writer.write(result)

    def standing(self) -> str:
        return f"interrupted: {self.done + self.failed} of {self.total} rows were done; --output would have kept them"


class KeptJob(Job):
    """Results go to a journal beside the output file, which is put in place at the end.

    The journal stays: the same command does nothing then, a lost output is put together again without computing, a
    larger limit goes on, and failed rows can be run again (retry_errors). restart: drop what earlier runs left.

    Raises InvalidInput if another process writes this output, or the output is there but its journal is not.
    """

    def __init__(
        self, rows: Rows, total: int, output: str | os.PathLike[str], restart: bool = False, retry_errors: bool = False
    ) -> None:
        super().__init__(rows, total)
        path = journal_path(output)
        if path is None:
            raise InvalidInput(f"output {output} is a device or a pipe; only a plain file can have a journal")
        self._output, self._restart, self._retry, self._model = output, restart, retry_errors, ""
        if os.path.exists(output) and not path.exists() and not restart:
            raise InvalidInput(
                f"output {output} exists and would be replaced; name another --output, or --restart to replace it"
            )
        self.journal = Journal(path)
        if self.journal.dropped.damaged and not restart:
            again = "their rows are run again" if self.journal.manifest else "the job starts over"
            self.note = f"journal {path} was damaged: {self.journal.dropped.bytes:,} bytes at its end dropped, {again}"

    @property
    def done(self) -> int:
        return self.journal.count(DONE, self.total)

    @property
    def failed(self) -> int:
        return self.journal.count(FAILED, self.total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close()

    def begin(self, describe: Describe, model: str) -> Iterable[Row]:
        journal = self.journal
        manifest = describe({} if self._restart else journal.manifest or {})
        if self._restart:
            journal.restart()
        if journal.manifest is None:
            journal.begin(manifest, int(time.time()))
        else:
            check_same(journal.manifest, manifest, journal.path)
            self._compare_times(journal.manifest, manifest)
        self._model = (journal.manifest or {}).get("model", model)  # that of the first run, for one output has one
        there = os.path.getsize(self._output) if os.path.exists(self._output) else None
        if journal.output and there not in (None, journal.output[1]) and not self._is_cut_short(journal.output[0]):
            raise InvalidInput(f"output {self._output} has {there:,} bytes, not the {journal.output[1]:,} that the job"
                               " wrote; rename it, and the same command writes it again")  # fmt: skip
        settled = journal.settled(self.total, self._retry)
        self.resumed = settled.count(1)
        whole = self.resumed == self.total
        self.finished = whole and journal.output == (self.total, there)
        return () if whole else Pending(self.rows, settled)

    def _is_cut_short(self, rows: int) -> bool:
        """Return whether the output file is the beginning of the output of the first `rows` rows."""
        encode = self._encoder()
        with open(self._output, "rb") as file:
            for row, result in zip(islice(self.rows, rows), self.journal.results(range(rows)), strict=False):
                line = encode(row, result)
                if (found := file.read(len(line))) != line:
                    return line.startswith(found)  # shorter, so the file ends there
            return not file.read(1)

    def _encoder(self) -> Encode:
        return line_encoder(self._model, self.journal.created)

    def _compare_times(self, was: Manifest, now: Manifest) -> None:
        if names := rewritten(was, now):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.note = (f"model file {names[0]}{more} was written since the job began; its size and samples of its"
                         " contents are the same, so the job goes on; --verify compares all of them")  # fmt: skip

    def take(self, result: Result) -> None:
        with self._explained():
            self.journal.add(result)

    @property
    def settings(self) -> dict[str, Any]:
        return self.journal.settings

    def keep(self, settings: dict[str, Any]) -> None:
        if not self.journal.settings:
            with self._explained():
                self.journal.set(settings)

    def save(self, at_once: bool = True) -> None:
        with self._explained():
            if at_once:
                self.journal.sync()
            else:
                self.journal.sync_if_due()

    def end(self) -> None:
        manifest = self.journal.manifest or {}
        if self.rows.sha256() != manifest.get(INPUT_DIGEST):
            raise OSError(errno.ESTALE, f"the input has changed while the job ran; put it back; {self._kept()}")
        with self._explained():
            self.journal.forget_output()
            write_output(self._output, self.rows, self.journal.results(range(self.total)), self._encoder())
            self.journal.add_output(self.total, os.path.getsize(self._output))

    def standing(self) -> str:
        return f"interrupted: {self._kept()}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """An error of the disk comes with how to go on."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {self._kept()}", str(self._output)) from error

    def _kept(self) -> str:
        command = "the same command without --restart" if self._restart else "the same command"
        return f"{self.done + self.failed} of {self.total} rows are done; run {command} again to go on"
