"""Examples before a question: the first, random, balanced and nearest."""

import pytest

from flexengine.apps.wrangle.plan import chosen, nearest_shots, shot_count
from flexengine.apps.wrangle.questions import CellQuestion
from flexengine.apps.wrangle.spec import Spec
from flexengine.errors import InvalidInput

POOL = [CellQuestion(i, "match", f"text {'abcdefgh'[i] * 4}", "Yes" if i % 4 == 0 else "No") for i in range(8)]
CHOICES = ("Yes", "No")


def spec(**options: object) -> Spec:
    return Spec("match", ("t.csv",), **options)  # type: ignore[arg-type]


def test_given_are_the_first() -> None:
    assert chosen(spec(examples="e.csv"), POOL, 3, CHOICES) == POOL[:3]


def test_random_is_seeded() -> None:
    shots = [tuple(chosen(spec(seed=seed), POOL, 3, CHOICES)) for seed in range(20)]
    assert shots[0] == tuple(chosen(spec(seed=0), POOL, 3, CHOICES))
    assert len(set(shots)) > 10
    assert all(len(set(three)) == 3 for three in shots)
    assert {q for three in shots for q in three} == set(POOL)


@pytest.mark.parametrize(("count", "yes"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)])
def test_balanced(count: int, yes: int) -> None:
    orders = set()
    for seed in range(20):
        shots = chosen(spec(pick="balanced", seed=seed), POOL, count, CHOICES)
        assert (len(shots), len(set(shots)), sum(q.answer == "Yes" for q in shots)) == (count, count, yes)
        orders.add(tuple(q.answer for q in shots))
    assert count < 2 or len(orders) > 1  # the answers do not alternate


def test_balanced_needs_enough_of_each() -> None:
    with pytest.raises(InvalidInput, match="needs 3 examples with the answer Yes, but there are 2; lower --shots"):
        chosen(spec(pick="balanced"), POOL, 5, CHOICES)


def test_nearest_stands_last() -> None:
    questions = [CellQuestion(0, "match", "cccc and bbbb cccc"), CellQuestion(1, "match", "hhhh")]
    first, second = nearest_shots(spec(), questions, POOL, 2, 0)
    assert [q.row for q in first] == [1, 2]
    assert second[-1].row == 7


def test_nearest_leaves_its_own_row_out() -> None:
    """All examples of the row: a row may have several checked cells."""
    pool = [*POOL, CellQuestion(2, "other", "text cccc", "No")]
    ((*_, shot),) = nearest_shots(spec(), [pool[2]], pool, 1, 0)
    assert shot.row == 2
    (shots,) = nearest_shots(spec(), [pool[2]], pool, 7, 2)
    assert sorted(q.row for q in shots) == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("options", "available", "left_out", "count"), [
    ({}, 30, 0, 10), ({}, 4, 0, 4), ({}, 30, 1, 10), ({}, 5, 1, 2), ({}, 0, 0, 0),
    ({"pick": "nearest"}, 5, 1, 5), ({"shots": 5}, 5, 1, 5), ({"shots": 0}, 5, 0, 0),
    ({"shots": 4, "pick": "nearest"}, 6, 2, 4),
])  # fmt: skip
def test_count(options: dict[str, object], available: int, left_out: int, count: int) -> None:
    assert shot_count(spec(**options), available, left_out) == count


@pytest.mark.parametrize(("options", "available", "left_out", "message"), [
    ({"shots": 6}, 5, 0, "--shots is 6, but there are 5 examples; give at most so many"),
    ({"shots": 5, "pick": "nearest"}, 5, 1, "--shots is 5, but there are 4 examples in other rows; give at most"),
    ({"shots": 5, "pick": "nearest"}, 6, 2, "--shots is 5, but there are 4 examples in other rows; give at most"),
    ({"shots": 1}, 0, 0, "--shots is 1, but there are 0 examples"),
    ({"pick": "random"}, 0, 0, "--pick random has 0 examples to choose from"),
])  # fmt: skip
def test_too_many(options: dict[str, object], available: int, left_out: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        shot_count(spec(**options), available, left_out)
