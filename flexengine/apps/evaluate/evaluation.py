"""An evaluation: all runs over all scenarios, each as one job, and the tokens per second of each run.

The rate of a batch that is padded is given, too, as FlexGen's tables of data wrangling give both.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.activity import message
from flexengine.apps.evaluate.instances import Built, Instance
from flexengine.apps.evaluate.metrics import CHOICE, GENERATION, METRICS, InstanceAnswer
from flexengine.apps.evaluate.report import RESULTS, Evaluation, Figure, figures
from flexengine.apps.evaluate.runs import Run
from flexengine.apps.evaluate.scenario import Scenario
from flexengine.apps.rows_job import RowsJob
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.files import write_whole
from flexengine.job.journal import Journal
from flexengine.job.results import logprob_of
from flexengine.job.rows import without_place
from flexengine.plan.formatting import clock, rate
from flexengine.records import read_object

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine

JOBS, THROUGHPUT = "jobs", "throughput.json"
_JOURNAL = ".results.jsonl.journal"  # end of the name of a job's journal
Row = Mapping[str, Any]


def throughput(results: Sequence[Row]) -> dict[str, int]:
    """Return the tokens of a job's results.

    Returns:
        rows: rows without error.
        useful_tokens: tokens of all inputs, each counted once, and of all outputs.
        padded_tokens: tokens of all sequences if each is as long as the longest input and the longest output of its
            scenario; each choice of a row is a sequence of its own.
    """
    groups: dict[tuple[str, bool], list[tuple[int, list[int]]]] = {}
    rows = [row for row in results if row["error"] is None]
    for row in rows:
        group = groups.setdefault((row["scenario"], "variant" in row), [])  # unconditional choices are a batch, too
        outputs = [score["tokens"] for score in row["scores"]] if "scores" in row else [row["completion_tokens"]]
        group.append((0 if "text" in row else row["prompt_tokens"], outputs))  # a text that is scored has no input
    useful = padded = 0
    for group in groups.values():
        longest = max(first for first, _ in group) + max(max(outputs) for _, outputs in group)
        useful += sum(first + sum(outputs) for first, outputs in group)
        padded += longest * sum(len(outputs) for _, outputs in group)
    return {"rows": len(rows), "useful_tokens": useful, "padded_tokens": padded}


def evaluate(
    scenarios: Sequence[Built], runs: Sequence[Run], folder: Path,
    make: Callable[[Run], AbstractContextManager["Engine"]], resamples: int,
    restarted: Callable[[], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Run all scenarios with each run, one run at a time, and return the results. A finished run is not run again.
    Raise InvalidInput if no row can be run, or the folder holds jobs of other scenarios or models, or of another
    process.

    Args:
        folder: folder of the evaluation; files of jobs are in its folder JOBS.
        resamples: draws of the bootstrap, which gives the intervals.
        restarted: delete the results of earlier calls before the first run, and call this then; None keeps them.
    """
    rows = [row for built in scenarios for row in rows_of(built)]  # those of one scenario share their shots
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
            results, seconds = _run_job(engine, RowsJob.named(folder / JOBS / run.stem), rows)
        note_throughput(run, throughput(results), seconds, folder / THROUGHPUT)
        answers.append(answers_of(scenarios, results))
    names, of_all = [run.name for run in runs], list[Figure]()
    for built, *of_runs in zip(scenarios, *answers, strict=True):
        of_all += figures(built, names, of_runs, resamples)
    return Evaluation(runs, scenarios, answers, of_all, resamples)


def _run_job(
    engine: "Engine", job: RowsJob, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], float | None]:
    """Run the rows as one job, continue it, or read its results if it is finished. Raise InvalidInput if it was begun
    with other rows.

    Returns:
        The rows with the fields of the output, and the seconds of the job, from the reading of weights on; None if an
        earlier call of the command computed some of the rows.
    """
    if job.rows.exists() and not job.has(rows):
        fault = f"{job.rows} was written for other scenarios: they, or their data, have changed since"
        raise InvalidInput(f"{fault}; give --restart to start over, or another --output")
    job.write(rows)
    summary = engine.run_job(job.rows, job.results, SamplingParams(), score=True, row_options=True)
    seconds = summary.load_seconds + summary.total_seconds
    results = [{**row, **output} for row, output in zip(rows, job.outputs(), strict=True)]
    return results, seconds if summary.job and summary.job.done_before == 0 else None


def remove_results(folder: Path, runs: Sequence[Run]) -> None:
    """Delete all that earlier evaluations wrote to a folder, so that no job continues one of them. Raise InvalidInput
    and delete nothing if another process writes one of the jobs. runs: their files need no journal to be deleted."""
    journals = (folder / JOBS).glob(f"*{_JOURNAL}")
    stems = {run.stem for run in runs} | {path.name.removesuffix(_JOURNAL) for path in journals}
    jobs = [RowsJob.named(folder / JOBS / stem) for stem in sorted(stems)]
    with ExitStack() as locked:
        for job in jobs:
            if job.journal.exists():
                locked.enter_context(Journal(job.journal))
        for name in (*RESULTS, THROUGHPUT):
            (folder / name).unlink(missing_ok=True)
        for job in jobs:  # the journal last: with it alone, the job is continued; without it, results are refused
            for path in (job.results, job.rows, job.journal):
                path.unlink(missing_ok=True)


def note_throughput(run: Run, counts: dict[str, int], seconds: float | None, path: Path) -> None:
    """Print the throughput of a run and write it to a file, beside that of other runs. The entry of a run that was
    finished before stays if it has the same tokens.

    Args:
        counts: see `throughput`.
        seconds: of the whole run, loading included; None if they are unknown.
    """
    kept: dict[str, Any] = read_object(path, "throughput file") if path.exists() else {}
    old, useful, padded = kept.get(run.name, {}), counts["useful_tokens"], counts["padded_tokens"]
    if seconds is not None or any(old.get(name) != count for name, count in counts.items()):
        rates = (useful / seconds, padded / seconds) if seconds else (None, None)
        kept[run.name] = {**counts, "seconds": seconds, "useful_tok_s": rates[0], "padded_tok_s": rates[1]}
        write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
    text = "seconds are unknown, as earlier calls computed some rows"
    if seconds:
        found = rate(useful, seconds, "useful tok"), rate(padded, seconds, "padded tok")
        text = ", ".join(filter(None, (f"in {clock(seconds)}", *found)))
    message(f"run {run.name}: {useful:,} useful tokens; a padded batch would compute {padded:,}; {text}")


def rows_of(built: Built) -> Iterator[dict[str, Any]]:
    """Yield the rows of a scenario: one for each instance without error, and one for each list of choices that is
    scored after the unconditional context."""
    scenario = built.scenario
    runnable = [each for each in built.instances if each.error is None]
    for instance in runnable:
        names = {"scenario": scenario.name, "row": instance.number, "variant": instance.variant}
        if scenario.kind == CHOICE:
            yield names | {"context": instance.context, "choices": _continuations(scenario, instance.choices)}
        elif scenario.kind == GENERATION:
            most, stop = scenario.generation.max_tokens, list(scenario.generation.stop)
            yield names | {"prompt": instance.context, "max_tokens": most, "stop": stop}
        else:
            yield names | {"text": instance.context}
    if any(METRICS[name].unconditional for name in scenario.metrics):
        for choices in dict.fromkeys(each.choices for each in runnable):
            yield {"scenario": scenario.name, "context": scenario.choices.unconditional,
                   "choices": _continuations(scenario, choices)}  # fmt: skip


def _continuations(scenario: Scenario, choices: Sequence[str]) -> list[str]:
    return [scenario.prompt.delimiter + choice for choice in choices]


def answers_of(scenarios: Sequence[Built], results: Sequence[Row]) -> list[list[InstanceAnswer]]:
    """Return the answers to the instances of each scenario. results: the rows with the fields of the job's output."""
    left, answers = iter(results), list[list[InstanceAnswer]]()
    for built in scenarios:
        rows = [next(left) for _ in rows_of(built)]
        own = iter(row for row in rows if "variant" in row)
        alone = {tuple(row["choices"]): row for row in rows if "variant" not in row}
        answers.append([
            _answer(built.scenario, each, next(own), alone) if each.error is None else InstanceAnswer(error=each.error)
            for each in built.instances
        ])  # fmt: skip
    return answers


def _answer(
    scenario: Scenario, instance: Instance, result: Row, alone: Mapping[tuple[str, ...], Row]
) -> InstanceAnswer:
    after = alone.get(tuple(_continuations(scenario, instance.choices)))
    for row in (result, after):
        if row is not None and row["error"] is not None:
            # The engine names lines of the job's input, which the user did not write.
            return InstanceAnswer(error=f"line {instance.line}: {without_place(row['error'])}")
    if scenario.kind == GENERATION:
        return InstanceAnswer(
            text=result["generated_text"], generated=result["completion_tokens"], references=instance.references
        )
    scores = result["scores"]
    return InstanceAnswer(
        choices=instance.choices or (instance.context,),
        logprobs=tuple(map(logprob_of, scores)),
        tokens=tuple(score["tokens"] for score in scores),
        unconditional=tuple(map(logprob_of, after["scores"])) if after is not None else (),
        gold=instance.gold,
    )
