"""Metrics against scikit-learn, and how they count answers that are none."""

import random

import pytest
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from flexengine.apps.wrangle.run import (
    Judged,
    TableAnswer,
    answer_of,
    described,
    metrics_of,
    normalised,
    plain,
)
from flexengine.apps.wrangle.spec import IMPUTE, MATCH, TRANSFORM


def test_yes_no_like_scikit_learn() -> None:
    rng = random.Random(1)
    for _ in range(20):
        judged = [Judged("Yes", "Yes"), *(Judged(*rng.choices(["Yes", "No"], k=2)) for _ in range(30))]
        labels, answers = zip(*((one.label, one.answer) for one in judged), strict=True)
        found = metrics_of(MATCH, judged)
        for name, score in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
            assert found[name] == pytest.approx(score(labels, answers, pos_label="Yes"))
        assert found["accuracy"] == pytest.approx(accuracy_score(labels, answers))
        assert found["without"] == {name: found[name] for name in found["without"]}


def test_garbage_of_yes_no() -> None:
    """On a Yes row garbage is a false negative; on a No row it is no false positive."""
    judged = [Judged("Yes", "Yes"), Judged("Yes", "maybe"), Judged("No", "maybe"), Judged("No", None),
              Judged("No", "No"), Judged("No", "Yes")]  # fmt: skip
    found = metrics_of(MATCH, judged)
    assert (found["precision"], found["recall"], found["f1"]) == (0.5, 0.5, 0.5)
    assert (found["accuracy"], found["garbage"], found["failed"], found["lost_yes_rows"]) == (2 / 6, 2, 1, 1)
    assert found["without"] == pytest.approx({"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "accuracy": 2 / 3})
    assert described(found) == [
        "F1 0.5000, precision 0.5000, recall 0.5000, accuracy 0.3333 (6 labelled answers, 2 of them Yes)",
        "2 neither Yes nor No and 1 failed: counted as not Yes, so 1 on Yes rows lower recall and F1, precision leaves"
        " them out, and accuracy counts them as wrong; without them: F1 0.6667, precision 0.5000, recall 1.0000,"
        " accuracy 0.6667",
    ]


def test_a_ratio_without_a_denominator_is_undefined() -> None:
    found = metrics_of(MATCH, [Judged("No", "No")])
    assert (found["f1"], found["precision"], found["recall"], found["accuracy"]) == (None, None, None, 1.0)
    assert described(found) == [
        "F1 undefined, precision undefined, recall undefined, accuracy 1.0000 (1 labelled answer, 0 of them Yes)"
    ]


@pytest.mark.parametrize(("text", "word"), [
    ("Yes", "Yes"), ("Yes.", "Yes"), (" yes, they are", "Yes"), ("YES\n", "Yes"), ("no", "No"), ("No!", "No"),
    ("Nothing", None), ("not", None), ("maybe yes", None), ("", None), ("yesterday", None),
])  # fmt: skip
def test_yes_or_no(text: str, word: str | None) -> None:
    answer = plain(TableAnswer(text, -1.0))
    assert answer == TableAnswer(word or text, -1.0)


@pytest.mark.parametrize(("text", "same"), [
    ("Los  Angeles", "los angeles"), (" 'new york'. ", "new york"), ("St. Louis", "st. louis"), ('"a".', "a"),
])  # fmt: skip
def test_normalised(text: str, same: str) -> None:
    assert normalised(text) == same


def test_values() -> None:
    found = metrics_of(IMPUTE, [Judged("LA", "la."), Judged("LA", "NY"), Judged("LA", ""), Judged("LA", None)])
    assert found == {"accuracy": 0.25, "rows": 4, "garbage": 1, "failed": 1, "without": {"accuracy": 0.5}}
    assert described(found) == [
        "accuracy 0.2500 (4 labelled answers)",
        "1 empty and 1 failed: counted as wrong in each metric; without them: accuracy 0.5000",
    ]


def test_a_transformation_counts_if_all_its_rows_are_right() -> None:
    judged = [Judged("A", "A", "x"), Judged("B", "B", "x"), Judged("C", "C", "y"), Judged("D", "d", "y"),
              Judged("E", "", "z")]  # fmt: skip
    found = metrics_of(TRANSFORM, judged)
    assert (found["accuracy"], found["row_accuracy"], found["transformations"]) == (1 / 3, 3 / 5, 3)
    assert found["without"] == {"accuracy": 1 / 2, "row_accuracy": 3 / 4, "transformations": 2}
    assert described(found) == [
        "accuracy 0.3333, accuracy of rows 0.6000 (5 labelled answers of 3 transformations)",
        "1 empty: counted as wrong in each metric; without them: accuracy 0.5000, accuracy of rows 0.7500",
    ]


def test_answers() -> None:
    scores = [{"logprob": -3.0, "tokens": 1, "is_greedy": False}, {"logprob": -1.5, "tokens": 2, "is_greedy": True}]
    assert answer_of({"scores": scores, "error": None}, ("Yes", "No")) == TableAnswer(
        "No", 0.817574
    )  # 1 / (1 + exp(-1.5))
    assert answer_of({"scores": scores[:1] * 2, "error": None}, ("Yes", "No")) == TableAnswer("Yes", 0.5)
    made = {"generated_text": " a b ", "finish_reason": "length", "logprobs": [{"logprob": -0.5}, {"logprob": -0.25}]}
    assert answer_of(made | {"error": None}, ()) == TableAnswer("a b", 0.472367, cut=True)  # exp(-0.75)
    assert answer_of({"error": "line 3: too long"}, ("Yes", "No")) == TableAnswer(None, failure="too long")


def test_an_answer_without_text_is_not_right() -> None:
    """The label '"."' is empty after normalisation, as is the answer."""
    found = metrics_of(IMPUTE, [Judged('"."', ""), Judged("LA", "LA")])
    assert found == {"accuracy": 0.5, "rows": 2, "garbage": 1, "failed": 0, "without": {"accuracy": 1.0}}


def test_infinite_log_probabilities() -> None:
    """The results of a job hold null for -inf."""
    scores = [{"logprob": None}, {"logprob": -1.5}]
    assert answer_of({"scores": scores, "error": None}, ("Yes", "No")) == TableAnswer("No", 1.0)
    failed = answer_of({"scores": scores[:1] * 2, "error": None}, ("Yes", "No"))
    assert (failed.text, failed.confidence) == (None, None)
    assert failed.failure is not None
    assert "probability above 0" in failed.failure
    made = {"generated_text": "a", "finish_reason": "stop", "logprobs": [{"logprob": None}, {"logprob": -1.0}]}
    assert answer_of(made, ()) == TableAnswer("a", 0.0)


@pytest.mark.parametrize("place", ["line 3: ", "row 2 (line 3): ", "row 2 (line 3): line 3: "])
def test_a_failure_names_no_line_of_the_rows(place: str) -> None:
    error = f"{place}too long, as line 1 says"
    assert answer_of({"error": error}, ()) == TableAnswer(None, failure="too long, as line 1 says")
