"""The virtual clock, against sums and the busiest lane."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import simulate
from flexengine.places import STAGED, TIERS, Routes
from flexengine.schedule.batches import Batch
from flexengine.schedule.program import Program
from flexengine.schedule.tasks import Op, Task
from tests.helpers.strategies import SEEDS
from tests.helpers.toy import (
    KINDS,
    ROUTES,
    Homes,
    tasks_of,
    uniform,
)

ONE_HOME = st.sampled_from([("host",), ("disk",)])


def costs(seed: int) -> Callable[[Task], float]:
    """A constant per op, home and lane, as of equal layers and equal batches."""
    known: dict[tuple[Op, str, str], float] = {}
    rng = random.Random(seed)

    def seconds(task: Task) -> float:
        key = task.op, getattr(task, "home", ""), task.lane
        return known.setdefault(key, rng.uniform(0.2, 1) * (4 if task.cell.batch < 0 else 1))

    return seconds


def program_of(streamed: Homes, slots: int, routes: Routes, batches: list[Batch], sweeps: int) -> list[Task]:
    program = Program(streamed, len(streamed) - 1, slots, routes)
    return [t for tasks in tasks_of(program, batches, sweeps) for t in tasks]


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("slots", [2, 3])
@given(home=ONE_HOME, seed=SEEDS)
@settings(max_examples=20)
def test_overlap_reaches_the_busiest_lane(slots: int, routes: str, home: tuple[str, ...], seed: int) -> None:
    forecast = simulate(program_of([home] * 9, slots, ROUTES[routes], uniform(4), 12), costs(seed))
    assert max(forecast.busy.values()) <= forecast.seconds <= 1.15 * max(forecast.busy.values())


@pytest.mark.parametrize("routes", ROUTES)
@given(
    streamed=st.lists(st.sampled_from(KINDS), min_size=7, max_size=7), slots=st.integers(1, 3),
    cache=st.sampled_from(TIERS), hidden=st.sampled_from(TIERS), seed=SEEDS,
)  # fmt: skip
@settings(max_examples=20)
def test_without_overlap_the_clock_adds_up(
    routes: str, streamed: Homes, slots: int, cache: str, hidden: str, seed: int
) -> None:
    cost = costs(seed)
    tasks = program_of(streamed, slots, ROUTES[routes], uniform(3, cache, hidden), 6)
    total = sum(map(cost, tasks))
    assert simulate(tasks, cost, overlap=False).seconds == pytest.approx(total)
    forecast = simulate(tasks, cost)
    assert sum(forecast.busy.values()) == pytest.approx(total)
    assert max(forecast.busy.values()) <= forecast.seconds + 1e-9 <= total + 2e-9


@pytest.mark.parametrize("routes", ROUTES)
@given(home=ONE_HOME, count=st.integers(1, 4), seed=SEEDS)
@settings(max_examples=30)
def test_more_slots_are_never_slower(routes: str, home: tuple[str, ...], count: int, seed: int) -> None:
    """For weights from one home. With two, a lane that is first come first served may lose a few per cent."""
    cost, batches = costs(seed), uniform(count)
    one, two, three = (
        simulate(program_of([home] * 7, slots, ROUTES[routes], batches, 6), cost).seconds for slots in (1, 2, 3)
    )
    assert two < 0.999 * one
    assert three <= two + 1e-9


@pytest.mark.parametrize("data", [("host", "device"), ("device", "host")])
def test_load_compute_and_store_work_at_the_same_time(data: tuple[str, str]) -> None:
    """If each takes a second per cell, a cell takes a second. With two buffers a load would wait for a store: 1.5."""
    program = program_of([()] * 31, 2, STAGED, uniform(3, *data), 2)
    moves = (Op.LOAD_CACHE, Op.LOAD_HIDDEN, Op.STORE_CACHE, Op.STORE_HIDDEN, Op.COMPUTE)
    forecast = simulate(program, lambda task: float(task.op in moves))
    assert forecast.busy["device"] <= forecast.seconds <= 1.1 * forecast.busy["device"]


def test_no_span_overlaps_what_it_waits_for() -> None:
    streamed: Homes = [("host",), ("disk",), ("host", "disk"), (), ("disk",)]
    forecast = simulate(program_of(streamed, 2, STAGED, uniform(3, "disk", "host"), 4), costs(13))
    spans = forecast.spans
    for i, (task, start, _) in enumerate(spans):
        for earlier, _, end in spans[:i]:
            conflict = set(task.reads) & set(earlier.writes) or set(task.writes) & {*earlier.reads, *earlier.writes}
            if conflict or task.lane == earlier.lane:
                assert start >= end - 1e-9, (earlier, task)
