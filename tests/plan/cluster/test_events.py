"""A pipeline in virtual time against the formulas of its seconds, utilisation and bubbles."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bench.cluster.events import Pipeline
from bench.cluster.toys import instance
from bench.simulate import Forecast
from flexengine.plan.cluster.costs import ClusterPlan
from flexengine.plan.cluster.devices import DECODE, PREFILL
from flexengine.plan.cluster.job import Shape
from flexengine.schedule.tasks import Op
from tests.plan.cluster import toys


def phases(forecast: Forecast) -> dict[str, tuple[float, float]]:
    """Return by phase the time at which its first task begins and its last task ends."""
    found: dict[str, tuple[float, float]] = {}
    for task, start, end in forecast.spans:
        first, last = found.get(task.phase, (start, end))
        found[task.phase] = (min(first, start), max(last, end))
    return found


def utilisation(forecast: Forecast, stages: int, phase: str | None = None) -> list[float]:
    """Return the busy share of each stage in a phase, or in the whole round. Its complement is the bubble."""
    begin, end = phases(forecast)[phase] if phase else (0.0, forecast.seconds)
    busy = [0.0] * stages
    for task, start, stop in forecast.spans:
        if task.op is Op.COMPUTE and (phase is None or task.phase == phase):
            busy[task.cell.layer] += stop - start
    return [seconds / (end - begin) if end > begin else 0.0 for seconds in busy]


def prefill_bubble(stages: int, parts: int) -> float:
    """Return the idle share of equal stages while `parts` micro-batches pass once: (m - 1) / (m - 1 + parts)."""
    return (stages - 1) / (stages - 1 + parts)


def decode_bubble(stages: int, cohorts: int) -> float:
    """Return the idle share of equal stages in steady decoding: a step takes max(stages, cohorts), and a stage works
    `cohorts` of them."""
    return max(0.0, 1 - cohorts / stages)


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_prefill_of_equal_stages(stages: int, parts: int) -> None:
    forecast = Pipeline([2.0] * stages, [1.0] * stages, cohorts=parts).simulate()
    assert forecast.seconds == pytest.approx(2.0 * (parts + stages - 1))
    busy = utilisation(forecast, stages, PREFILL)
    assert busy == pytest.approx([1 - prefill_bubble(stages, parts)] * stages)


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("cohorts", [1, 2, 4, 8])
def test_decode_of_equal_stages(stages: int, cohorts: int) -> None:
    """In steady state a step takes as long as the longer of its cohorts and its stages."""
    ones = [1.0] * stages
    few, many = (Pipeline(ones, ones, cohorts=cohorts, steps=steps).simulate() for steps in (10, 30))
    period = (many.seconds - few.seconds) / 20
    assert period == pytest.approx(max(stages, cohorts))
    busy = [(many.busy[f"stage {j}"] - few.busy[f"stage {j}"]) / 20 / period for j in range(stages)]
    assert busy == pytest.approx([1 - decode_bubble(stages, cohorts)] * stages)


def test_unequal_stages() -> None:
    """The slowest stage or link sets the pace of prefill; decoding waits for a sequence's last token."""
    pipeline = Pipeline([1.0, 3.0, 2.0], [1.0, 1.5, 0.5], [0.5, 4.0], [0.1, 0.2], 0.3, parts=2, cohorts=2, steps=0)
    assert pipeline.simulate().seconds == pytest.approx(3 * 4.0 + 10.5 + 0.3)
    single = Pipeline([1.0, 3.0], [1.0, 1.5], [0.0], [0.1], 0.3, cohorts=1, steps=50).simulate()
    assert single.seconds == pytest.approx(4.0 + 0.3 + 50 * (2.6 + 0.3), rel=1e-6)
    full = Pipeline([1.0, 3.0], [1.0, 1.5], [0.0], [0.1], 0.3, cohorts=4, steps=50).simulate()
    assert full.seconds == pytest.approx(4 * 3.0 + 1.0 + 50 * 4 * 1.5, rel=0.02)


def test_a_cohort_decodes_after_all_of_its_parts() -> None:
    forecast = Pipeline([1.0, 1.0], [1.0, 1.0], parts=3, cohorts=2, steps=2).simulate()
    ends = {}
    for task, start, end in forecast.spans:
        key = (task.phase, task.cell.batch)
        ends[key] = (min(ends.get(key, (start, end))[0], start), max(ends.get(key, (start, end))[1], end))
    for cohort in range(2):
        assert ends[DECODE, cohort][0] >= ends[PREFILL, cohort][1]
    assert phases(forecast)[PREFILL][0] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_no_lane_does_two_things_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(2, 5))
    pipeline = Pipeline(rng.uniform(0.1, 2, stages).tolist(), rng.uniform(0.1, 2, stages).tolist(),
                        rng.uniform(0, 1, stages - 1).tolist(), rng.uniform(0, 1, stages - 1).tolist(), 0.1,
                        parts=2, cohorts=3, steps=4)  # fmt: skip
    lanes: dict[str, list[tuple[float, float]]] = {}
    for task, start, end in pipeline.simulate().spans:
        lanes.setdefault(task.lane, []).append((start, end))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
    assert len(lanes["stage 0"]) == 3 * (2 + 4)


@pytest.mark.parametrize("seed", range(8))
def test_seconds_of_a_plan_are_those_of_its_tasks(seed: int) -> None:
    """Of stages in order, with units anywhere: unequal links, empty inner stages, parts of cohorts."""
    rng, numbers = np.random.default_rng(seed), instance(seed)
    stage_of = [0, *sorted(rng.integers(0, numbers.stages, numbers.units - 2).tolist()), numbers.stages - 1]
    made = toys.task(toys.cluster(*(toys.device(f"d{j}", 1, 1) for j in range(numbers.stages))))
    plan = ClusterPlan(made, made.cluster.devices, Shape(1, 1, 1), numbers, stage_of, [0] * numbers.units)
    assert plan.simulated_seconds == Pipeline.of(plan).simulate().seconds * numbers.rounds


def test_a_plan_of_too_many_micro_batches_is_not_simulated() -> None:
    numbers = replace(instance(0), steps=10**6)
    made = toys.task(toys.cluster(*(toys.device(f"d{j}", 1, 1) for j in range(numbers.stages))))
    units = [0, *[numbers.stages - 1] * (numbers.units - 1)]
    plan = ClusterPlan(made, made.cluster.devices, Shape(1, 1, 1), numbers, units, [0] * numbers.units)
    assert plan.simulated_seconds is None
