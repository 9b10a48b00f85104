"""A job of a file: rows are run, results go to the journal, and the manifest is that with which runs are compared.

`flexengine run` opens the job before it opens the engine, so that a wrong input or output is refused at once.
`Engine.run_job` opens the job on an engine that is open. From there on both, and fleets, use `FileJob`. The input is
read once when the job is opened (counts and digest), once when its rows are run, and once when the output is written.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from flexengine import __version__
from flexengine.activity import activity, message, reporting
from flexengine.config import Result, SamplingParams
from flexengine.engine.summary import JobCounts, JobRows, Progress, Summary
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.job.files import STDIN, check_not_overwritten
from flexengine.job.foreign import CHAT_ONLY
from flexengine.job.inputs import FORMATS, InputRows
from flexengine.job.manifest import LOSSY, MODEL_FILES, Manifest, manifest_of
from flexengine.job.results import check_output, files_beside
from flexengine.job.resume import JobStore, open_job
from flexengine.job.rows import Row
from flexengine.lossy import TOKENS_PARTITION, Lossy
from flexengine.plan.formatting import count
from flexengine.plan.min_memory import SHORTEST
from flexengine.records import Limit, check_argument

if TYPE_CHECKING:
    from flexengine.engine.session import Session  # imports torch, which a job that is finished does not need

# Names of settings.
CACHE, IMPORTANCES, PREFILL_TOKENS, THRESHOLDS = "cache", "importances", "prefill_tokens", "thresholds"
_AGAIN = "give --restart (restart=True in Python) to run the job again"


def check_rows(rows: InputRows, params: SamplingParams) -> None:
    """Report which fields of rows are options, data and renamed, and OpenAI batch lines whose texts are cut, as they
    have no max_tokens. Raise InvalidInput if fields of `params` are for a chat template, which no row of the input goes
    through."""
    scan = rows.scan()
    for note in scan.notes:
        message(note)
    given = any(getattr(params, name) != default for name, default in CHAT_ONLY.items())
    if given and scan.total and scan.only_texts and not rows.chat:
        raise InvalidInput(
            f"{', '.join(CHAT_ONLY)} (and --no-thinking) are for chat templates, but all prompts are texts, which are"
            " continued as they stand; give --chat (chat=True in Python) to run each as a user's message"
        )
    if scan.unlimited and params.max_tokens == SamplingParams.max_tokens:
        lines = count(scan.unlimited, "batch line has", "batch lines have")
        message(f"{lines} no max_tokens: texts end at {params.max_tokens} tokens (--max-tokens N sets another number)")


class RowRunner(Protocol):
    """Computes the rows of a job: one engine, or a fleet."""

    def open(self, store: JobStore) -> str:
        """Check whether the job's rows can be run, and return the name of the model."""

    def manifest(self, store: JobStore, known: Manifest) -> Manifest:
        """Return the job's manifest. known: that of the run that began the job; empty if there was none."""

    def results(self, store: JobStore, rows: Iterable[Row]) -> Iterator[Result]:
        """Yield the results of rows, without their prompts, with the choices of the run that began the job. The caller
        stores each before it takes the next one."""

    def summary(self, counts: JobCounts, ran: bool) -> Any:
        """Return the summary of the run. ran: whether rows were run."""


class FileJob:
    """Runs the rows of an open job that have no result yet. Messages go to the listener of the caller's context."""

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

    def begin(self) -> None:
        """Compare this run with the run that began the job.

        Raises:
            InvalidInput: the job has another manifest, the output file has been changed, or the rows are to be run
                as messages and the model has no chat template.
            OutOfMemory: no row fits into memory.
        """
        runner, store = self.runner, self.store
        model = runner.open(store)
        rows = store.begin(lambda known: runner.manifest(store, known), model)
        self._rows = rows if store.total else ()
        if store.resumed:
            message(f"{store.resumed} of {store.total} rows were done before")

    def results(self) -> Iterator[Result]:
        """Run the rows that remain. Yield every result after it was stored, without its prompt."""
        self.ran = bool(self._rows)
        for result in self.runner.results(self.store, self._rows) if self._rows else ():
            self.store.take(result)
            yield result

    def end(self) -> Any:
        """Write the output file, and return the runner's summary. The engine may be closed before."""
        store = self.store
        if not store.finished:
            with activity("writing", "writing the results", store.total, "rows"):
                store.end()
        return self.runner.summary(JobCounts(store.total, store.done, store.failed, store.resumed), self.ran)


class EngineRunner:
    """Computes the rows of a job with one engine; see `RowRunner`. params: defaults for fields that rows lack."""

    def __init__(self, engine: "Session", params: SamplingParams) -> None:
        self.engine, self.params = engine, params

    def open(self, store: JobStore) -> str:
        reader = self.engine.reader
        reader.check(self.params)
        reader.check_chat(store.rows.chat)
        check_rows(store.rows, self.params)
        return self.engine.core.source.name

    def manifest(self, store: JobStore, known: Manifest) -> Manifest:
        engine = self.engine
        engine.choose_bits()
        if not known and not set(engine.options.allow) - {TOKENS_PARTITION}:
            try:  # before all files of the model are hashed: not even one prompt token and one generated token may fit
                engine.planner.check(SHORTEST)
            except OutOfMemory:
                if (workload := engine.reader.survey(store.rows, self.params)).count:
                    engine.planner.check(workload)  # its message says what these rows need
        return manifest_of(store.rows, self.params, engine_part(engine, known), engine.switches)

    def results(self, store: JobStore, rows: Iterable[Row]) -> Iterator[Result]:
        engine, planner = self.engine, self.engine.planner
        take_over(engine, store.settings)
        before = engine.on_sweep, planner.policy, planner.prefill_tokens

        def sweep_ended(progress: Progress) -> None:
            if engine.layout is not None:
                store.save_settings(settings_of(engine, engine.layout.policy.prefill_tokens))
            store.save(at_once=False)
            if before[0] is not None:
                before[0](progress)

        # Prompts are cut as the run that began the job cut them: the last bits of a prompt's KV depend on the cuts.
        tokens = store.settings.get(PREFILL_TOKENS)
        if planner.keep_prefill(tokens):
            message(f"prefill_tokens stays {tokens}, with which the job began")
        engine.on_sweep = sweep_ended
        counts = JobRows(store.total, store.done, store.resumed - store.done, False, store.began)
        try:
            with contextlib.closing(engine.results(rows, self.params, counts)) as stream:
                yield from stream
        finally:
            engine.on_sweep, planner.policy, planner.prefill_tokens = before

    def summary(self, counts: JobCounts, ran: bool) -> Summary:
        return replace(self.engine.summary if ran else self.engine.core.empty_summary(), job=counts)


def engine_part(engine: "Session", known: Manifest) -> dict[str, Any]:
    """Return the values of a manifest that identify the model and its arithmetic. known: as for `RowRunner`."""
    return {"version": __version__, **engine.fingerprint(known.get(MODEL_FILES, {}))}


def settings_of(engine: "Session", prefill_tokens: int) -> dict[str, Any]:
    """Return the choices of an engine. prefill_tokens: most tokens of a prefill chunk under its policy."""
    calibrator = engine.calibrator if engine.lossy.enabled else None
    importances, thresholds = (calibrator.importances, calibrator.thresholds) if calibrator else (None, [])
    fitted = {IMPORTANCES: importances.digest} if importances is not None else {}
    sparse = {THRESHOLDS: thresholds} if thresholds else {}
    return {PREFILL_TOKENS: prefill_tokens, LOSSY: engine.lossy.enabled, CACHE: engine.core.cache_form, **fitted,
            **sparse}  # fmt: skip


def take_over(engine: "Session", settings: Mapping[str, Any]) -> None:
    """Let an engine use the choices with which its job began. `Planner.keep_prefill` takes the size of prefill chunks.
    settings: empty if the job begins now. Raise InvalidInput if the engine cannot make the same choices."""
    if engine.options.allow and (chosen := settings.get(LOSSY)) is not None:
        engine.use(Lossy(**chosen))
        # A format of the cache that the user gave is compared with the manifest instead.
        if (cache := settings.get(CACHE, "")) and cache != (now := engine.core.cache_form):
            raise InvalidInput(f"this job chose a cache of {cache}, which is {now} now; {_AGAIN}")
    began = settings.get(IMPORTANCES)
    if began is not None and (current := engine.calibrator.importances) is not None and current.digest != began:
        raise InvalidInput(
            f"this job began with weights calibrated to {began}, but the cache no longer has these importances, and"
            f" calibrating again, with other memory or libraries, gave {current.digest}; {_AGAIN}"
        )
    if (thresholds := settings.get(THRESHOLDS)) is not None and thresholds != engine.calibrator.thresholds:
        raise InvalidInput(
            "this job began with other thresholds of sparsified activations than the cache has now: they were removed"
            f" from it, and measuring them again, with other memory or libraries, gave other numbers; {_AGAIN}"
        )


_ARGUMENTS = {
    "input": Annotated[str | Path, "the name of a file (generate runs a list of prompts)"],
    "output": Annotated[str | Path, "the name of a file"],
    "params": Annotated[SamplingParams, "SamplingParams, or None"],
    "prompt_column": Annotated[str | None, Limit(1), "the name of a column, or None"],
    "limit": Annotated[int | None, Limit(1), ", or None"],
    "input_format": Annotated[str | None, FORMATS],
    **dict.fromkeys(("chat", "score"), bool),
    "row_options": Annotated[bool | None, ", or None"],
    "template": Annotated[str | None, Limit(1), "a text with columns in braces, or None"],
    "delimiter": Annotated[str | None, "one character, or None"],
    **dict.fromkeys(("restart", "retry_errors"), bool),
}


def run_job(
    engine: "Session", input: str | Path, output: str | Path, params: SamplingParams, **arguments: Any
) -> Summary:
    """Run the rows of a file on an engine; see `Engine.run_job`, which has the further arguments."""
    given = {"input": input, "output": output, "params": params, **arguments}
    given = {name: check_argument(name, given[name], kind) for name, kind in _ARGUMENTS.items()}
    reading = {"form" if name == "input_format" else name: given[name] for name in list(_ARGUMENTS)[3:-2]}
    input = STDIN if input == "-" else input
    check_output(output, input)
    written = {"trace": engine.options.trace, "output": output, **files_beside(output, "output")}
    check_not_overwritten({"input": input}, written)
    with (
        reporting(engine.listener),
        InputRows(input, memory=engine.options.given_ram, **reading) as rows,
        open_job(rows, output, given["restart"], given["retry_errors"]) as store,
    ):
        summary: Summary = FileJob(EngineRunner(engine, params), store).run()
        return summary
