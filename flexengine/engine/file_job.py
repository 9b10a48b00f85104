"""A job of a file: rows are run, results go to the journal, and the manifest is that with which runs are compared.

`flexengine run` opens the job before it opens the engine, so that a wrong input or output is refused at once.
`Engine.run_job` opens the job on an engine that is open. From there on both, and fleets, use `FileJob`. The input is
read once when the job is opened (counts and digest), once when its rows are run, and once when the output is written.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from flexengine.activity import activity, message, reporting
from flexengine.config import Result, SamplingParams
from flexengine.engine.agreement import PREFILL_TOKENS, engine_part, manifest, settings_of, switches_part, take_over
from flexengine.engine.state import Progress
from flexengine.engine.summary import JobCounts, Summary
from flexengine.engine.sweep_reports import JobRows
from flexengine.errors import OutOfMemory
from flexengine.job.inputs import InputRows
from flexengine.job.overwrite import check_not_overwritten
from flexengine.job.results import check_output, files_beside
from flexengine.job.resume import JobStore, open_job
from flexengine.job.rows import Row
from flexengine.job.same_job import Manifest
from flexengine.job.source import FORMATS
from flexengine.job.streams import STDIN
from flexengine.plan.min_memory import SHORTEST
from flexengine.records import Limit, check_argument

if TYPE_CHECKING:
    from flexengine.engine.session import Session  # imports torch, which a job that is finished does not need


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


class EngineRunner:
    """Computes the rows of a job with one engine; see `RowRunner`.

    Args:
        params: sampling parameters of rows without fields of these names.
    """

    def __init__(self, engine: "Session", params: SamplingParams) -> None:
        self.engine, self.params = engine, params

    def open(self, store: JobStore) -> str:
        reader = self.engine.reader
        reader.check(self.params)
        reader.check_chat(store.rows.chat)
        return self.engine.core.source.name

    def manifest(self, store: JobStore, known: Manifest) -> Manifest:
        engine = self.engine
        engine.choose_bits()
        if not known and not engine.options.allow:
            try:  # before all files of the model are hashed: not even one prompt token and one generated token may fit
                engine.planner.check(SHORTEST)
            except OutOfMemory:
                if (workload := engine.reader.survey(store.rows, self.params)).count:
                    engine.planner.check(workload)  # its message says what these rows need
        return manifest(store.rows, self.params, engine_part(engine, known), switches_part(engine))

    def take_over(self, store: JobStore) -> None:
        take_over(self.engine, store.settings)

    def results(self, store: JobStore, rows: Iterable[Row]) -> Iterator[Result]:
        counts = JobRows(store.total, store.done, store.resumed - store.done, with_prompts=False)
        stream = self.engine.results(rows, self.params, counts)
        with self._saving(store), self._same_cuts(store.settings.get(PREFILL_TOKENS)), contextlib.closing(stream):
            yield from stream

    def summary(self, counts: JobCounts, ran: bool) -> Summary:
        return replace(self.engine.summary if ran else self.engine.core.empty_summary(), job=counts)

    @contextlib.contextmanager
    def _saving(self, store: JobStore) -> Iterator[None]:
        """Return a context manager in which results are synced to the disk after sweeps, before the engine's own
        `on_sweep` is called."""
        engine = self.engine
        on_sweep = engine.on_sweep

        def sweep_ended(progress: Progress) -> None:
            if engine.layout is not None:
                store.save_settings(settings_of(engine, engine.layout.policy.prefill_tokens))
            store.save(at_once=False)
            if on_sweep is not None:
                on_sweep(progress)

        engine.on_sweep = sweep_ended
        try:
            yield
        finally:
            engine.on_sweep = on_sweep

    @contextlib.contextmanager
    def _same_cuts(self, tokens: int | None) -> Iterator[None]:
        """Return a context manager in which prompts are cut as the run that began the job cut them: the last bits of a
        prompt's KV depend on the cuts. tokens: most tokens of a prefill chunk; None if the job begins now."""
        planner = self.engine.planner
        before = planner.policy, planner.prefill_tokens
        if planner.keep_prefill(tokens):
            message(f"prefill_tokens stays {tokens}, with which the job began")
        try:
            yield
        finally:
            planner.policy, planner.prefill_tokens = before


_ARGUMENTS = {
    "input": Annotated[str | Path, "the name of a file"],
    "output": Annotated[str | Path, "the name of a file"],
    "params": Annotated[SamplingParams, "SamplingParams, or None"],
    "prompt_column": Annotated[str | None, Limit(1), "the name of a column, or None"],
    "limit": Annotated[int | None, Limit(1), ", or None"],
    "input_format": Annotated[str | None, FORMATS],
    **dict.fromkeys(("chat", "score", "restart", "retry_errors"), bool),
}


def run_job(
    engine: "Session", input: str | Path, output: str | Path, params: SamplingParams, **arguments: Any
) -> Summary:
    """Run the rows of a file on an engine; see `Engine.run_job`, which has the further arguments."""
    given = {"input": input, "output": output, "params": params, **arguments}
    for name, kind in _ARGUMENTS.items():
        check_argument(name, given[name], kind)
    column, limit, form, chat, score, restart, retry_errors = (given[name] for name in list(_ARGUMENTS)[3:])
    input = STDIN if input == "-" else input
    check_output(output, input)
    written = {"trace": engine.options.trace, "output": output, **files_beside(output, "output")}
    check_not_overwritten({"input": input}, written)
    with (
        reporting(engine.listener),
        InputRows(input, column, limit, form, chat, score) as rows,
        open_job(rows, output, restart, retry_errors) as store,
    ):
        summary: Summary = FileJob(EngineRunner(engine, params), store).run()
        return summary
