"""Bits per layer: the integer program against all choices."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.plan.lp import Format, Layer, Option, adabits, total

FORMATS: tuple[Format, ...] = (None, "int8", "int4", "int3")


def layer(*options: tuple[int, float]) -> Layer:
    return {b: Option(*option) for b, option in zip(FORMATS, options, strict=False)}


def best(layers: list[Layer], budget: int) -> float | None:
    """The least harm of all choices within the budget."""
    choices = (total(layers, formats) for formats in product(*layers))
    return min((choice.harm for choice in choices if choice.nbytes <= budget), default=None)


SIZES, HARMS = st.integers(1, 10**10), st.floats(0, 1e6).map(lambda x: round(x, 3))
LAYERS = st.lists(st.lists(st.tuples(SIZES, HARMS), min_size=1, max_size=4).map(lambda each: layer(*each)), min_size=1,
                  max_size=5)  # fmt: skip


@settings(max_examples=30)
@given(LAYERS, st.floats(0, 1.1))
def test_the_least_harm_of_all_choices(layers: list[Layer], share: float) -> None:
    """Up to the solver's gap of 1e-4; the budget is kept to the byte."""
    budget = int(share * sum(max(option.nbytes for option in each.values()) for each in layers))
    found, expected = adabits(layers, budget), best(layers, budget)
    if found is None or expected is None:
        assert found is expected
        return
    chosen, most = total(layers, found), max(option.harm for each in layers for option in each.values())
    assert chosen.nbytes <= budget
    assert chosen.harm <= expected + 1e-4 * (expected + most)


def test_a_budget_that_holds_a_choice_exactly() -> None:
    """Sizes as of layers of 1 GB: one byte decides, although the solver's tolerance is a kilobyte."""
    layers = [layer((10**9 + 7, 0.0), (5 * 10**8 + 1, 1.0))] * 6
    for exact in range(7):
        nbytes = exact * (10**9 + 7) + (6 - exact) * (5 * 10**8 + 1)
        for budget, expected in ((nbytes, exact), (nbytes - 1, exact - 1)):
            found = adabits(layers, budget)
            assert (found is None) if expected < 0 else (found is not None and found.count(None) == expected)


@pytest.mark.parametrize(("harms", "expected"), [
    ((9.0, 1.0, 1.0), (None, "int8", "int8")), ((1.0, 1.0, 9.0), ("int8", "int8", None)),
])  # fmt: skip
def test_the_most_harmed_layer_keeps_its_numbers(harms: tuple[float, ...], expected: tuple[Format, ...]) -> None:
    layers = [layer((100, 0.0), (50, harm)) for harm in harms]
    assert adabits(layers, 200) == expected


def test_nothing_fits() -> None:
    assert adabits([layer((100, 0.0), (50, 1.0))] * 2, 99) is None
    assert adabits([], 0) == ()
