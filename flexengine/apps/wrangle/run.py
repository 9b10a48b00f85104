"""A run: the plan's prompts as one resumable job, the table with predictions, and their metrics, which show the effect
of answers that are none."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.apps.rows_job import RowsJob
from flexengine.apps.tables import Added, check_output, holds_table, write_table
from flexengine.apps.wrangle.plan import WranglePlan
from flexengine.apps.wrangle.questions import targets_of
from flexengine.apps.wrangle.spec import NO, TRANSFORM, YES, YES_NO
from flexengine.errors import InvalidInput
from flexengine.job.files import part_path
from flexengine.job.journal import Journal
from flexengine.job.results import files_beside, logprob_of
from flexengine.job.rows import without_place

DIGITS = 6  # of a confidence; float32 sums have no more
EMPTY = "the model's answer is empty"
Metrics = dict[str, Any]
_YES_NO = re.compile(r"\s*(yes|no)\b", re.I)
_QUOTES = "\"'`“”‘’"
_SHOWN = ("f1", "precision", "recall", "accuracy", "row_accuracy")
_NAMES = {"f1": "F1", "row_accuracy": "accuracy of rows"}


class TableAnswer(NamedTuple):
    """The answer to one question."""

    text: str | None  # the answer; None if the row failed
    # Probability of the answer: of scored answers its share in the sum of all; of a generated one that of its tokens,
    # with those that ended it.
    confidence: float | None = None
    failure: str | None = None  # why there is no answer; None if there is one
    cut: bool = False  # whether a generated answer reached the most tokens before its end


def answer_of(result: Mapping[str, Any], choices: Sequence[str]) -> TableAnswer:
    """Return the answer in an output row of a job. choices: answers that were scored; empty if one was generated."""
    if (error := result.get("error")) is not None:
        return TableAnswer(None, failure=without_place(str(error)))
    if not choices:
        confidence = math.exp(math.fsum(map(logprob_of, result["logprobs"])))
        cut = result["finish_reason"] == "length"
        return TableAnswer(result["generated_text"].strip(), _rounded(confidence), cut=cut)
    logprobs = [logprob_of(score) for score in result["scores"]]
    best = max(range(len(choices)), key=logprobs.__getitem__)
    if logprobs[best] == -math.inf:
        return TableAnswer(None, failure="no choice has a probability above 0, so none can be chosen")
    share = 1 / math.fsum(math.exp(each - logprobs[best]) for each in logprobs)
    return TableAnswer(choices[best], _rounded(share))


def _rounded(probability: float) -> float:
    return float(f"{probability:.{DIGITS}g}")


def plain(answer: TableAnswer) -> TableAnswer:
    """Return the answer to a question of Yes or No. A text that begins with this word, in any case and after any spaces
    ("yes.", " No, ..."), becomes Yes or No. Other texts stay."""
    match = _YES_NO.match(answer.text or "")
    return answer._replace(text=match[1].capitalize()) if match else answer


class Judged(NamedTuple):
    """A true answer beside the model's."""

    label: str
    answer: str | None  # the model's answer; None if the row failed
    group: str = ""


def metrics_of(task: str, judged: Sequence[Judged]) -> Metrics:
    """Return the metrics of a task: F1, precision and recall on Yes, and accuracy; the accuracy of values, compared
    after `normalised`; or, for TRANSFORM, the share of transformations whose answers are all right, and that of right
    rows, where answers must be equal to the last character.

    An improper answer, which is neither Yes nor No or is empty, and a failed row count as not Yes: on a Yes row as a
    false negative, on a No row as neither a true nor a false positive. Accuracy counts both as wrong.

    Returns:
        The metrics, null where a denominator is 0; counts; and, as `without`, the metrics without these rows.
    """
    yes_no = task in YES_NO
    measure = _yes_no if yes_no else _transformations if task == TRANSFORM else _values_right
    proper = [one for one in judged if (one.answer in (YES, NO) if yes_no else one.answer)]
    failed = sum(one.answer is None for one in judged)
    yes_rows, kept_yes_rows = (sum(one.label == YES for one in some) for some in (judged, proper))
    return {
        **measure(judged),
        "rows": len(judged),
        **({"yes_rows": yes_rows} if yes_no else {}),
        "garbage": len(judged) - len(proper) - failed,
        "failed": failed,
        **({"lost_yes_rows": yes_rows - kept_yes_rows} if yes_no else {}),
        "without": measure(proper),
    }


def _yes_no(judged: Sequence[Judged]) -> Metrics:
    hits = sum(one.label == YES == one.answer for one in judged)
    said = sum(one.answer == YES for one in judged)
    true = sum(one.label == YES for one in judged)
    return {
        "f1": _ratio(2 * hits, said + true),
        "precision": _ratio(hits, said),
        "recall": _ratio(hits, true),
        "accuracy": _ratio(sum(one.label == one.answer for one in judged), len(judged)),
    }


def _values_right(judged: Sequence[Judged]) -> Metrics:
    right = sum(bool(one.answer) and normalised(one.answer or "") == normalised(one.label) for one in judged)
    return {"accuracy": _ratio(right, len(judged))}


def _transformations(judged: Sequence[Judged]) -> Metrics:
    groups: dict[str, bool] = {}
    for one in judged:
        groups[one.group] = groups.get(one.group, True) and one.answer == one.label
    return {
        "accuracy": _ratio(sum(groups.values()), len(groups)),
        "transformations": len(groups),
        "row_accuracy": _ratio(sum(one.answer == one.label for one in judged), len(judged)),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def normalised(text: str) -> str:
    """Return a value for comparison: in lower case, with single spaces, without quotes around it and a full stop at its
    end."""
    return " ".join(text.casefold().split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES).strip()


def described(metrics: Metrics) -> list[str]:
    """Return the metrics as lines of text, and how each counts rows without a proper answer."""
    rows = f"{metrics['rows']} labelled " + ("answer" if metrics["rows"] == 1 else "answers")
    garbage, counted = "empty", "counted as wrong in each metric"
    if "transformations" in metrics:
        rows += f" of {metrics['transformations']} transformation" + ("" if metrics["transformations"] == 1 else "s")
    if "yes_rows" in metrics:
        rows += f", {metrics['yes_rows']} of them Yes"
        garbage = "neither Yes nor No"
        counted = f"counted as not Yes, so {metrics['lost_yes_rows']} on Yes rows lower recall and F1"
        counted += ", precision leaves them out, and accuracy counts them as wrong"
    lines = [f"{_values(metrics)} ({rows})"]
    kinds = {garbage: metrics["garbage"], "failed": metrics["failed"]}
    lost = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return lines + ([f"{lost}: {counted}; without them: {_values(metrics['without'])}"] if lost else [])


def _values(metrics: Mapping[str, Any]) -> str:
    shown = ((name, metrics[name]) for name in _SHOWN if name in metrics)
    return ", ".join(f"{_NAMES.get(name, name)} {'undefined' if v is None else f'{v:.4f}'}" for name, v in shown)


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
    an earlier run are replaced. Raise InvalidInput if the output's suffix names another format, the output exists and
    no run wrote it, an earlier run had other rows, or the output was changed after an earlier run wrote it."""
    check_output(output, plan.asked.table.form)
    if restart:
        return
    job, exists = job_of(output), os.path.exists(output)
    if exists and not job.began:
        remedy = "name another output, or give --restart to replace it"
        raise InvalidInput(f"--output {output} exists and would be replaced; {remedy}")
    if job.began and not job.has(plan.requests()):
        fault = f"--output {output} has rows of a run with another table or other options, in {job.rows}"
        raise InvalidInput(f"{fault}; name another output, or give --restart to start over")
    try:
        written = exists and holds_table(output, plan.asked.table, _columns(plan, _answers(plan, output)))
    except (OSError, KeyError, ValueError):  # the results are missing or damaged
        written = False
    if exists and not written:
        fault = f"--output {output} is not the table that {job.results.name} gives, so one of them was changed"
        raise InvalidInput(f"{fault}; rename the output, and the same command writes it again")


def prepare(plan: WranglePlan, output: str, restart: bool = False, retry_errors: bool = False) -> None:
    """Write the rows of the job, unless an earlier run has begun it. Called after `check`, when the model is open.
    Raise InvalidInput if another process writes the results.

    Args:
        restart: remove the files of an earlier run.
        retry_errors: results of an earlier run may change, so the output is removed: an interrupted run can then be
            continued without this option.
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
        job.write(list(plan.requests()))


def finish(plan: WranglePlan, output: str) -> tuple[dict[str, Any], str | None]:
    """Write the table with predictions from the results of the job, and return the summary. Raise InvalidInput if
    another program wrote the output while the job ran.

    Returns:
        The summary as JSON values: questions with an answer (predicted), rows that cannot be read and questions without
        an answer (failed), generated answers that are empty, and that reached the most tokens (cut), the number of each
        Yes or No answer (for tasks with such answers), and metrics, None without labels. And why the first row of the
        table that failed has no answer; None if no row failed.
    """
    answers = _answers(plan, output)
    columns = _columns(plan, answers)
    if not os.path.exists(output):
        write_table(output, plan.asked.table, columns)
    elif not holds_table(output, plan.asked.table, columns):
        remedy = "rename it, and the same command without --restart writes the output from the results"
        raise InvalidInput(f"--output {output} was written by another program while the job ran; {remedy}")
    failed = sum(answer.failure is not None for answer in answers)
    pairs, failures = list(zip(plan.questions, answers, strict=True)), dict(plan.asked.faults)
    judged = [Judged(q.answer, answer.text, q.group) for q, answer in pairs if q.answer is not None]
    for question, answer in pairs:
        if answer.failure is not None:
            failures.setdefault(question.row, f"{plan.asked.table.place(question.row)}: {answer.failure}")
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
        "metrics": metrics_of(plan.spec.task, judged) if judged else None,
    }
    return summary, failures[min(failures)] if failures else None


def _answers(plan: WranglePlan, output: str) -> list[TableAnswer]:
    answers = (answer_of(row, plan.choices) for row in job_of(output).outputs())
    return [plain(answer) if plan.spec.yes_no else answer for answer in answers]


def _columns(plan: WranglePlan, answers: Sequence[TableAnswer]) -> list[Added]:
    table, columns = plan.asked.table, list[Added]()
    by_cell = {(q.row, q.target): answer for q, answer in zip(plan.questions, answers, strict=True)}
    for target in targets_of(plan.spec):
        found = [by_cell.get((row, target)) for row in range(len(table.records))]
        why = [answer and (EMPTY if answer.text == "" else answer.failure) for answer in found]
        failures = [plan.asked.faults.get(row, reason) for row, reason in enumerate(why)]
        columns += [
            Added(f"{target}_prediction", [answer and answer.text for answer in found]),
            Added(f"{target}_confidence", [answer and answer.confidence for answer in found], number=True),
            Added(f"{target}_failure", failures),
        ]
    return columns
