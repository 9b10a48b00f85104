"""The figures of an evaluation: each metric of each scenario, variant and run, with its interval and difference.

Intervals are those of the bootstrap: instances are drawn with replacement, and percentiles are taken.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexengine.apps.evaluate.instances import Built
from flexengine.apps.evaluate.metrics import METRICS, Aggregate, Floats, InstanceAnswer, Metric, measured, worst

WORST = "worst"  # the variant that takes, for each row, the worst of the original and its perturbed copies
LEVEL = 0.95
_MOST_DRAWN = 1 << 20  # instances drawn at a time, which bounds memory
_Numbers = tuple[Floats, NDArray[np.bool_]]  # [instances, numbers], and [instances]: whether it has an error
_Estimate = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Draws:
    """How intervals are computed."""

    resamples: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Figure:
    """A metric of one scenario, variant and run. Numbers that cannot be computed are None."""

    scenario: str
    kind: str
    run: str
    variant: str
    metric: str
    value: float | None  # the metric; low and high are the ends of its interval
    low: float | None
    high: float | None
    instances: int
    errors: int  # how many of them have an error
    errors_counted: str  # how they are counted, `metrics.WRONG` or `metrics.LEFT_OUT`
    higher_is_better: bool | None
    # The metric minus that of the first run, over the instances that both count; None for the first run.
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None


def figures(
    built: Built, runs: Sequence[str], answers: Sequence[Sequence[InstanceAnswer]], draws: Draws
) -> list[Figure]:
    """Return the figures of a scenario: by metric, then by variant, then by run. answers: answers to the instances of
    the scenario, for each run."""
    found, scenario = list[Figure](), built.scenario
    for name in scenario.metrics:
        metric = METRICS[name]
        for variant, of_runs in _by_variant(built, metric, answers):
            first = None
            for run, (values, failed) in zip(runs, of_runs, strict=True):
                difference = (None, None, None) if first is None else _estimate(metric, [first, values], draws)
                first = values if first is None else first
                found.append(
                    Figure(scenario.name, scenario.kind, run, variant, name, *_estimate(metric, [values], draws),
                           len(values), int(failed.sum()), metric.errors, metric.higher_is_better, *difference)
                )  # fmt: skip
    return found


def _by_variant(
    built: Built, metric: Metric, answers: Sequence[Sequence[InstanceAnswer]]
) -> Iterator[tuple[str, list[_Numbers]]]:
    """Yield each variant with the numbers of all runs; the worst comes last."""
    places: dict[str, list[int]] = {}
    for place, instance in enumerate(built.instances):
        places.setdefault(instance.variant, []).append(place)

    def numbers(own: Sequence[InstanceAnswer]) -> _Numbers:
        return measured(metric, own), np.array([each.error is not None for each in own])

    of_variants = [[numbers([of_run[i] for i in chosen]) for of_run in answers] for chosen in places.values()]
    yield from zip(places, of_variants, strict=True)
    if len(places) > 1 and metric.single:
        yield (
            WORST,
            [
                (worst(metric, [values for values, _ in of_run]), np.any([failed for _, failed in of_run], axis=0))
                for of_run in zip(*of_variants, strict=True)
            ],
        )


def _estimate(metric: Metric, values: Sequence[Floats], draws: Draws) -> _Estimate:
    """Return a metric, or the difference of two, with the ends of its interval, over the instances that all have."""
    counted = ~np.isnan(np.concatenate(values, axis=-1)).any(axis=-1)
    if not counted.any():
        return None, None, None
    chosen = [each[counted] for each in values]
    single = [float(metric.aggregate(each)) for each in chosen]
    value = single[0] if len(single) == 1 else single[1] - single[0]
    low, high = interval(chosen, metric.aggregate, draws.resamples, draws.seed)
    return _finite(value), _finite(low), _finite(high)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def interval(values: Sequence[Floats], aggregate: Aggregate, resamples: int, seed: int) -> tuple[float, float]:
    """Return the ends of the interval of a metric, or of the difference of two runs, with confidence LEVEL.

    Args:
        values: one array [instances, numbers], from which the metric is computed. With two arrays, of the
            same instances in the same order, the interval is that of the second's metric minus the first's; each draw
            takes the same instances from both.
        aggregate: return the metrics, [...], of arrays [..., instances, numbers].
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
