"""Answers in the results of the job, and their metrics, which show the effect of answers that are none."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flexengine.apps.wrangle.prompts import NO, YES
from flexengine.job.results import logprob_of
from flexengine.job.rows import without_place

DIGITS = 6  # of a confidence after the point; float32 sums have no more
Metrics = dict[str, Any]
_YES_NO = re.compile(r"\s*(yes|no)\b", re.I)
_QUOTES = "\"'`“”‘’"
_SHOWN = ("f1", "precision", "recall", "accuracy", "row_accuracy")
_NAMES = {"f1": "F1", "row_accuracy": "accuracy of rows"}


class TableAnswer(NamedTuple):
    """The answer to one question."""

    text: str | None  # the answer; None if the row failed
    # Log probability of the answer in nats. For a generated answer, with the tokens that ended it.
    confidence: float | None = None
    failure: str | None = None  # why there is no answer; None if there is one
    cut: bool = False  # whether a generated answer reached the most tokens before its end


def answer_of(result: Mapping[str, Any], choices: Sequence[str]) -> TableAnswer:
    """Return the answer in an output row of a job. choices: answers that were scored; empty if one was generated."""
    if (error := result.get("error")) is not None:
        return TableAnswer(None, failure=without_place(str(error)))
    if not choices:
        confidence = math.fsum(map(logprob_of, result["logprobs"]))
        cut = result["finish_reason"] == "length"
        return TableAnswer(result["generated_text"].strip(), round(confidence, DIGITS), cut=cut)
    logprobs = [logprob_of(score) for score in result["scores"]]
    best = max(range(len(choices)), key=logprobs.__getitem__)
    if logprobs[best] == -math.inf:
        return TableAnswer(None, failure="no choice has a probability above 0, so none can be chosen")
    return TableAnswer(choices[best], round(logprobs[best], DIGITS))


def plain(answers: Iterable[TableAnswer]) -> Iterator[TableAnswer]:
    """Yield the answers to questions of Yes or No. A text that begins with this word, in any case and after any spaces
    ("yes.", " No, ..."), becomes Yes or No. Other texts stay."""
    for answer in answers:
        match = _YES_NO.match(answer.text or "")
        yield answer._replace(text=match[1].capitalize()) if match else answer


class Judged(NamedTuple):
    """A true answer beside the model's."""

    label: str
    answer: str | None  # the model's answer; None if the row failed
    group: str = ""


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def yes_no_metrics(judged: Sequence[Judged]) -> Metrics:
    """Return F1, precision and recall on Yes, and accuracy.

    An answer that is neither Yes nor No, and a failed row, count as not Yes: on a Yes row as a false negative, on a No
    row as neither a true nor a false positive. Accuracy counts both as wrong.

    Returns:
        The metrics, null where a denominator is 0; counts; and, as `without`, the metrics without these rows.
    """
    lost = [one for one in judged if one.answer not in (YES, NO)]
    failed = sum(one.answer is None for one in judged)
    return {
        **_yes_no(judged),
        "rows": len(judged),
        "yes_rows": sum(one.label == YES for one in judged),
        "garbage": len(lost) - failed,
        "failed": failed,
        "lost_yes_rows": sum(one.label == YES for one in lost),
        "without": _yes_no([one for one in judged if one.answer in (YES, NO)]),
    }


def _yes_no(judged: Sequence[Judged]) -> Metrics:
    hits = sum(one.label == YES == one.answer for one in judged)
    said = sum(one.answer == YES for one in judged)
    true = sum(one.label == YES for one in judged)
    right = sum(one.label == one.answer for one in judged)
    return {
        "f1": _ratio(2 * hits, said + true),
        "precision": _ratio(hits, said),
        "recall": _ratio(hits, true),
        "accuracy": _ratio(right, len(judged)),
    }


def normalised(text: str) -> str:
    """Return a value for comparison: in lower case, with single spaces, without quotes around it and a full stop at its
    end."""
    return " ".join(text.casefold().split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES).strip()


def value_metrics(judged: Sequence[Judged]) -> Metrics:
    """Return the accuracy of imputed values, which are compared after `normalised`. Empty answers and failed rows count
    as wrong; `without` has the accuracy without them."""
    right = sum(bool(one.answer) and normalised(one.answer or "") == normalised(one.label) for one in judged)
    proper = sum(bool(one.answer) for one in judged)
    return {"accuracy": _ratio(right, len(judged)), **_lost(judged), "without": {"accuracy": _ratio(right, proper)}}


def transform_metrics(judged: Sequence[Judged]) -> Metrics:
    """Return the share of transformations whose answers are all right, and the share of right rows. Answers must be
    equal to the last character. Empty answers and failed rows count as wrong; `without` has the metrics without them.
    """
    proper = [one for one in judged if one.answer]
    return {**_transformations(judged), **_lost(judged), "without": _transformations(proper)}


def _transformations(judged: Sequence[Judged]) -> Metrics:
    groups: dict[str, bool] = {}
    for one in judged:
        groups[one.group] = groups.get(one.group, True) and one.answer == one.label
    right = sum(one.answer == one.label for one in judged)
    return {
        "accuracy": _ratio(sum(groups.values()), len(groups)),
        "transformations": len(groups),
        "row_accuracy": _ratio(right, len(judged)),
    }


def _lost(judged: Sequence[Judged]) -> Metrics:
    answers = [one.answer for one in judged]
    return {"rows": len(judged), "garbage": answers.count(""), "failed": answers.count(None)}


def described(metrics: Metrics) -> list[str]:
    """Return the metrics as lines of text, and how each counts rows without a proper answer."""
    rows = f"{metrics['rows']} labelled " + ("answer" if metrics["rows"] == 1 else "answers")
    if "yes_rows" in metrics:
        rows += f", {metrics['yes_rows']} of them Yes"
    if "transformations" in metrics:
        rows += f" of {metrics['transformations']} transformation" + ("" if metrics["transformations"] == 1 else "s")
    lines = [f"{_values(metrics)} ({rows})"]
    yes_no = "yes_rows" in metrics
    kinds = {"neither Yes nor No" if yes_no else "empty": metrics["garbage"], "failed": metrics["failed"]}
    lost = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    counted = "counted as wrong in each metric"
    if yes_no:
        counted = (
            f"counted as not Yes, so {metrics['lost_yes_rows']} on Yes rows lower recall and F1, precision leaves them"
            " out, and accuracy counts them as wrong"
        )
    return lines + ([f"{lost}: {counted}; without them: {_values(metrics['without'])}"] if lost else [])


def _values(metrics: Mapping[str, Any]) -> str:
    shown = ((name, metrics[name]) for name in _SHOWN if name in metrics)
    return ", ".join(f"{_NAMES.get(name, name)} {'undefined' if v is None else f'{v:.4f}'}" for name, v in shown)
