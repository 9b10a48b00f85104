"""Statistics of active neurons, on which the gain of flash mode depends (LLM in a flash, section 3.1).

A trace is bool [stretches, tokens, neurons]: the active neurons of one layer, for the successive tokens of several
stretches of text. All results are shares of the layer's neurons.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Trace = NDArray[np.bool_]
ROWS, WINDOW = 8, 16  # most rows of a union, most tokens of a window


@dataclass(frozen=True)
class NeuronSharing:
    """How much the active neurons of several tokens have in common.

    Attributes:
        active: mean share of a token.
        rows: mean share of the union of b independent tokens, for b = 1, 2, ...; at most the number of stretches.
        window: s_agg(k), the mean share of the union of k successive tokens, for k = 1, 2, ...
        new: mean share of a token's neurons that the k tokens before did not have: window[k] - window[k - 1].
    """

    active: float
    rows: tuple[float, ...]
    window: tuple[float, ...]

    @property
    def new(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in zip(self.window, self.window[1:], strict=False))


def sharing(trace: Trace) -> NeuronSharing:
    """Return the statistics of a trace."""
    return NeuronSharing(active_share(trace), row_unions(trace), window_unions(trace))


def active_share(trace: Trace) -> float:
    """Return the mean share of active neurons of a token; 0.0 for no tokens."""
    return float(trace.mean()) if trace.size else 0.0


def row_unions(trace: Trace, most: int = ROWS) -> tuple[float, ...]:
    """Return the mean share of the union of b independent tokens, for b = 1 to `most` or the number of stretches.

    Tokens at the same place of neighbouring stretches, the first after the last, count as independent.
    """
    union, shares = trace.copy(), list[float]()
    for b in range(min(most, len(trace))):
        if b:
            union |= np.roll(trace, -b, axis=0)
        shares.append(active_share(union))
    return tuple(shares)


def window_unions(trace: Trace, most: int = WINDOW + 1) -> tuple[float, ...]:
    """Return s_agg(k), the mean share of the union of k successive tokens, for k = 1 to `most` or the tokens of a
    stretch.

    All k have the same windows' beginnings, so the difference of two neighbours is exactly the mean share of new
    neurons.
    """
    most = min(most, trace.shape[1])
    beginnings = trace.shape[1] - most + 1
    union, shares = trace[:, :beginnings].copy(), list[float]()
    for k in range(most):
        union |= trace[:, k : k + beginnings]
        shares.append(active_share(union))
    return tuple(shares)
