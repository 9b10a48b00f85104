"""The draw of shots."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flexengine.apps.evaluate.instances import draw


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.data(), st.integers(0, 99))
def test_labels_are_balanced(labels: list[str], data: st.DataObject, seed: int) -> None:
    """No label could have one row more without taking it from a label that has as many rows or fewer."""
    count = data.draw(st.integers(1, len(labels)))
    chosen = draw(labels, count, seed, True)
    assert len(chosen) == len(set(chosen)) == count
    drawn, all_rows = Counter(labels[number] for number in chosen), Counter(labels)
    for label in all_rows:
        if drawn[label] < all_rows[label]:
            assert all(drawn[other] <= drawn[label] + 1 for other in all_rows)


def test_frequent_labels_come_first() -> None:
    assert {draw(["b", "a", "a"], 1, seed, True)[0] for seed in range(20)} == {1, 2}


def test_draws_without_balance_follow_the_frequencies() -> None:
    labels = ["a"] * 90 + ["b"] * 10
    drawn = [labels[draw(labels, 1, seed, False)[0]] for seed in range(500)]
    assert 20 < drawn.count("b") < 90  # 50 are expected, with a standard deviation of 6.7


def test_a_draw_depends_on_the_seed_alone() -> None:
    labels = [str(number % 3) for number in range(60)]
    assert draw(labels, 6, 5, True) == draw(labels, 6, 5, True)
    assert len({tuple(draw(labels, 6, seed, True)) for seed in range(20)}) == 20


def test_rows_of_unique_labels_are_drawn() -> None:
    """Each row is reached, as the order of labels of equal count is random, too."""
    labels = [f"label {number}" for number in range(8)]
    draws = {tuple(draw(labels, 2, seed, True)) for seed in range(200)}
    assert len(draws) > 40  # of 56
    assert {number for each in draws for number in each} == set(range(8))
