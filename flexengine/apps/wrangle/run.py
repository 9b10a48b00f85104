"""A run: the plan's prompts as one resumable job, and the table with predictions."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexengine.apps.rows_job import RowsJob
from flexengine.apps.wrangle import metrics
from flexengine.apps.wrangle.plan import WranglePlan
from flexengine.apps.wrangle.prompts import NO, YES
from flexengine.apps.wrangle.spec import TRANSFORM
from flexengine.apps.wrangle.tables import Added, check_output, holds_table, write_table
from flexengine.errors import InvalidInput
from flexengine.job.files import part_path
from flexengine.job.journal import Journal
from flexengine.job.results import files_beside


def job_of(output: str) -> RowsJob:
    """Return the files of the run's job, beside the output."""
    return RowsJob.named(Path(output).resolve(), ".rows.jsonl")


def work_files(output: str) -> dict[str, Path]:
    """Return the files that a run writes beside its output, by the names that messages use."""
    job = job_of(output)
    return {
        "the rows of --output": job.rows,
        "the unfinished rows of --output": part_path(job.rows),
        "the results of --output": job.results,
        **files_beside(job.results, "the results of --output"),
        "the unfinished part of --output": part_path(output),
    }


def check(plan: WranglePlan, output: str, restart: bool = False) -> None:
    """Check that the run can begin, or continue an earlier run. Called before a model is opened. restart: the files of
    an earlier run are replaced.

    Raises:
        InvalidInput: the output's suffix names another format, the output exists and no run wrote it, an earlier run
            had other rows, or the output was changed after an earlier run wrote it.
    """
    check_output(output, plan.asked.table.form)
    if restart:
        return
    job, exists = job_of(output), os.path.exists(output)
    if exists and not job.began:
        raise InvalidInput(
            f"--output {output} exists and would be replaced; name another output, or give --restart to replace it"
        )
    if job.began and job.has_other(plan.requests()):
        raise InvalidInput(
            f"--output {output} has rows of a run with another table or other options, in {job.rows};"
            " name another output, or give --restart to start over"
        )
    try:
        written = exists and holds_table(output, plan.asked.table, _columns(plan, _answers(plan, output)))
    except (OSError, KeyError, ValueError):  # the results are missing or damaged
        written = False
    if exists and not written:
        raise InvalidInput(
            f"--output {output} is not the table that {job.results.name} gives, so one of them"
            " was changed; rename the output, and the same command writes it again"
        )


def prepare(plan: WranglePlan, output: str, restart: bool = False, retry_errors: bool = False) -> None:
    """Write the rows of the job, unless an earlier run has begun it. Called after `check`, when the model is open.

    An output that the job will replace is removed, so that an interrupted run can be continued without these options.

    Args:
        restart: remove the files of an earlier run.
        retry_errors: results of an earlier run may change.

    Raises:
        InvalidInput: another process writes the results.
    """
    target, job = Path(output).resolve(), job_of(output)
    if restart:
        with Journal(job.journal) as journal:
            target.unlink(missing_ok=True)
            job.results.unlink(missing_ok=True)
            journal.restart()  # at the end of the block an empty journal is deleted
    elif retry_errors:
        target.unlink(missing_ok=True)
    if not job.began:
        job.write(plan.requests())


def finish(plan: WranglePlan, output: str) -> tuple[dict[str, Any], str | None]:
    """Write the table with predictions from the results of the job, and return the summary.

    Returns:
        The summary as JSON values: questions with an answer (predicted), rows that cannot be read and questions without
        an answer (failed), generated answers that are empty, and that reached the most tokens (cut), the number of each
        Yes or No answer (for tasks with such answers), and metrics, None without labels. And why the first row of the
        table that failed has no answer; None if no row failed.

    Raises:
        InvalidInput: another program wrote the output while the job ran.
    """
    answers = _answers(plan, output)
    columns = _columns(plan, answers)
    if not os.path.exists(output):
        write_table(output, plan.asked.table, columns)
    elif not holds_table(output, plan.asked.table, columns):
        raise InvalidInput(
            f"--output {output} was written by another program while the job ran; rename it, and the"
            " same command without --restart writes the output from the results"
        )
    failed = sum(answer.failure is not None for answer in answers)
    judged, failures = list[metrics.Judged](), dict(plan.asked.faults)
    for question, answer in zip(plan.questions, answers, strict=True):
        if question.answer is not None:
            judged.append(metrics.Judged(question.answer, answer.text, question.group))
        if answer.failure is not None:
            failures.setdefault(question.row, f"{plan.asked.table.place(question.row)}: {answer.failure}")
    measure = metrics.transform_metrics if plan.spec.task == TRANSFORM else metrics.value_metrics
    texts = Counter(answer.text for answer in answers)
    yes_no = {text: texts[text] for text in (NO, YES) if texts[text]}
    summary = {
        "task": plan.spec.task,
        "tables": list(plan.spec.tables),
        "output": output,
        "rows": len(plan.asked.table.records),
        "predicted": len(answers) - failed,
        "failed": failed + len(plan.asked.faults),
        "empty": texts[""],
        "cut": sum(answer.cut for answer in answers),
        "answers": yes_no if plan.spec.yes_no else {},
        "metrics": (metrics.yes_no_metrics if plan.spec.yes_no else measure)(judged) if judged else None,
    }
    return summary, failures[min(failures)] if failures else None


def _answers(plan: WranglePlan, output: str) -> list[metrics.TableAnswer]:
    answers = (metrics.answer_of(row, plan.choices) for row in job_of(output).outputs())
    return list(metrics.plain(answers) if plan.spec.yes_no else answers)


def _columns(plan: WranglePlan, answers: Sequence[metrics.TableAnswer]) -> list[Added]:
    """Return the columns of predictions, confidences and failures of each target."""
    table, columns = plan.asked.table, list[Added]()
    by_cell = {(q.row, q.target): answer for q, answer in zip(plan.questions, answers, strict=True)}
    for target in plan.asked.targets:
        found = [by_cell.get((row, target)) for row in range(len(table.records))]
        failures = [plan.asked.faults.get(row, answer and answer.failure) for row, answer in enumerate(found)]
        columns += [
            Added(f"{target}_prediction", [answer and answer.text for answer in found]),
            Added(f"{target}_confidence", [answer and answer.confidence for answer in found], number=True),
            Added(f"{target}_failure", failures),
        ]
    return columns
