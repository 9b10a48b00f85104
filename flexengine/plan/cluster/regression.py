"""Two linear regressions per device type, format and layer shape (LLM-PQ, section 4.1):

    prefill  seconds = a0 + a1 v + a2 s + a3 v s + a4 v s^2         v sequences of s prompt tokens
    decode   seconds = c0 + c1 v + c2 t + c3 v t                    v sequences with t cached tokens

Coefficients are not negative: a larger batch never takes less time. Least squares without this limit gives negative
seconds for small batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from flexengine.errors import InvalidInput

TERMS = {"prefill": ("1", "v", "s", "v s", "v s^2"), "decode": ("1", "v", "t", "v t")}


def features(phase: str, batch: float, tokens: float) -> tuple[float, ...]:
    """Return the terms of the regression of a phase, in the order of TERMS."""
    plain = (1.0, batch, tokens, batch * tokens)
    return (*plain, batch * tokens * tokens) if phase == "prefill" else plain


@dataclass(frozen=True)
class Line:
    """A fitted regression.

    Attributes:
        phase: "prefill" or "decode".
        coefficients: in the order of TERMS[phase], in seconds.
    """

    phase: str
    coefficients: tuple[float, ...]

    def __call__(self, batch: float, tokens: float) -> float:
        """Return the seconds of a layer. Arguments as in `Latency.layer`."""
        terms = features(self.phase, batch, tokens)
        return sum(a * x for a, x in zip(self.coefficients, terms, strict=True))


def fit(phase: str, points: Sequence[tuple[float, float, float]]) -> Line:
    """Return the regression with the least relative errors.

    Args:
        phase: "prefill" or "decode".
        points: (batch, tokens, seconds); seconds must be positive.

    Raises:
        InvalidInput: there are fewer points than coefficients.
    """
    if len(points) < len(TERMS[phase]):
        raise InvalidInput(f"a {phase} profile has {len(points)} points, but the regression has {len(TERMS[phase])}"
                           " coefficients; measure as many points or more")  # fmt: skip
    rows: NDArray[np.float64] = np.array([features(phase, v, t) for v, t, _ in points], dtype=float)
    seconds = np.array([y for _, _, y in points], dtype=float)
    scale = rows.max(axis=0)
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(points)))
    return Line(phase, tuple(float(a) for a in found / scale))


def errors(line: Line, points: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return predicted / measured - 1 of points (batch, tokens, seconds)."""
    return [line(v, t) / y - 1 for v, t, y in points]
