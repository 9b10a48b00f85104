"""A job of `flexengine run`: the engine or the fleet is opened, the job is run, and its progress is printed."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flexengine.commands.fleet import fleet_runner
from flexengine.commands.messages import NORMAL, detail, say, verbosity
from flexengine.commands.open_engine import open_engine
from flexengine.commands.pipeline import pipeline
from flexengine.commands.progress import EmptyTexts, RowErrors, detail_lines, last_line, verified_line
from flexengine.config import Result, SamplingParams
from flexengine.report.base import NoReport

if TYPE_CHECKING:
    from flexengine.engine.file_job import FileJob
    from flexengine.engine.state import Progress
    from flexengine.job.interrupt import Interrupts
    from flexengine.job.resume import JobStore


def run_job(
    args: argparse.Namespace, store: "JobStore", params: SamplingParams, interrupts: "Interrupts"
) -> dict[str, Any]:
    """Run the rows that remain, write the output file, and return the summary as JSON values, of which only `job` is
    returned if no row remained."""
    from flexengine.engine.engine_runner import EngineRunner  # imported here, as they import numpy and --help must not
    from flexengine.engine.file_job import FileJob

    if note := store.take_note():
        say(note)
    errors, texts, report = RowErrors(), EmptyTexts(), _recorder(args, store)

    def sweep_ended(progress: "Progress") -> None:
        interrupts.check()
        report.sweep(progress)

    with report:
        if args.ray is None:
            with pipeline(args) as group, open_engine(args, sweep_ended, group) as engine:
                report.attach(engine)
                job = FileJob(EngineRunner(engine, params), store)
                job.begin()
                _run_rows(job, errors.note, texts.note, report.take)
        else:
            with fleet_runner(args, params, interrupts.check) as fleet:
                job = FileJob(fleet, store)
                job.begin()
                if fleet.about is not None and fleet.about.verified:
                    say(verified_line(dict(fleet.about.verified)))
                _run_rows(job, errors.note)
        summary = job.end()  # with the engine's memory free, and before the page says how the job ended
    numbers: dict[str, Any] = summary if args.ray is not None else summary.to_json()
    say(last_line(store, args.output, numbers if job.ran else {}))
    if args.ray is None:
        if verbosity() >= NORMAL and (hint := texts.hint(store.rows, engine.tokenizer)):
            say(hint)
        for line in detail_lines(numbers) if job.ran else ():
            detail(line)
    return numbers if job.ran else {"job": numbers["job"]}


def _run_rows(job: "FileJob", *takers: "Callable[[Result], None]") -> None:
    """Run the rows that remain, and give each result to all takers."""
    for result in job.results():
        for take in takers:
            take(result)


def _recorder(args: argparse.Namespace, store: "JobStore") -> NoReport:
    if not args.report:
        return NoReport()
    from flexengine.report.recorder import ReportRecorder

    return ReportRecorder(args.report, ["flexengine", "run", *args.argv], store, say)
