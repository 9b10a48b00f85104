"""Metrics of labelled questions, with the effect of answers that are none."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flexengine.apps.wrangle.prompts import NO, YES

Metrics = dict[str, Any]
_QUOTES = "\"'`“”‘’"


class Judged(NamedTuple):
    """A true answer beside the model's.

    Attributes:
        label: the true answer.
        answer: the model's answer; None if the row failed.
        group: name of the transformation.
    """

    label: str
    answer: str | None
    group: str = ""


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# Yes or No.


def yes_no_metrics(judged: Sequence[Judged]) -> Metrics:
    """Return F1, precision and recall on Yes, and accuracy.

    An answer that is neither Yes nor No, and a failed row, count as not Yes: on a Yes row as a false negative, on a No
    row as neither a true nor a false positive. Accuracy counts both as wrong.

    Returns:
        The metrics, null where a denominator is 0; counts; and, as `without`, the metrics without these rows.
    """
    proper = [one for one in judged if one.answer in (YES, NO)]
    failed = sum(one.answer is None for one in judged)
    lost = [one for one in judged if one.answer not in (YES, NO)]
    counts = {"rows": len(judged), "yes_rows": sum(one.label == YES for one in judged),
              "garbage": len(lost) - failed, "failed": failed,
              "lost_yes_rows": sum(one.label == YES for one in lost)}  # fmt: skip
    return {**_yes_no(judged), **counts, "without": _yes_no(proper)}


def _yes_no(judged: Sequence[Judged]) -> Metrics:
    hits = sum(one.label == YES == one.answer for one in judged)
    said = sum(one.answer == YES for one in judged)
    true = sum(one.label == YES for one in judged)
    right = sum(one.label == one.answer for one in judged)
    return {"f1": _ratio(2 * hits, said + true), "precision": _ratio(hits, said), "recall": _ratio(hits, true),
            "accuracy": _ratio(right, len(judged))}  # fmt: skip


# Values.


def normalised(text: str) -> str:
    """Return a value for comparison: in lower case, with single spaces, without quotes around it and a full stop at its
    end."""
    return " ".join(text.casefold().split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES).strip()


def value_metrics(judged: Sequence[Judged]) -> Metrics:
    """Return the accuracy of imputed values, which are compared after `normalised`. Empty answers and failed rows count
    as wrong; `without` has the accuracy without them."""
    right = [bool(one.answer) and normalised(one.answer or "") == normalised(one.label) for one in judged]
    return {"accuracy": _ratio(sum(right), len(judged)), **_lost(judged, right)}


def transform_metrics(judged: Sequence[Judged]) -> Metrics:
    """Return the share of transformations whose answers are all right, and the share of right rows. Answers must be
    equal to the last character. Empty answers and failed rows count as wrong; `without` has the metrics without them.
    """
    right = [one.answer == one.label for one in judged]
    lost = _lost(judged, right)
    proper = [one for one in judged if one.answer]
    lost["without"] = {**_transformations(proper), "row_accuracy": lost["without"]["accuracy"]}
    return {**_transformations(judged), "row_accuracy": _ratio(sum(right), len(judged)), **lost}


def _transformations(judged: Sequence[Judged]) -> Metrics:
    groups: dict[str, bool] = {}
    for one in judged:
        groups[one.group] = groups.get(one.group, True) and one.answer == one.label
    return {"accuracy": _ratio(sum(groups.values()), len(groups)), "transformations": len(groups)}


def _lost(judged: Sequence[Judged], right: Sequence[bool]) -> Metrics:
    failed = sum(one.answer is None for one in judged)
    empty = sum(one.answer == "" for one in judged)
    without = {"accuracy": _ratio(sum(right), len(judged) - failed - empty)}
    return {"rows": len(judged), "garbage": empty, "failed": failed, "without": without}


# Text.

_NAMES = {"f1": "F1", "row_accuracy": "accuracy of rows"}
_SHOWN = ("f1", "precision", "recall", "accuracy", "row_accuracy")


def described(metrics: Metrics) -> list[str]:
    """Return the metrics as lines of text, and how each counts rows without a proper answer."""
    rows = f"{metrics['rows']} labelled " + ("answer" if metrics["rows"] == 1 else "answers")
    if "yes_rows" in metrics:
        rows += f", {metrics['yes_rows']} of them Yes"
    if "transformations" in metrics:
        rows += f" of {metrics['transformations']} transformation" + ("" if metrics["transformations"] == 1 else "s")
    lines = [f"{_values(metrics)} ({rows})"]
    if metrics["garbage"] or metrics["failed"]:
        lines.append(f"{_lost_words(metrics)}; without them: {_values(metrics['without'])}")
    return lines


def _values(metrics: Mapping[str, Any]) -> str:
    shown = ((name, metrics[name]) for name in _SHOWN if name in metrics)
    return ", ".join(f"{_NAMES.get(name, name)} {'undefined' if v is None else f'{v:.4f}'}" for name, v in shown)


def _lost_words(metrics: Metrics) -> str:
    yes_no = "yes_rows" in metrics
    kinds = {"neither Yes nor No" if yes_no else "empty": metrics["garbage"], "failed": metrics["failed"]}
    lost = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    if not yes_no:
        return f"{lost}: counted as wrong in each metric"
    return (
        f"{lost}: counted as not Yes, so {metrics['lost_yes_rows']} on Yes rows lower recall and F1, precision"
        " leaves them out, and accuracy counts them as wrong"
    )
