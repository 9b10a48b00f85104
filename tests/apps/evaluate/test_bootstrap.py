"""Bootstrap intervals."""

import warnings
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom

from flexengine.apps.evaluate.metrics import bits_per_byte, mean, word_perplexity
from flexengine.apps.evaluate.report import interval


def test_interval_of_a_share_is_that_of_the_binomial_distribution() -> None:
    values = np.array([1.0] * 30 + [0.0] * 20)[:, None]
    low, high = interval([values], mean, 20_000, 0)
    assert (low, high) == pytest.approx((binom.ppf(0.025, 50, 0.6) / 50, binom.ppf(0.975, 50, 0.6) / 50), abs=0.021)


def test_interval_of_a_ratio_by_all_draws() -> None:
    values = np.array([[1.0, 2.0], [5.0, 3.0], [4.0, 9.0]])
    exact = [float(bits_per_byte(values[list(draw)])) for draw in product(range(3), repeat=3)]
    low, high = interval([values], bits_per_byte, 20_000, 1)
    assert exact.count(min(exact)) == exact.count(max(exact)) == 1  # of 27 draws: more than 2.5 % each
    assert (low, high) == pytest.approx((min(exact), max(exact)))


def test_differences_are_paired() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(size=(200, 1)) * 10
    low, high = interval([noise, noise + 0.5], mean, 500, 0)
    assert (low, high) == pytest.approx((0.5, 0.5))  # unpaired, the interval would be about 4 wide
    assert interval([noise, noise], mean, 500, 0) == (0.0, 0.0)


def test_the_seed_decides() -> None:
    values = np.random.default_rng(3).random((40, 1))
    assert interval([values], mean, 200, 5) == interval([values], mean, 200, 5)
    assert interval([values], mean, 200, 5) != interval([values], mean, 200, 6)


def test_one_instance_has_an_interval_without_width() -> None:
    assert interval([np.array([[0.25]])], mean, 100, 0) == (0.25, 0.25)


def test_an_infinite_metric_has_no_warning() -> None:
    values = np.array([[1e6, 1.0], [1.0, 1.0], [1.0, 1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = interval([values], word_perplexity, 100, 0)
    assert low == pytest.approx(np.e)
    assert not np.isfinite(high)
