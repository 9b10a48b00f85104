"""Metrics against numbers computed by hand and by other libraries."""

import math

import numpy as np
import pytest
from scipy.special import softmax

from flexengine.apps.evaluate import metrics
from flexengine.apps.evaluate.metrics import METRICS, InstanceAnswer, measured, worst

# The raw score prefers choice 0, that per token choice 1, that per byte choice 2, the unconditional one choice 1.
CHOICES = InstanceAnswer(choices=("no", "perhaps", "it depends on"), logprobs=(-2.0, -3.0, -4.0), tokens=(1, 3, 3),
                 unconditional=(-2.5, -6.0, -4.5), gold=1)  # fmt: skip


def test_scores_and_accuracy_by_normalization() -> None:
    expected = {"": [-2, -3, -4], "per_token": [-2, -1, -4 / 3], "per_byte": [-1, -3 / 7, -4 / 13],
                "unconditional": [0.5, 3, 0.5]}  # fmt: skip
    for name, values in expected.items():
        assert metrics.scores(CHOICES, name) == pytest.approx(values)
        assert metrics.probabilities(CHOICES, name) == pytest.approx(softmax(values))
        metric = METRICS[f"accuracy_{name}" if name else "accuracy"]
        assert metric.measure(CHOICES) == (float(np.argmax(values) == 1),)


def test_bytes_are_those_of_utf_8() -> None:
    answer = InstanceAnswer(choices=("é", "ab"), logprobs=(-2.0, -2.0), tokens=(1, 1), gold=0)
    assert metrics.scores(answer, "per_byte") == pytest.approx([-1, -1])


def test_equal_scores_share_the_point() -> None:
    answer = InstanceAnswer(choices=("a", "b", "c"), logprobs=(-1.0, -1.0, -2.0), tokens=(1, 1, 1), gold=1)
    assert METRICS["accuracy"].measure(answer) == (0.5,)


def test_probabilities_far_below_the_smallest_float() -> None:
    answer = InstanceAnswer(choices=("a", "b"), logprobs=(-2000.0, -2001.0), tokens=(9, 9), gold=1)
    assert METRICS["gold_probability"].measure(answer) == pytest.approx((1 / (1 + math.e),))
    assert METRICS["confidence"].measure(answer) == pytest.approx((math.e / (1 + math.e),))


@pytest.mark.parametrize(
    ("text", "right", "exact", "quasi", "f1", "set_f1"),
    [
        (" Paris \n", "Paris", 1, 1, 1, 1),
        ("The Paris!", "paris", 0, 1, 1, 1),
        ("an  apple, a pear", "apple pear", 0, 1, 1, 1),
        ("Paris in France", "Paris", 0, 0, 2 * 1 / (3 + 1), 2 * 1 / (3 + 1)),
        ("to be or not to be", "to be", 0, 0, 2 * 2 / (6 + 2), 2 * 2 / (4 + 2)),
        ("cat cat dog", "cat cat", 0, 0, 2 * 2 / (3 + 2), 2 * 1 / (2 + 1)),
        ("Rome", "Paris", 0, 0, 0, 0),
        ("", "Paris", 0, 0, 0, 0),
        ("", "the", 0, 0, 0, 0),
        ("A", "A", 1, 1, 1, 1),  # normalization leaves nothing of the reference
        ("a", "A", 0, 1, 1, 1),
        ("!", "A", 0, 0, 0, 0),
        (" ?!", "?!", 1, 1, 1, 1),
        ("the end", "the", 0, 0, 0, 0),
        ("Theatre", "atre", 0, 0, 0, 0),  # no article inside a word
    ],
)
def test_texts(text: str, right: str, exact: float, quasi: float, f1: float, set_f1: float) -> None:
    assert (metrics.exact_match(text, right), metrics.quasi_exact_match(text, right)) == (exact, quasi)
    assert (metrics.f1(text, right), metrics.set_f1(text, right)) == pytest.approx((f1, set_f1))


def test_the_best_of_several_right_answers_counts() -> None:
    answer = InstanceAnswer(text="New York City", references=("NYC", "New York"))
    assert METRICS["f1"].measure(answer) == pytest.approx((2 * 2 / (3 + 2),))


def test_perplexities_are_those_of_all_texts_together() -> None:
    answers = [
        InstanceAnswer(choices=("ab cd",), logprobs=(-6.0,), tokens=(3,)),
        InstanceAnswer(choices=("é",), logprobs=(-3.0,)),
    ]
    bits, words = (METRICS[name] for name in ("bits_per_byte", "word_perplexity"))
    assert bits.aggregate(measured(bits, answers)) == pytest.approx(9 / 7 / math.log(2))
    assert words.aggregate(measured(words, answers)) == pytest.approx(math.exp(9 / 3))


def ece_by_hand(pairs: list[tuple[float, float]], bins: int) -> float:
    """Bins of equally many answers, in order of confidence; all confidences must differ."""
    ordered = sorted(pairs)
    assert len(ordered) % bins == 0
    size, total = len(ordered) // bins, 0.0
    for begin in range(0, len(ordered), size):
        part = ordered[begin : begin + size]
        total += abs(sum(c for c, _ in part) / size - sum(r for _, r in part) / size) * size
    return total / len(ordered)


def test_calibration_error() -> None:
    random = np.random.default_rng(0)
    pairs = [(float(c), float(random.random() < c * c)) for c in random.random(120)]
    found = metrics.calibration_error(np.array(pairs))
    assert found == pytest.approx(ece_by_hand(pairs, 10))
    # Five answers: each is a bin of its own.
    few = [(0.2, 0.0), (0.4, 1.0), (0.6, 1.0), (0.8, 1.0), (0.9, 0.0)]
    assert metrics.calibration_error(np.array(few)) == pytest.approx((0.2 + 0.6 + 0.4 + 0.2 + 0.9) / 5)
    # Equal confidences share a bin: of 20 answers of 0.7, 12 are right.
    equal = [(0.7, 1.0)] * 12 + [(0.7, 0.0)] * 8
    assert metrics.calibration_error(np.array(equal)) == pytest.approx(0.1)


def test_calibration_error_of_several_draws_at_once() -> None:
    random = np.random.default_rng(1)
    draws = np.stack([random.random((3, 2, 30)), random.random((3, 2, 30)).round()], axis=-1)
    single = [[metrics.calibration_error(draws[a, b]) for b in range(2)] for a in range(3)]
    assert metrics.calibration_error(draws) == pytest.approx(np.array(single))


def test_errors_count_as_zero_or_are_left_out() -> None:
    answers = [CHOICES, InstanceAnswer(error="bad")]
    assert measured(METRICS["accuracy_per_token"], answers).tolist() == [[1.0], [0.0]]
    assert np.isnan(measured(METRICS["ece"], answers)[1]).all()
    assert {name for name, metric in METRICS.items() if metric.errors == metrics.WRONG} == {
        "accuracy", "accuracy_per_token", "accuracy_per_byte", "accuracy_unconditional", "gold_probability",
        "exact_match", "quasi_exact_match", "f1", "set_f1"}  # fmt: skip


def test_the_worst_variant_of_each_instance() -> None:
    accuracy, bits = METRICS["accuracy"], METRICS["bits_per_byte"]
    one, other = np.array([[1.0], [1.0], [0.0]]), np.array([[1.0], [0.0], [1.0]])
    assert worst(accuracy, [one, other]).tolist() == [[1.0], [0.0], [0.0]]
    one, other = np.array([[6.0, 3.0], [1.0, 1.0]]), np.array([[7.0, 7.0], [math.nan, math.nan]])
    chosen = worst(bits, [one, other])
    assert chosen[0].tolist() == [6.0, 3.0]  # 2 nats per byte are worse than 1
    assert np.isnan(chosen[1]).all()


def test_impossible_choices() -> None:
    some = InstanceAnswer(
        choices=("a", "b"), logprobs=(-math.inf, -5.0), tokens=(1, 1), unconditional=(-math.inf, -1.0)
    )
    all_of_them = InstanceAnswer(
        choices=("a", "b"), logprobs=(-math.inf,) * 2, tokens=(1, 2), unconditional=(-1.0,) * 2, gold=1
    )
    for normalization in metrics.NORMALIZATIONS:
        assert metrics.probabilities(some, normalization).tolist() == [0, 1]
        assert metrics.probabilities(all_of_them, normalization).tolist() == [0.5, 0.5]
        assert METRICS[f"accuracy_{normalization}".rstrip("_")].measure(all_of_them) == (0.5,)
    text = InstanceAnswer(choices=("ab",), logprobs=(-math.inf,), tokens=(1,))
    bits = METRICS["bits_per_byte"]
    numbers = measured(bits, [text])
    assert bits.aggregate(numbers) == math.inf
    left_out = np.full((1, 2), math.nan)
    assert np.isnan(worst(bits, [numbers, left_out])).all()
