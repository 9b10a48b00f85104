"""Two linear regressions per device type, format and layer shape (LLM-PQ, section 4.1):

    prefill  seconds = a0 + a1 v + a2 s + a3 v s + a4 v s^2         v sequences of s prompt tokens
    decode   seconds = c0 + c1 v + c2 t + c3 v t + c4 max(0, v - knee)    v sequences with t cached tokens

LLM-PQ's decode has no knee: products of few sequences take the time in which the weights are read, those of many the
time of their FLOP, and a straight line through both is wrong at either end. Profiles with few points get none.

Coefficients are not negative: a larger batch never takes less time. Least squares without this limit gives negative
seconds for small batches.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from flexengine.errors import InvalidInput

LEAST = {"prefill": 5, "decode": 4}  # points of a profile
WITH_KNEE = 10  # points of a profile: twice the coefficients
CLEARLY = 0.9  # a knee must lower the norm of the errors to this share
NOISE = 1e-3  # mean relative error below which a line needs no knee


def _features(phase: str, batch: float, tokens: float, knee: float) -> tuple[float, ...]:
    """Return the terms of the regression of a phase, in the order above."""
    last = batch * tokens * tokens if phase == "prefill" else max(0.0, batch - knee)
    return 1.0, batch, tokens, batch * tokens, last


@dataclass(frozen=True)
class Regression:
    """A fitted regression.

    Attributes:
        phase: "prefill" or "decode".
        coefficients: in the order of the formulas above, in seconds.
        knee: sequences from which on a product takes the time of its FLOP; infinite if there is none.
    """

    phase: str
    coefficients: tuple[float, ...]
    knee: float = math.inf

    def __call__(self, batch: float, tokens: float) -> float:
        """Return the seconds of a layer. Arguments as in `Latency.layer`."""
        terms = _features(self.phase, batch, tokens, self.knee)
        return sum(a * x for a, x in zip(self.coefficients, terms, strict=True))


def fit(phase: str, points: Sequence[tuple[float, float, float]]) -> Regression:
    """Return the regression with the least relative errors.

    Args:
        phase: "prefill" or "decode".
        points: (batch, tokens, seconds); seconds must be positive.

    Raises:
        InvalidInput: there are fewer points than coefficients.
    """
    if len(points) < LEAST[phase]:
        raise InvalidInput(
            f"a {phase} profile has {len(points)} points, but the regression has {LEAST[phase]}"
            " coefficients; measure as many points or more"
        )
    norm, line = _fit(phase, points, math.inf)
    if phase == "decode" and len(points) >= WITH_KNEE:
        knees = sorted({v for v, _, _ in points})[1:-1]
        better = min((_fit(phase, points, knee) for knee in knees), key=lambda pair: pair[0], default=(norm, line))
        if better[0] < CLEARLY * norm and norm > NOISE * len(points) ** 0.5:
            return better[1]
    return line


def _fit(phase: str, points: Sequence[tuple[float, float, float]], knee: float) -> tuple[float, Regression]:
    """Return the norm of the relative errors, and the regression."""
    rows: NDArray[np.float64] = np.array([_features(phase, v, t, knee) for v, t, _ in points], dtype=float)
    seconds = np.array([y for _, _, y in points], dtype=float)
    scale = np.maximum(rows.max(axis=0), 1e-300)  # without a knee, a term is 0
    found, norm = nnls(rows / scale / seconds[:, None], np.ones(len(points)))
    return float(norm), Regression(phase, tuple(float(a) for a in found / scale), knee if found[-1] else math.inf)


def errors(line: Regression, points: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return predicted / measured - 1 of points (batch, tokens, seconds)."""
    return [line(v, t) / y - 1 for v, t, y in points]
