"""A job of `flexengine.run`: an engine, a journal, and the manifest with which a resumed job is compared."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import __version__
from flexengine.commands.exit_codes import say
from flexengine.commands.open_engine import open_engine
from flexengine.commands.progress import JobBar, last_line
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.lossy import Lossy
from flexengine.report.base import NoReport

RUN = ["python", "-m", "flexengine.run"]  # words of the command before its arguments

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine
    from flexengine.engine.state import Progress
    from flexengine.job.inputs import Rows
    from flexengine.job.interrupt import Interrupts
    from flexengine.job.resume import Job


def run_job(args: argparse.Namespace, job: "Job", params: SamplingParams, interrupts: "Interrupts") -> dict[str, Any]:
    """Run the rows that remain, write the output file, and return the summary."""
    _print_note(job)
    bar, report = JobBar(job), _recorder(args, job)

    def sweep_ended(progress: "Progress") -> None:
        interrupts.check()
        if engine.layout is not None:
            importances = engine.calibrator.importances
            fitted = {"importances": importances.digest} if importances is not None else {}
            chosen = {"lossy": engine.lossy.enabled, "cache": engine.core.cache_form}
            job.save_settings({"prefill_tokens": engine.layout.policy.prefill_tokens} | chosen | fitted)
        job.save(at_once=False)
        bar.show(progress)
        report.sweep(progress)

    with report, open_engine(args, sweep_ended) as engine:
        report.attach(engine)
        rows = job.begin(lambda known: _manifest(args, job, params, engine, known), engine.core.source.name)
        _print_note(job)
        if job.resumed:
            say(f"{job.resumed} of {job.total} rows were done before")
        # The last bits of a prompt's KV depend on where it is cut, so a resumed job must cut it in the same places.
        _keep_to(engine, job.settings.get("prefill_tokens"))
        if args.allow and (chosen := job.settings.get("lossy")) is not None:
            engine.use(Lossy(**chosen))
            _check_cache(engine, job.settings.get("cache", ""))
        if rows:
            _check_importances(engine, job.settings.get("importances"))
            with bar:
                for result in engine.stream(rows, params):
                    job.take(result)
                    bar.note(result)
                    report.take(result)
        summary = dict(engine.summary)
    if not job.finished:
        job.end()
    print(last_line(job, args.output, summary), file=sys.stderr)
    counts = {"rows": job.total, "done": job.done, "failed": job.failed, "done_before": job.resumed}
    return {**summary, "job": counts}


def _recorder(args: argparse.Namespace, job: "Job") -> NoReport:
    if not args.report:
        return NoReport()
    from flexengine.report.recorder import Recorder

    return Recorder(args.report, RUN + args.argv, job, say)


def _print_note(job: "Job") -> None:
    if job.note:
        say(job.note)
    job.note = ""


def _keep_to(engine: "Engine", began: int | None) -> None:
    """Cut prompts as the run that began the job cut them, as the last bits of results depend on it.

    Args:
        began: most tokens of a prefill chunk in that run; None if there was none.
    """
    if engine.planner.keep_prefill(began):
        say(f"prefill_tokens stays {began}, with which the job began")


def _check_cache(engine: "Engine", began: str) -> None:
    """Raise InvalidInput if the cache format that the planner chose has changed since the job began. A format that the
    user gave is compared with the manifest instead."""
    if began and began != engine.core.cache_form:
        raise InvalidInput(f"this job chose a cache of {began}, which is {engine.core.cache_form} now; add --restart to"
                           " run the job again")  # fmt: skip


def _check_importances(engine: "Engine", began: str | None) -> None:
    """Raise InvalidInput if the job began with other importances: they were deleted from the cache, and measuring them
    again gave other numbers."""
    if began is not None and (current := engine.calibrator.importances) is not None and current.digest != began:
        raise InvalidInput(f"this job began with weights calibrated to {began}, but the cache no longer has these"
                           f" importances, and calibrating again, with other memory or libraries, gave"
                           f" {current.digest}; add --restart to run the job again")  # fmt: skip


def _manifest(
    args: argparse.Namespace, job: "Job", params: SamplingParams, engine: "Engine", known: dict[str, Any]
) -> dict[str, Any]:
    """Return the job's manifest.

    Args:
        known: manifest of the run that began the job; empty if there was none.
    """
    from flexengine.job.same_job import INPUT_DIGEST, MODEL_FILES, make_manifest

    if not known and not args.allow:
        _check_memory(engine, job.rows, params)
    given = {"input": Path(args.input).name, INPUT_DIGEST: job.rows.sha256(), "prompt_column": args.prompt_column,
             "output_format": "jsonl"}  # fmt: skip
    made = {"version": __version__, **engine.fingerprint(known.get(MODEL_FILES, {}))}
    lossy = {"allow": sorted(args.allow)} if args.allow else engine.switches
    return make_manifest(params, given, made, lossy)


def _check_memory(engine: "Engine", rows: "Rows", params: SamplingParams) -> None:
    """Raise OutOfMemory, before all files of the model are hashed for the manifest, if not even a row of one prompt
    token and one generated token fits."""
    from flexengine.plan.least import SHORTEST

    try:
        engine.planner.check(SHORTEST)
    except OutOfMemory:
        if (workload := engine.reader.survey(rows, params)).count:
            engine.planner.check(workload)  # its message says what these rows need
