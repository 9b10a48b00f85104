"""Regressions of layer latency: exact on their own form, never negative, good on unseen sizes of noisy profiles."""

import numpy as np
import pytest

from flexengine.errors import InvalidInput
from flexengine.plan.cluster.devices import fit

POINTS = [(v, s) for v in (1, 2, 4, 8) for s in (128, 256, 512)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_recovers_its_own_coefficients(phase: str) -> None:
    known = {"prefill": (1e-3, 2e-4, 0.0, 3e-6, 4e-9), "decode": (1e-3, 1e-5, 2e-7, 3e-8)}[phase]

    def seconds(v: float, s: float) -> float:
        terms = (1, v, s, v * s, v * s * s)
        return sum(a * x for a, x in zip(known, terms, strict=False))

    line = fit(phase, [(v, s, seconds(v, s)) for v, s in POINTS])
    assert line.coefficients[: len(known)] == pytest.approx(known, rel=1e-3, abs=1e-9)


def test_never_negative_and_close_on_unseen_batches() -> None:
    """A roofline with 3 % noise, measured at 1, 2, 4, 8 sequences; unseen are 3, 5, 7."""
    rng = np.random.default_rng(0)

    def seconds(v: float, t: float) -> float:
        return 1e-4 + 5e-4 + 2e-7 * v * t / 2

    line = fit("decode", [(v, t, seconds(v, t) * rng.uniform(0.97, 1.03)) for v, t in POINTS])
    unseen = [(v, t, seconds(v, t)) for v in (3, 5, 7) for t in (384, 768)]
    assert max(abs(line(v, t) / y - 1) for v, t, y in unseen) < 0.06
    assert min(line.coefficients) >= 0
    assert line(1, 1) > 0


def test_knee_where_products_are_limited_by_flop() -> None:
    """The seconds of a roofline: 2 ms of reading up to 8 sequences, then 0.25 ms for each. Unseen: 3, 5, 7, 12."""

    def seconds(v: float, t: float) -> float:
        return max(2e-3, 2.5e-4 * v) + 4e-7 * v * t

    line = fit("decode", [(v, t, seconds(v, t)) for v in (1, 2, 4, 8, 16, 32) for t in (128, 256, 512)])
    assert line.knee == 8
    unseen = [(v, t, seconds(v, t)) for v in (3, 5, 7, 12) for t in (384, 768)]
    assert max(abs(line(v, t) / y - 1) for v, t, y in unseen) < 1e-6


@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.03])
def test_a_straight_line_has_no_knee(noise: float) -> None:
    rng = np.random.default_rng(1)
    points = [(v, t, (1e-3 + 1e-4 * v + 1e-7 * v * t) * rng.uniform(1 - noise, 1 + noise))
              for v in (1, 2, 4, 8, 16) for t in (128, 256, 512)]  # fmt: skip
    assert fit("decode", points).knee == float("inf")


def test_few_points_have_no_knee() -> None:
    line = fit("decode", [(v, t, max(2e-3, 1e-3 * v)) for v in (1, 2, 4) for t in (128, 256, 512)])
    assert line.knee == float("inf")


def test_too_few_points() -> None:
    with pytest.raises(InvalidInput, match="has 3 points, but the regression has 4 coefficients"):
        fit("decode", [(1, 1, 1.0)] * 3)
