"""One engine as the runner of a job of a file, and the work of `Engine.run_job`."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.activity import message, reporting
from flexengine.config import Result, SamplingParams, shown
from flexengine.engine.agreement import (
    PREFILL_TOKENS,
    engine_part,
    manifest,
    settings_of,
    switches_part,
    take_over,
)
from flexengine.engine.file_job import FileJob
from flexengine.engine.state import Progress
from flexengine.engine.summary import JobCounts, Summary
from flexengine.engine.sweep_reports import JobRows
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.job.inputs import InputRows
from flexengine.job.overwrite import check_not_overwritten
from flexengine.job.results import check_output, files_beside
from flexengine.job.resume import JobStore, open_job
from flexengine.job.rows import Row
from flexengine.job.same_job import Manifest
from flexengine.job.source import FORMATS
from flexengine.job.streams import STDIN
from flexengine.plan.min_memory import SHORTEST

if TYPE_CHECKING:
    from flexengine.engine.session import Session  # imports torch, which a job that is finished does not need


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


def run_job(
    engine: "Session", input: str | Path, output: str | Path, params: SamplingParams, **arguments: Any
) -> Summary:
    """Run the rows of a file on an engine; see `Engine.run_job`, which has the further arguments."""
    from flexengine.engine.options import check  # imports torch

    check("input", input, str | Path, "the name of a file")
    check("output", output, str | Path, "the name of a file")
    check("params", params, SamplingParams, "SamplingParams, or None")
    check("prompt_column", arguments["prompt_column"], str | None, "the name of a column, or None")
    limit, form = arguments["limit"], arguments["input_format"]
    if form not in (*FORMATS, None):
        raise InvalidInput(f"input_format is {shown(form)}; it must be one of {', '.join(FORMATS)}")
    check("limit", limit, int | None, "a whole number of at least 1, or None")
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}; it must be at least 1")
    switches = ("chat", "score", "restart", "retry_errors")
    for name in switches:
        check(name, arguments[name], bool, "True or False")
    chat, score, restart, retry_errors = (arguments[name] for name in switches)
    input = STDIN if input == "-" else input
    check_output(output, input)
    written = {"trace": engine.options.trace, "output": output, **files_beside(output, "output")}
    check_not_overwritten({"input": input}, written)
    with (
        reporting(engine.listener),
        InputRows(input, arguments["prompt_column"], limit, form, chat, score) as rows,
        open_job(rows, output, restart, retry_errors) as store,
    ):
        summary: Summary = FileJob(EngineRunner(engine, params), store).run()
        return summary
