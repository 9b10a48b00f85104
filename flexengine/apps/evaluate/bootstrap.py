"""Confidence intervals by the bootstrap: instances are drawn with replacement, and percentiles are taken."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Aggregate = Callable[[Floats], Floats]
LEVEL = 0.95
_MOST_DRAWN = 1 << 20  # instances drawn at a time, which bounds memory


def interval(values: Sequence[Floats], aggregate: Aggregate, resamples: int, seed: int) -> tuple[float, float]:
    """Return the ends of the interval of a metric, or of the difference of two runs, with confidence LEVEL.

    Args:
        values: one array [instances, numbers], from which the metric is computed. With two arrays, of the
            same instances in the same order, the interval is that of the second's metric minus the first's; each draw
            takes the same instances from both.
        aggregate: return the metrics, [...], of arrays [..., instances, numbers].
        resamples: number of draws.
        seed: seed of the draws.
    """
    from scipy.stats import bootstrap  # imported here, as scipy.stats takes a second

    def statistic(drawn: Any, axis: int = -1) -> Any:
        chosen = np.moveaxis(np.asarray(drawn), axis, -1)
        found = [aggregate(each[chosen]) for each in values]
        return found[0] if len(found) == 1 else found[1] - found[0]

    count = len(values[0])
    if count == 1:  # every draw is the same
        only = float(statistic(np.arange(1)))
        return only, only
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # an infinite metric has an end that is NaN
        warnings.simplefilter("ignore")
        drawn = bootstrap((np.arange(count),), statistic, n_resamples=resamples, batch=max(1, _MOST_DRAWN // count),
                          vectorized=True, confidence_level=LEVEL, method="percentile",
                          random_state=np.random.default_rng(seed))  # fmt: skip
    low, high = drawn.confidence_interval
    return float(low), float(high)
