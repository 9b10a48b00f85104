"""Metrics: numbers of each answer, and the metric of all answers computed from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from flexengine.apps.evaluate import texts
from flexengine.apps.evaluate.answers import CHOICE, GENERATION, PERPLEXITY, InstanceAnswer
from flexengine.apps.evaluate.bootstrap import Aggregate, Floats

WRONG, LEFT_OUT = "as 0", "left out"  # how answers with an error are counted
BINS = 10  # of the calibration error
UNCONDITIONAL = "unconditional"
NORMALIZATIONS = ("", "per_token", "per_byte", UNCONDITIONAL)


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        kind: kind of the scenarios that have it.
        measure: return the numbers of an answer without error.
        numbers: how many numbers.
        aggregate: return the metric, [...], of numbers [..., answers, numbers].
        needs_label: whether the right answer is needed.
        errors: how answers with an error are counted: WRONG or LEFT_OUT.
        higher_is_better: None if neither is.
        single: whether the metric of one answer has a meaning, so that the worst of several can be taken.
        unconditional: whether log probabilities after the unconditional context are needed.
    """

    kind: str
    measure: Callable[[InstanceAnswer], tuple[float, ...]]
    numbers: int
    aggregate: Aggregate
    needs_label: bool = True
    errors: str = WRONG
    higher_is_better: bool | None = True
    single: bool = True
    unconditional: bool = False


def mean(values: Floats) -> Floats:
    """Return the mean of the first numbers."""
    return np.asarray(values[..., 0].mean(axis=-1))


def bits_per_byte(values: Floats) -> Floats:
    """Return the bits per byte of (nats, bytes)."""
    return _ratio(values) / math.log(2)


def word_perplexity(values: Floats) -> Floats:
    """Return e to the nats per word of (nats, words)."""
    with np.errstate(over="ignore"):
        return np.exp(_ratio(values))


def calibration_error(values: Floats) -> Floats:
    """Return the expected calibration error of (confidence, share of being right) with BINS bins of about equally many
    answers, as HELM computes it.

    Answers of equal confidence share a bin. The error is the mean over answers of the difference between the mean
    confidence and the accuracy of the answer's bin.
    """
    many = values.reshape(-1, *values.shape[-2:])
    return np.array([_calibration_error(each[:, 0], each[:, 1]) for each in many]).reshape(values.shape[:-2])


def _calibration_error(confidence: Floats, right: Floats) -> float:
    ordered, count = np.sort(confidence), len(confidence)
    parts = np.array_split(ordered, min(BINS, count))
    edges = np.unique([(low[-1] + high[0]) / 2 for low, high in pairwise(parts)])
    places = np.searchsorted(edges, confidence)
    return float(np.abs(np.bincount(places, weights=confidence - right)).sum() / count)


def _ratio(values: Floats) -> Floats:
    sums = values.sum(axis=-2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def scores(answer: InstanceAnswer, normalization: str) -> Floats:
    """Return the score of each choice: its log probability; per token; per byte of the choice, without the delimiter
    before it; or less its log probability after the unconditional context."""
    logprobs: Floats = np.array(answer.logprobs, dtype=np.float64)
    if normalization == "per_token":
        return np.asarray(logprobs / np.array(answer.tokens))
    if normalization == "per_byte":
        return np.asarray(logprobs / np.array([len(choice.encode()) for choice in answer.choices]))
    if normalization == UNCONDITIONAL:
        with np.errstate(invalid="ignore"):
            return np.where(np.isneginf(logprobs), -np.inf, logprobs - np.array(answer.unconditional))
    return logprobs


def probabilities(answer: InstanceAnswer, normalization: str = "") -> Floats:
    """Return the softmax of the scores. Choices that share an infinite maximum are equally likely."""
    values = scores(answer, normalization)
    with np.errstate(invalid="ignore"):
        powers = np.where(values == values.max(), 1.0, np.exp(values - values.max()))
    return np.asarray(powers / powers.sum())


def _right(answer: InstanceAnswer, normalization: str) -> tuple[float, ...]:
    """Return 1 if the choice with the highest score is right. Choices of equal score share the 1."""
    values = scores(answer, normalization)
    best = np.flatnonzero(values == values.max())
    return (float(answer.gold in best) / len(best),)


def _confidence(answer: InstanceAnswer, normalization: str = "") -> tuple[float, ...]:
    return (float(probabilities(answer, normalization).max()),)


def _confidence_and_right(answer: InstanceAnswer, normalization: str) -> tuple[float, ...]:
    return _confidence(answer, normalization) + _right(answer, normalization)


def _gold_probability(answer: InstanceAnswer) -> tuple[float, ...]:
    assert answer.gold is not None
    return (float(probabilities(answer)[answer.gold]),)


def _best_match(compare: Callable[[str, str], float], answer: InstanceAnswer) -> tuple[float, ...]:
    return (max(compare(answer.text, reference) for reference in answer.references),)


def _nats_and_bytes(answer: InstanceAnswer) -> tuple[float, ...]:
    return -answer.logprobs[0], float(len(answer.choices[0].encode()))


def _nats_and_words(answer: InstanceAnswer) -> tuple[float, ...]:
    return -answer.logprobs[0], float(len(answer.choices[0].split()))


def _named(base: str, normalization: str) -> str:
    return f"{base}_{normalization}" if normalization else base


def _choice_metrics() -> dict[str, Metric]:
    made: dict[str, Metric] = {}
    for each in NORMALIZATIONS:
        needs: dict[str, Any] = {"unconditional": each == UNCONDITIONAL}
        made[_named("accuracy", each)] = Metric(CHOICE, partial(_right, normalization=each), 1, mean, **needs)
    for each in NORMALIZATIONS:
        needs = {"unconditional": each == UNCONDITIONAL}
        made[_named("ece", each)] = Metric(CHOICE, partial(_confidence_and_right, normalization=each), 2,
                                           calibration_error, errors=LEFT_OUT, higher_is_better=False, single=False,
                                           **needs)  # fmt: skip
    made["gold_probability"] = Metric(CHOICE, _gold_probability, 1, mean)
    made["confidence"] = Metric(CHOICE, _confidence, 1, mean, False, LEFT_OUT, None, single=False)
    return made


METRICS: dict[str, Metric] = {
    **_choice_metrics(),
    **{name: Metric(GENERATION, partial(_best_match, getattr(texts, name)), 1, mean)
       for name in ("exact_match", "quasi_exact_match", "f1", "set_f1")},
    "generated_tokens": Metric(GENERATION, lambda answer: (float(answer.generated),), 1, mean, False, LEFT_OUT, None,
                               single=False),
    "bits_per_byte": Metric(PERPLEXITY, _nats_and_bytes, 2, bits_per_byte, False, LEFT_OUT, False),
    "word_perplexity": Metric(PERPLEXITY, _nats_and_words, 2, word_perplexity, False, LEFT_OUT, False),
}  # fmt: skip
# Metrics of a scenario that names none, by kind and by whether it has labels.
DEFAULT: dict[tuple[str, bool], tuple[str, ...]] = {
    (CHOICE, True): ("accuracy", "accuracy_per_byte", "gold_probability", "ece"),
    (CHOICE, False): ("confidence",),
    (GENERATION, True): ("exact_match", "quasi_exact_match", "f1"),
    (GENERATION, False): ("generated_tokens",),
    (PERPLEXITY, True): ("bits_per_byte", "word_perplexity"),
}


def measured(metric: Metric, answers: Sequence[InstanceAnswer]) -> Floats:
    """Return the numbers of the answers, [answers, numbers]. Those of an answer with an error are 0, or NaN if such
    answers are left out."""
    empty = (math.nan if metric.errors == LEFT_OUT else 0.0,) * metric.numbers
    rows = [empty if each.error is not None else metric.measure(each) for each in answers]
    return np.array(rows, dtype=np.float64).reshape(len(answers), metric.numbers)


def worst(metric: Metric, variants: Sequence[Floats]) -> Floats:
    """Return, for each instance, the numbers of its worst variant. An instance with a variant that is left out is left
    out.

    Args:
        variants: [instances, numbers] for each variant.
    """
    stacked = np.stack(variants)
    single = metric.aggregate(stacked[:, :, None, :])
    missing = np.isnan(stacked).any(axis=-1)
    chosen = single.argmin(axis=0) if metric.higher_is_better else single.argmax(axis=0)
    chosen = np.where(missing.any(axis=0), missing.argmax(axis=0), chosen)
    return np.asarray(stacked[chosen, np.arange(stacked.shape[1])])
