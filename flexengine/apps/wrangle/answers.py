"""Answers of the model, read from the results of the job."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.apps.wrangle.prompts import NO, YES
from flexengine.job.results import logprob_of
from flexengine.job.rows import without_place

DIGITS = 6  # of a confidence after the point; float32 sums have no more
_YES_NO = re.compile(r"\s*(yes|no)\b", re.I)


class TableAnswer(NamedTuple):
    """The answer to one question.

    Attributes:
        text: the answer; None if the row failed.
        confidence: log probability of the answer in nats. For a generated answer, with the tokens that ended it.
        failure: why there is no answer; None if there is one.
        cut: whether a generated answer reached the most tokens before its end.
    """

    text: str | None
    confidence: float | None = None
    failure: str | None = None
    cut: bool = False


def read_answers(path: Path, choices: Sequence[str]) -> Iterator[TableAnswer]:
    """Yield the answers in the results of a job, in the order of its rows.

    Args:
        path: file of JSON lines.
        choices: answers that were scored; empty if answers were generated.
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield answer_of(json.loads(line), choices)


def answer_of(result: Mapping[str, Any], choices: Sequence[str]) -> TableAnswer:
    """Return the answer in an output row of a job."""
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


def yes_or_no(text: str) -> str | None:
    """Return Yes or No if a text begins with this word, in any case and after any spaces ("yes.", " No, ..."). Return
    None for another text."""
    match = _YES_NO.match(text)
    return None if match is None else YES if match[1].lower() == "yes" else NO


def plain(answers: Iterable[TableAnswer]) -> Iterator[TableAnswer]:
    """Yield the answers to questions of Yes or No, with "Yes." and the like as Yes. Other texts stay."""
    for answer in answers:
        known = None if answer.text is None else yes_or_no(answer.text)
        yield answer if known is None else answer._replace(text=known)
