"""The figures of an evaluation: each metric of each scenario, variant and run, with its interval and difference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexengine.apps.evaluate.answers import InstanceAnswer
from flexengine.apps.evaluate.bootstrap import Floats, interval
from flexengine.apps.evaluate.instances import Built
from flexengine.apps.evaluate.metrics import METRICS, Metric, measured, worst

WORST = "worst"  # the variant that takes, for each row, the worst of the original and its perturbed copies


@dataclass(frozen=True)
class Draws:
    """How intervals are computed.

    Attributes:
        resamples: number of draws.
        seed: seed of the draws.
    """

    resamples: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Figure:
    """A metric of one scenario, variant and run. Numbers that cannot be computed are None.

    Attributes:
        value: the metric; low and high are the ends of its interval.
        instances: instances of the scenario.
        errors: how many of them have an error.
        errors_counted: how they are counted, `metrics.WRONG` or `metrics.LEFT_OUT`.
        difference: the metric minus that of the first run, over the instances that both count; None for the first run.
    """

    scenario: str
    kind: str
    run: str
    variant: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    instances: int
    errors: int
    errors_counted: str
    higher_is_better: bool | None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None


def figures(
    built: Built, runs: Sequence[str], answers: Sequence[Sequence[InstanceAnswer]], draws: Draws
) -> list[Figure]:
    """Return the figures of a scenario: by metric, then by variant, then by run.

    Args:
        runs: names of the runs.
        answers: answers to the instances of the scenario, for each run.
    """
    return [
        _figure(built, name, variant, runs[number], of_runs[number], of_runs[0] if number else None, draws)
        for name in built.scenario.metrics
        for variant, of_runs in _by_variant(built, METRICS[name], answers)
        for number in range(len(runs))
    ]


@dataclass(frozen=True)
class _Numbers:
    """Numbers of instances, [instances, numbers], and which instances have an error, [instances]."""

    values: Floats
    failed: NDArray[np.bool_]


def _by_variant(
    built: Built, metric: Metric, answers: Sequence[Sequence[InstanceAnswer]]
) -> Iterator[tuple[str, list[_Numbers]]]:
    """Yield each variant with the numbers of all runs; the worst comes last."""
    places: dict[str, list[int]] = {}
    for place, instance in enumerate(built.instances):
        places.setdefault(instance.variant, []).append(place)
    of_variants = [
        [_numbers(metric, [each[place] for place in chosen]) for each in answers] for chosen in places.values()
    ]
    yield from zip(places, of_variants, strict=True)
    if len(places) > 1 and metric.single:
        yield WORST, [_worst(metric, of_run) for of_run in zip(*of_variants, strict=True)]


def _numbers(metric: Metric, answers: Sequence[InstanceAnswer]) -> _Numbers:
    return _Numbers(measured(metric, answers), np.array([each.error is not None for each in answers]))


def _worst(metric: Metric, variants: Sequence[_Numbers]) -> _Numbers:
    failed = np.any([each.failed for each in variants], axis=0)
    return _Numbers(worst(metric, [each.values for each in variants]), failed)


def _figure(
    built: Built, name: str, variant: str, run: str, own: _Numbers, first: _Numbers | None, draws: Draws
) -> Figure:
    metric, scenario = METRICS[name], built.scenario
    value, low, high = _estimate(metric, [own.values], draws)
    difference = (None, None, None) if first is None else _estimate(metric, [first.values, own.values], draws)
    return Figure(scenario.name, scenario.kind, run, variant, name, value, low, high, len(own.values),
                  int(own.failed.sum()), metric.errors, metric.higher_is_better, *difference)  # fmt: skip


def _estimate(
    metric: Metric, values: Sequence[Floats], draws: Draws
) -> tuple[float | None, float | None, float | None]:
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
