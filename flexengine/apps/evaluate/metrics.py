"""Answers of models, numbers of each answer, and the metrics of all answers computed from them."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Aggregate = Callable[[Floats], Floats]
CHOICE, GENERATION, PERPLEXITY = "choice", "generation", "perplexity"
KINDS = (CHOICE, GENERATION, PERPLEXITY)
WRONG, LEFT_OUT = "as 0", "left out"  # how answers with an error are counted
BINS = 10  # of the calibration error
UNCONDITIONAL = "unconditional"
NORMALIZATIONS = ("", "per_token", "per_byte", UNCONDITIONAL)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class InstanceAnswer:
    """A model's answer, and the right one."""

    choices: tuple[str, ...] = ()  # the answers among which the model chose; the scored text of a perplexity scenario
    logprobs: tuple[float, ...] = ()  # log probability of each of `choices`, in nats, summed over its tokens
    tokens: tuple[int, ...] = ()  # tokens of each of `choices`
    # Log probabilities of `choices` after the unconditional context; empty if no metric needs them.
    unconditional: tuple[float, ...] = ()
    gold: int | None = None
    text: str = ""
    generated: int = 0  # tokens of the generated text
    references: tuple[str, ...] = ()  # right answers of a generation scenario
    error: str | None = None  # why there is no answer; None if there is one


@dataclass(frozen=True)
class Metric:
    """A metric."""

    kind: str
    measure: Callable[[InstanceAnswer], tuple[float, ...]]  # return the numbers of an answer without error
    numbers: int
    aggregate: Aggregate  # return the metric, [...], of numbers [..., answers, numbers]
    needs_label: bool = True
    errors: str = WRONG  # how answers with an error are counted: WRONG or LEFT_OUT
    higher_is_better: bool | None = True  # None if neither is
    single: bool = True  # whether the metric of one answer has a meaning, so that the worst of several can be taken
    unconditional: bool = False  # whether log probabilities after the unconditional context are needed


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

    def of_one(confidence: Floats, right: Floats) -> float:
        ordered, count = np.sort(confidence), len(confidence)
        parts = np.array_split(ordered, min(BINS, count))
        edges = np.unique([(low[-1] + high[0]) / 2 for low, high in pairwise(parts)])
        places = np.searchsorted(edges, confidence)
        return float(np.abs(np.bincount(places, weights=confidence - right)).sum() / count)

    many = values.reshape(-1, *values.shape[-2:])
    return np.array([of_one(each[:, 0], each[:, 1]) for each in many]).reshape(values.shape[:-2])


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


def _confidence_and_right(answer: InstanceAnswer, normalization: str) -> tuple[float, ...]:
    return float(probabilities(answer, normalization).max()), *_right(answer, normalization)


def _gold_probability(answer: InstanceAnswer) -> tuple[float, ...]:
    assert answer.gold is not None
    return (float(probabilities(answer)[answer.gold]),)


# Comparison of a generated text with a right answer: numbers from 0 to 1.


def normalized(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces, as HELM and SQuAD do."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, reference: str) -> float:
    """Return 1 if the texts are equal but for white space at their ends."""
    return float(text.strip() == reference.strip())


def quasi_exact_match(text: str, reference: str) -> float:
    """Return 1 if the words are equal."""
    given, right = _words(text, reference)
    return float(given == right)


def f1(text: str, reference: str, once: bool = False) -> float:
    """Return the F1 of the words, as SQuAD does. once: without repetitions, as HELM does."""
    given, right = (Counter(set(words) if once else words) for words in _words(text, reference))
    return 2 * (given & right).total() / (given.total() + right.total())


def set_f1(text: str, reference: str) -> float:
    """Return the F1 of the sets of words, as HELM does."""
    return f1(text, reference, once=True)


def _words(text: str, reference: str) -> tuple[list[str], list[str]]:
    """Return the normalized words of both texts. If normalization leaves nothing of the reference, such as "A" or "!",
    return the texts in lower case as one word each."""
    if normalized(reference):
        return normalized(text).split(), normalized(reference).split()
    return [text.strip().lower()], [reference.strip().lower()]


def _best_match(answer: InstanceAnswer, compare: Callable[[str, str], float]) -> tuple[float, ...]:
    return (max(compare(answer.text, reference) for reference in answer.references),)


METRICS: dict[str, Metric] = {
    **{f"accuracy{way and f'_{way}'}": Metric(CHOICE, partial(_right, normalization=way), 1, mean,
                                              unconditional=way == UNCONDITIONAL) for way in NORMALIZATIONS},
    **{f"ece{way and f'_{way}'}": Metric(CHOICE, partial(_confidence_and_right, normalization=way), 2,
                                         calibration_error, True, LEFT_OUT, False, single=False,
                                         unconditional=way == UNCONDITIONAL) for way in NORMALIZATIONS},
    "gold_probability": Metric(CHOICE, _gold_probability, 1, mean),
    "confidence": Metric(CHOICE, lambda answer: (float(probabilities(answer).max()),), 1, mean, False, LEFT_OUT, None,
                         single=False),
    **{compare.__name__: Metric(GENERATION, partial(_best_match, compare=compare), 1, mean)
       for compare in (exact_match, quasi_exact_match, f1, set_f1)},
    "generated_tokens": Metric(GENERATION, lambda answer: (float(answer.generated),), 1, mean, False, LEFT_OUT, None,
                               single=False),
    "bits_per_byte": Metric(
        PERPLEXITY, lambda answer: (-answer.logprobs[0], float(len(answer.choices[0].encode()))), 2, bits_per_byte,
        False, LEFT_OUT, False),
    "word_perplexity": Metric(
        PERPLEXITY, lambda answer: (-answer.logprobs[0], float(len(answer.choices[0].split()))), 2, word_perplexity,
        False, LEFT_OUT, False),
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
    out. variants: [instances, numbers] for each variant."""
    stacked = np.stack(variants)
    single = metric.aggregate(stacked[:, :, None, :])
    missing = np.isnan(stacked).any(axis=-1)
    chosen = single.argmin(axis=0) if metric.higher_is_better else single.argmax(axis=0)
    chosen = np.where(missing.any(axis=0), missing.argmax(axis=0), chosen)
    return np.asarray(stacked[chosen, np.arange(stacked.shape[1])])
