"""A job of a file: rows run on an engine, results go to the journal, and the manifest with which runs are compared.

`flexengine run` opens the job before it opens the engine, so that a wrong input or output is refused at once.
`Engine.run_job` opens the job on an engine that is open. From there on both use `FileJob`.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flexengine.activity import activity, message
from flexengine.config import Result, SamplingParams
from flexengine.engine.agreement import (
    PREFILL_TOKENS,
    engine_part,
    manifest,
    settings_of,
    switches_part,
    take_over,
)
from flexengine.engine.generating import JobRows
from flexengine.engine.state import Progress
from flexengine.engine.summary import JobCounts, Summary
from flexengine.errors import OutOfMemory
from flexengine.job.resume import Job
from flexengine.job.rows import Row
from flexengine.job.same_job import Manifest
from flexengine.plan.min_memory import SHORTEST

if TYPE_CHECKING:  # it imports torch, which is not needed here
    from flexengine.engine.base import BaseEngine


class FileJob:
    """Runs the rows of a job that have no result yet.

    Attributes:
        ran: whether rows were run.
    """

    def __init__(self, engine: "BaseEngine", job: Job, params: SamplingParams) -> None:
        """Run a job on an engine.

        Args:
            job: an open job. Its messages, and those of this class, go to the listener of the caller's context.
            params: sampling parameters of rows without fields of these names.
        """
        self.engine, self.job, self.params = engine, job, params
        self._rows: Iterable[Row] = ()
        self.ran = False

    def run(self) -> Summary:
        """Run the rows that remain, write the output file, and return the summary. Raise as `Engine.run_job`."""
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
        engine, job = self.engine, self.job
        self._say_note()
        engine.reader.check(self.params)
        engine.reader.check_chat(job.rows.chat)
        self._rows = job.begin(self._manifest, engine.core.source.name)
        self._say_note()
        if job.resumed:
            message(f"{job.resumed} of {job.total} rows were done before")
        if not self._rows or not job.total:
            return False
        take_over(engine, job.settings)
        return True

    def results(self) -> Iterator[Result]:
        """Run the rows that remain. Yield every result after it was stored, without its prompt."""
        if not self._rows or not self.job.total:
            return
        self.ran = True
        rows = JobRows(self.job.total, self.job.done, self.job.resumed - self.job.done)
        stream = self.engine.results(self._rows, self.params, rows)
        with self._saving(), self._same_cuts(), contextlib.closing(stream):
            for result in stream:
                result.prompt = None  # the output has the row's own fields, and a job without a journal keeps results
                self.job.take(result)
                yield result

    def end(self) -> Summary:
        """Write the output file, and return the summary. The engine may be closed before."""
        job, engine = self.job, self.engine
        if not job.finished:
            with activity("writing", "writing the results", job.total, "rows"):
                job.end()
        counts = JobCounts(job.total, job.done, job.failed, job.resumed)
        return replace(engine.summary if self.ran else engine.core.empty_summary(), job=counts)

    def _say_note(self) -> None:
        if note := self.job.take_note():
            message(note)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Return a context manager in which results are synced to the disk after sweeps, before the engine's own
        `on_sweep` is called."""
        engine, job = self.engine, self.job
        own = engine.on_sweep

        def sweep_ended(progress: Progress) -> None:
            if engine.layout is not None:
                job.save_settings(settings_of(engine, engine.layout.policy.prefill_tokens))
            job.save(at_once=False)
            if own is not None:
                own(progress)

        engine.on_sweep = sweep_ended
        try:
            yield
        finally:
            engine.on_sweep = own

    @contextlib.contextmanager
    def _same_cuts(self) -> Iterator[None]:
        """Return a context manager in which prompts are cut as the run that began the job cut them: the last bits of a
        prompt's KV depend on the cuts."""
        planner, began = self.engine.planner, self.job.settings.get(PREFILL_TOKENS)
        policy, tokens = planner.policy, planner.prefill_tokens
        if planner.keep_prefill(began):
            message(f"prefill_tokens stays {began}, with which the job began")
        try:
            yield
        finally:
            planner.policy, planner.prefill_tokens = policy, tokens

    def _manifest(self, known: Manifest) -> Manifest:
        """Return the job's manifest.

        Args:
            known: manifest of the run that began the job; empty if there was none.
        """
        engine = self.engine
        engine.choose_bits()
        if not known and not engine.options.allow:
            self._check_memory()
        return manifest(self.job.rows, self.params, engine_part(engine, known), switches_part(engine))

    def _check_memory(self) -> None:
        """Raise OutOfMemory, before all files of the model are hashed for the manifest, if not even a row of one prompt
        token and one generated token fits."""
        engine = self.engine
        try:
            engine.planner.check(SHORTEST)
        except OutOfMemory:
            if (workload := engine.reader.survey(self.job.rows, self.params)).count:
                engine.planner.check(workload)  # its message says what these rows need
