"""An evaluation: all runs over all scenarios."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from flexengine import __version__
from flexengine.activity import message
from flexengine.apps.evaluate.figures import Draws, figures
from flexengine.apps.evaluate.instances import Built
from flexengine.apps.evaluate.report import RESULTS, Evaluation
from flexengine.apps.evaluate.requests import answers_of, rows_of
from flexengine.apps.evaluate.runs import Finished, Run, job_files, run_job, stems_of
from flexengine.apps.evaluate.throughput import COUNTS, Throughput, throughput
from flexengine.apps.rows_job import RunsJobs
from flexengine.config import read_object
from flexengine.errors import InvalidInput
from flexengine.job.journal import Journal
from flexengine.job.whole_file import write_whole

JOBS, THROUGHPUT = "jobs", "throughput.json"
Open = Callable[[Run], AbstractContextManager[RunsJobs]]


def evaluate(
    scenarios: Sequence[Built], runs: Sequence[Run], folder: Path, make: Open, draws: Draws,
    restarted: Callable[[], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Run all scenarios with each run, one run at a time, and return the results. A finished run is not run again.

    Args:
        folder: folder of the evaluation; files of jobs are in its folder JOBS.
        make: open the engine of a run.
        restarted: delete the results of earlier calls before the first run, and call this then; None keeps them.

    Raises:
        InvalidInput: no row can be run, or the folder holds jobs of other scenarios or models, or of another process.
    """
    rows = rows_of(scenarios)
    if not rows:
        faults = (each.error for built in scenarios for each in built.instances)
        raise InvalidInput(f"no row of any scenario can be run; the first: {next(faults)}")
    for run in runs if len(runs) > 1 or restarted else ():
        with make(run):  # a run that cannot be opened is refused before others take hours or results are deleted
            pass
    if restarted is not None:
        remove_results(folder, runs)
        restarted()
    (folder / JOBS).mkdir(parents=True, exist_ok=True)
    answers = []
    for run in runs:
        message(f"run {run.name}: {len(rows)} rows of {len(scenarios)} scenarios in one job")
        with make(run) as engine:
            finished = run_job(engine, run, rows, folder / JOBS)
        note_throughput(run, finished, folder / THROUGHPUT)
        answers.append(answers_of(scenarios, finished.results))
    names = [run.name for run in runs]
    of_all = [figure for number, built in enumerate(scenarios)
              for figure in figures(built, names, [of_run[number] for of_run in answers], draws)]  # fmt: skip
    return Evaluation(__version__, runs, scenarios, answers, of_all, draws)


def remove_results(folder: Path, runs: Sequence[Run]) -> None:
    """Delete all that earlier evaluations wrote to a folder, so that no job continues one of them.

    Args:
        folder: folder of the evaluation.
        runs: runs whose files are deleted even if they have no journal.

    Raises:
        InvalidInput: another process writes one of the jobs; nothing is deleted then.
    """
    stems = {run.stem for run in runs}
    stems |= stems_of(folder / JOBS)
    jobs = [job_files(folder / JOBS, stem) for stem in sorted(stems)]
    with ExitStack() as locked:
        for job in jobs:
            if job.journal.exists():
                locked.enter_context(Journal(job.journal))
        for name in (*RESULTS, THROUGHPUT):
            (folder / name).unlink(missing_ok=True)
        for job in jobs:  # the journal last: with it alone, the job is continued; without it, results are refused
            for path in (job.results, job.rows, job.journal):
                path.unlink(missing_ok=True)


def note_throughput(run: Run, finished: Finished, path: Path) -> None:
    """Print the throughput of a run and write it to a file, beside that of other runs. The entry of a run that was
    finished before stays if it has the same tokens."""
    kept: dict[str, Any] = read_object(path, "throughput file") if path.exists() else {}
    tokens = throughput(finished.results)
    new, old = tokens.to_json(finished.seconds), kept.get(run.name, {})
    if finished.seconds is not None or any(old.get(name) != new[name] for name in COUNTS):
        kept[run.name] = new
        write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
    message(f"run {run.name}: {described(tokens, finished.seconds)}")


def described(tokens: Throughput, seconds: float | None) -> str:
    """Return a throughput as text."""
    text = f"{tokens.useful:,} useful tokens; a padded batch would compute {tokens.padded:,}"
    if not seconds:
        return f"{text}; seconds are unknown, as earlier calls computed some rows"
    rates = f"{tokens.useful / seconds:,.1f} useful and {tokens.padded / seconds:,.1f} padded tok/s"
    return f"{text}; in {seconds:.1f} s {rates}"
