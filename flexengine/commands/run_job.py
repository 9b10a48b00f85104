"""A job of `flexengine run`: the engine is opened, the job is run, and its progress is printed."""

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flexengine.commands.messages import NORMAL, detail, say, verbosity
from flexengine.commands.open_engine import open_engine
from flexengine.commands.pipeline import pipeline
from flexengine.commands.progress import EmptyTexts, RowErrors, detail_lines, last_line
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.report.base import NoReport

if TYPE_CHECKING:
    from flexengine.engine.state import Progress
    from flexengine.job.interrupt import Interrupts
    from flexengine.job.resume import Job


def run_job(args: argparse.Namespace, job: "Job", params: SamplingParams, interrupts: "Interrupts") -> dict[str, Any]:
    """Run the rows that remain, write the output file, and return the summary as JSON values, of which only `job` is
    returned if no row remained."""
    from flexengine.engine.file_job import FileJob  # imported here, as it imports numpy and --help must not

    if note := job.take_note():
        say(note)
    errors, texts, report = RowErrors(), EmptyTexts(), _recorder(args, job)

    def sweep_ended(progress: "Progress") -> None:
        interrupts.check()
        report.sweep(progress)

    with report:
        with pipeline(args) as group, open_engine(args, sweep_ended, group) as engine:
            report.attach(engine)
            running = FileJob(engine, job, params)
            if running.begin():
                for result in running.results():
                    errors.note(result)
                    texts.note(result)
                    report.take(result)
        summary = running.end().to_json()  # with the engine's memory free, and before the page says how the job ended
    say(last_line(job, args.output, summary if running.ran else {}))
    with suppress(InvalidInput):  # the input has changed since
        if verbosity() >= NORMAL and (hint := texts.hint(job.rows, engine.tokenizer)):
            say(hint)
    for line in detail_lines(summary) if running.ran else ():
        detail(line)
    return summary if running.ran else {"job": summary["job"]}


def _recorder(args: argparse.Namespace, job: "Job") -> NoReport:
    if not args.report:
        return NoReport()
    from flexengine.report.recorder import ReportRecorder

    return ReportRecorder(args.report, ["flexengine", "run", *args.argv], job, say)
