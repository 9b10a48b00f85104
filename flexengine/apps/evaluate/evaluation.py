"""An evaluation: all runs over all scenarios."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flexengine import __version__
from flexengine.activity import message
from flexengine.apps.evaluate.figures import Draws, figures
from flexengine.apps.evaluate.instances import Built
from flexengine.apps.evaluate.report import Evaluation
from flexengine.apps.evaluate.requests import answers_of, rows_of
from flexengine.apps.evaluate.runs import Finished, Jobs, Run, run_job
from flexengine.apps.evaluate.throughput import Throughput, throughput
from flexengine.config import read_object
from flexengine.errors import InvalidInput
from flexengine.job.whole_file import write_whole

JOBS, THROUGHPUT = "jobs", "throughput.json"
Open = Callable[[Run], AbstractContextManager[Jobs]]


def evaluate(
    scenarios: Sequence[Built], runs: Sequence[Run], folder: Path, make: Open, draws: Draws, restart: bool = False
) -> Evaluation:
    """Run all scenarios with each run, one run at a time, and return the results. A finished run is not run again.

    Args:
        folder: folder of the evaluation; files of jobs are in its folder JOBS.
        make: open the engine of a run.
        restart: delete the results of earlier calls.

    Raises:
        InvalidInput: no row can be run, or the folder holds jobs of other scenarios or models.
    """
    rows = rows_of(scenarios)
    if not rows:
        faults = (each.error for built in scenarios for each in built.instances)
        raise InvalidInput(f"no row of any scenario can be run; the first: {next(faults)}")
    for run in runs if len(runs) > 1 else ():
        with make(run):  # a run that cannot be opened is refused before the first one takes hours
            pass
    (folder / JOBS).mkdir(parents=True, exist_ok=True)
    answers = []
    for run in runs:
        message(f"run {run.name}: {len(rows)} rows of {len(scenarios)} scenarios in one job")
        with make(run) as engine:
            finished = run_job(engine, run, rows, folder / JOBS, restart)
        note_throughput(run, finished, folder / THROUGHPUT)
        answers.append(answers_of(scenarios, finished.results))
    names = [run.name for run in runs]
    found = [figure for number, built in enumerate(scenarios)
             for figure in figures(built, names, [of_run[number] for of_run in answers], draws)]  # fmt: skip
    return Evaluation(__version__, runs, scenarios, answers, found, draws)


def note_throughput(run: Run, finished: Finished, path: Path) -> None:
    """Print the throughput of a run and write it to a file, beside that of other runs. The entry of a run that was
    finished before stays."""
    kept: dict[str, Any] = read_object(path, "throughput file") if path.exists() else {}
    tokens = throughput(finished.results)
    if finished.seconds is not None or run.name not in kept:
        kept[run.name] = tokens.to_json(finished.seconds)
        write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
    message(f"run {run.name}: {described(tokens, finished.seconds)}")


def described(tokens: Throughput, seconds: float | None) -> str:
    """Return a throughput as text."""
    text = f"{tokens.useful:,} useful tokens; a padded batch would compute {tokens.padded:,}"
    if not seconds:
        return f"{text}; seconds are unknown, as earlier calls computed some rows"
    rates = f"{tokens.useful / seconds:,.1f} useful and {tokens.padded / seconds:,.1f} padded tok/s"
    return f"{text}; in {seconds:.1f} s {rates}"
