"""Statistics of active neurons, against sets of numbers."""

from collections.abc import Iterable
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest

from flexengine.guests.flash.traces import ROWS, WINDOW, Trace, active_share, row_unions, sharing, window_unions

STRETCHES, TOKENS, NEURONS = 11, 40, 60


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Neurons differ in frequency, and stay active for some tokens."""
    random = np.random.default_rng(5)
    often = random.random((STRETCHES, TOKENS, NEURONS)) < random.random(NEURONS) * 0.2
    return often | np.roll(often, 1, axis=1)


def sets(trace: Trace) -> list[list[set[int]]]:
    return [[set(np.flatnonzero(token).tolist()) for token in stretch] for stretch in trace]


def share(found: Iterable[set[int]]) -> float:
    return mean(len(each) for each in found) / NEURONS


def test_active_share(trace: Trace) -> None:
    assert active_share(trace) == pytest.approx(share(token for stretch in sets(trace) for token in stretch))


def test_unions_of_rows(trace: Trace) -> None:
    """Tokens at the same place of b stretches."""
    stretches = sets(trace)
    for b, found in enumerate(row_unions(trace), start=1):
        places = [(s, t) for s in range(STRETCHES) for t in range(TOKENS)]
        groups = ([stretches[(s + i) % STRETCHES][t] for i in range(b)] for s, t in places)
        assert found == pytest.approx(share(set.union(*group) for group in groups))
    assert len(row_unions(trace)) == ROWS
    assert len(row_unions(trace[:3])) == 3


def test_windows_and_new_neurons(trace: Trace) -> None:
    """s_agg(k), and s_agg(k + 1) - s_agg(k) = neurons of a token that the k tokens before did not have."""
    stretches, last = sets(trace), TOKENS - WINDOW  # the last beginning of a window
    windows = window_unions(trace)
    assert len(windows) == WINDOW + 1
    for k, found in enumerate(windows, start=1):
        unions = (set.union(*stretch[t : t + k]) for stretch in stretches for t in range(last))
        assert found == pytest.approx(share(unions))
    assert sharing(trace).window == windows
    gains = [after - before for before, after in pairwise(windows)]
    for k, found in enumerate(gains, start=1):
        new = (stretch[t + k] - set.union(*stretch[t : t + k]) for stretch in stretches for t in range(last))
        assert found == pytest.approx(share(new))
    assert gains == sorted(gains, reverse=True)  # concave


def test_short_stretches_have_few_windows(trace: Trace) -> None:
    assert window_unions(trace[:, :3]) == pytest.approx(window_unions(trace[:, :3], most=3))
    assert len(window_unions(trace[:, :3])) == 3


def test_a_trace_without_tokens() -> None:
    assert active_share(np.zeros((2, 0, NEURONS), np.bool_)) == 0.0
