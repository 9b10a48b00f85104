"""A job of a file: rows run on an engine, results go to the journal, and the manifest with which runs are compared.

`flexengine run` opens the job before it opens the engine, so that a wrong input or output is refused at once.
`Engine.run_job` opens the job on an engine that is open. From there on both use `FileJob`.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexengine import __version__
from flexengine.activity import activity, message
from flexengine.config import Result, SamplingParams
from flexengine.engine.generating import JobRows
from flexengine.engine.state import Progress
from flexengine.engine.summary import JobCounts, Summary
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.job.resume import Job
from flexengine.job.rows import Row
from flexengine.job.same_job import CHAT, INPUT_DIGEST, MODEL_FILES, SCORE, Manifest, make_manifest
from flexengine.lossy import Lossy
from flexengine.plan.least import SHORTEST

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
        engine.reader.check_rows(job.rows)
        self._rows = job.begin(self._manifest, engine.core.source.name)
        self._say_note()
        if job.resumed:
            message(f"{job.resumed} of {job.total} rows were done before")
        if not self._rows or not job.total:
            return False
        if engine.options.allow and (chosen := job.settings.get("lossy")) is not None:
            engine.use(Lossy(**chosen))
            self._check_cache(job.settings.get("cache", ""))
        self._check_importances(job.settings.get("importances"))
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
                importances = engine.calibrator.importances
                fitted = {"importances": importances.digest} if importances is not None else {}
                chosen = {"lossy": engine.lossy.enabled, "cache": engine.core.cache_form}
                job.save_settings({"prefill_tokens": engine.layout.policy.prefill_tokens} | chosen | fitted)
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
        planner, began = self.engine.planner, self.job.settings.get("prefill_tokens")
        policy, tokens = planner.policy, planner.prefill_tokens
        if planner.keep_prefill(began):
            message(f"prefill_tokens stays {began}, with which the job began")
        try:
            yield
        finally:
            planner.policy, planner.prefill_tokens = policy, tokens

    def _check_cache(self, began: str) -> None:
        """Raise InvalidInput if the cache format that the planner chose has changed since the job began. A format that
        the user gave is compared with the manifest instead."""
        if began and began != (now := self.engine.core.cache_form):
            raise InvalidInput(f"this job chose a cache of {began}, which is {now} now; give --restart"
                               " (restart=True in Python) to run the job again")  # fmt: skip

    def _check_importances(self, began: str | None) -> None:
        """Raise InvalidInput if the job began with other importances: they were deleted from the cache, and measuring
        them again gave other numbers."""
        if began is None or (current := self.engine.calibrator.importances) is None or current.digest == began:
            return
        raise InvalidInput(f"this job began with weights calibrated to {began}, but the cache no longer has these"
                           f" importances, and calibrating again, with other memory or libraries, gave"
                           f" {current.digest}; give --restart (restart=True in Python) to run the job"
                           " again")  # fmt: skip

    def _manifest(self, known: Manifest) -> Manifest:
        """Return the job's manifest.

        Args:
            known: manifest of the run that began the job; empty if there was none.
        """
        engine, rows, allow = self.engine, self.job.rows, self.engine.options.allow
        engine.choose_bits()
        if not known and not allow:
            self._check_memory()
        given: dict[str, Any] = {"input": rows.path.name, INPUT_DIGEST: rows.sha256(), "input_format": rows.form,
                                 "prompt_column": rows.prompt_column, "output_format": "jsonl"}  # fmt: skip
        if rows.chat:
            given[CHAT] = True
        if rows.score:
            given[SCORE] = True
        made = {"version": __version__, **engine.fingerprint(known.get(MODEL_FILES, {}))}
        lossy = {"allow": sorted(allow)} if allow else engine.switches
        return make_manifest(self.params, given, made, lossy)

    def _check_memory(self) -> None:
        """Raise OutOfMemory, before all files of the model are hashed for the manifest, if not even a row of one prompt
        token and one generated token fits."""
        engine = self.engine
        try:
            engine.planner.check(SHORTEST)
        except OutOfMemory:
            if (workload := engine.reader.survey(self.job.rows, self.params)).count:
                engine.planner.check(workload)  # its message says what these rows need
