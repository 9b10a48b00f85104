"""The figures of an evaluation: each metric of each scenario, variant and run, with its interval and difference. And
the files that hold them, which depend on the scenarios and the models only, not on time or interruptions.

Intervals are those of the bootstrap: instances are drawn with replacement, and percentiles are taken.
"""

import csv
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray

from flexengine import __version__
from flexengine.apps.evaluate.instances import Built, Instance
from flexengine.apps.evaluate.metrics import (
    CHOICE,
    GENERATION,
    METRICS,
    Aggregate,
    Floats,
    InstanceAnswer,
    Metric,
    measured,
    worst,
)
from flexengine.apps.evaluate.runs import Run
from flexengine.job.files import write_whole
from flexengine.job.results import encode_fields

RESULTS = ("results.json", "results.csv", "results.html", "instances.jsonl")
MINUS = "\N{MINUS SIGN}"
WORST = "worst"  # the variant that takes, for each row, the worst of the original and its perturbed copies
LEVEL = 0.95
SEED = 0  # of the draws
_MOST_DRAWN = 1 << 20  # instances drawn at a time, which bounds memory
_Numbers = tuple[Floats, NDArray[np.bool_]]  # [instances, numbers], and [instances]: whether it has an error
_Estimate = tuple[float | None, float | None, float | None]


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
    built: Built, runs: Sequence[str], answers: Sequence[Sequence[InstanceAnswer]], resamples: int
) -> list[Figure]:
    """Return the figures of a scenario: by metric, then by variant, then by run. answers: answers to the instances of
    the scenario, for each run. resamples: draws of the bootstrap."""
    found, scenario = list[Figure](), built.scenario
    for name in scenario.metrics:
        metric = METRICS[name]
        for variant, of_runs in _by_variant(built, metric, answers):
            first = None
            for run, (values, failed) in zip(runs, of_runs, strict=True):
                difference = (None, None, None) if first is None else _estimate(metric, [first, values], resamples)
                first = values if first is None else first
                found.append(
                    Figure(scenario.name, scenario.kind, run, variant, name, *_estimate(metric, [values], resamples),
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
        worsts = []
        for of_run in zip(*of_variants, strict=True):
            values, failed = zip(*of_run, strict=True)
            worsts.append((worst(metric, values), np.any(failed, axis=0)))
        yield WORST, worsts


def _estimate(metric: Metric, values: Sequence[Floats], resamples: int) -> _Estimate:
    """Return a metric, or the difference of two, with the ends of its interval, over the instances that all have."""
    counted = ~np.isnan(np.concatenate(values, axis=-1)).any(axis=-1)
    if not counted.any():
        return None, None, None
    chosen = [each[counted] for each in values]
    single = [float(metric.aggregate(each)) for each in chosen]
    value = single[0] if len(single) == 1 else single[1] - single[0]
    numbers = (value, *interval(chosen, metric.aggregate, resamples, SEED))
    point, low, high = (each if np.isfinite(each) else None for each in numbers)
    return point, low, high


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


@dataclass(frozen=True)
class Evaluation:
    """The contents of the files."""

    runs: Sequence[Run]  # the runs; the first is the one that others are compared with
    scenarios: Sequence[Built]
    answers: Sequence[Sequence[Sequence[InstanceAnswer]]]  # answers to the instances, by run, scenario and instance
    figures: Sequence[Figure]
    resamples: int  # draws of the bootstrap


def write_files(evaluation: Evaluation, folder: Path) -> None:
    """Write the files RESULTS. A line of instances.jsonl is the answer of a run to an instance."""
    values = summary(evaluation)
    as_json = json.dumps(values, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    as_csv = io.StringIO()
    writer = csv.DictWriter(as_csv, [field.name for field in fields(Figure)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(values["results"])
    texts = [text.encode() for text in (as_json, as_csv.getvalue(), page(values))]
    instances = b"".join(
        encode_fields({"run": run.name, "scenario": built.scenario.name, **_line(built, instance, answer)})
        for run, of_run in zip(evaluation.runs, evaluation.answers, strict=True)
        for built, answers in zip(evaluation.scenarios, of_run, strict=True)
        for instance, answer in zip(built.instances, answers, strict=True)
    )
    for name, data in zip(RESULTS, [*texts, instances], strict=True):
        write_whole(folder / name, data)


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the results as JSON values."""
    draws = {"level": LEVEL, "resamples": evaluation.resamples, "seed": SEED}
    runs = [
        {"name": run.name, "model": run.model, "lossy": run.lossy.enabled, "dtype": run.dtype}
        for run in evaluation.runs
    ]
    scenarios = [
        {
            **built.scenario.described(),
            "instances": len(built.instances),
            "unusable": sum(each.error is not None for each in built.instances),
            "shots": list(built.shots),
            "sha256": built.digests,
        }
        for built in evaluation.scenarios
    ]
    return {
        "version": __version__,
        "bootstrap": draws,
        "runs": runs,
        "scenarios": scenarios,
        "results": [asdict(figure) for figure in evaluation.figures],
    }


def page(summary: dict[str, Any]) -> str:
    """Return results.html, a page without references to other files. Jinja escapes all text. summary: as in
    results.json."""
    tables, count = [], len(summary["runs"])  # a line of a scenario's table has the figures of all runs
    for scenario in summary["scenarios"]:
        own = [figure for figure in summary["results"] if figure["scenario"] == scenario["name"]]
        tables.append((scenario, [own[begin : begin + count] for begin in range(0, len(own), count)]))
    source = files("flexengine.apps.evaluate").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    return environment.from_string(source).render(s=summary, tables=tables)


def number(value: float | None, sign: str = "") -> str:
    """Return a number with 4 significant digits after the point; "-" for None. sign: "+" shows it for all numbers."""
    if value is None:
        return "-"
    text = f"{value:{sign}.4f}" if abs(value) < 1e6 else f"{value:{sign}.4g}"
    return text.replace("-", MINUS)


def _line(built: Built, instance: Instance, answer: InstanceAnswer) -> dict[str, Any]:
    place = {"row": instance.number, "line": instance.line, "variant": instance.variant, "context": instance.context}
    if answer.error is not None:
        return {**place, "metrics": {}, "error": answer.error}
    numbers = {name: METRICS[name].measure(answer) for name in built.scenario.metrics}
    metrics = {name: list(each) if len(each) > 1 else each[0] for name, each in numbers.items()}
    own: dict[str, Any] = {"choices": answer.choices, "gold": answer.gold} if built.scenario.kind == CHOICE else {}
    if answer.unconditional:
        own["unconditional_logprobs"] = answer.unconditional
    own |= {"logprobs": answer.logprobs, "tokens": answer.tokens}
    if built.scenario.kind == GENERATION:
        own = {"text": answer.text, "references": answer.references, "tokens": answer.generated}
    return {**place, **own, "metrics": metrics, "error": None}
