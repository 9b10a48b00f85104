"""A job of a file: rows are run, results go to the journal, and the manifest is that with which runs are compared.

`flexengine run` opens the job before it opens the engine, so that a wrong input or output is refused at once.
`Engine.run_job` opens the job on an engine that is open. From there on both, and fleets, use `FileJob`. The input is
read once when the job is opened (counts and digest), once when its rows are run, and once when the output is written.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from flexengine.activity import activity, message
from flexengine.config import Result
from flexengine.engine.summary import JobCounts
from flexengine.job.resume import JobStore
from flexengine.job.rows import Row
from flexengine.job.same_job import Manifest


class RowRunner(Protocol):
    """Computes the rows of a job: one engine, or a fleet."""

    def open(self, store: JobStore) -> str:
        """Check whether the job's rows can be run, and return the name of the model."""

    def manifest(self, store: JobStore, known: Manifest) -> Manifest:
        """Return the job's manifest. known: that of the run that began the job; empty if there was none."""

    def take_over(self, store: JobStore) -> None:
        """Use the choices of the run that began the job."""

    def results(self, store: JobStore, rows: Iterable[Row]) -> Iterator[Result]:
        """Yield the results of rows, without their prompts. The caller stores each before it takes the next one."""

    def summary(self, counts: JobCounts, ran: bool) -> Any:
        """Return the summary of the run. ran: whether rows were run."""


class FileJob:
    """Runs the rows of a job that have no result yet.

    Attributes:
        ran: whether rows were run.

    Args:
        store: an open job. Its messages, and those of this class, go to the listener of the caller's context.
    """

    def __init__(self, runner: RowRunner, store: JobStore) -> None:
        self.runner, self.store = runner, store
        self._rows: Iterable[Row] = ()
        self.ran = False

    def run(self) -> Any:
        """Run the rows that remain, write the output file, and return the runner's summary."""
        self.begin()
        for _ in self.results():
            pass
        return self.end()

    def begin(self) -> bool:
        """Compare this run with the run that began the job, and use its choices. Return whether rows remain.

        Raises:
            InvalidInput: the job has another manifest, the output file has been changed, or the rows are to be run
                as messages and the model has no chat template.
            OutOfMemory: no row fits into memory.
        """
        runner, store = self.runner, self.store
        self._say_note()
        model = runner.open(store)
        self._rows = store.begin(lambda known: runner.manifest(store, known), model)
        self._say_note()
        if store.resumed:
            message(f"{store.resumed} of {store.total} rows were done before")
        if not self._rows or not store.total:
            return False
        runner.take_over(store)
        return True

    def results(self) -> Iterator[Result]:
        """Run the rows that remain. Yield every result after it was stored, without its prompt."""
        if not self._rows or not self.store.total:
            return
        self.ran = True
        for result in self.runner.results(self.store, self._rows):
            self.store.take(result)
            yield result

    def end(self) -> Any:
        """Write the output file, and return the runner's summary. The engine may be closed before."""
        store = self.store
        if not store.finished:
            with activity("writing", "writing the results", store.total, "rows"):
                store.end()
        return self.runner.summary(JobCounts(store.total, store.done, store.failed, store.resumed), self.ran)

    def _say_note(self) -> None:
        if note := self.store.take_note():
            message(note)
