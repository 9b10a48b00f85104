"""plan.feedback against the virtual clock's tasks and brute force, and what a whole job's summary says."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Policy, SamplingParams
from flexengine.measure import store
from flexengine.places import STAGED
from flexengine.plan.cost import Cost
from flexengine.plan.feedback import MAX_RELATIVE_ERROR, MIN_JOB_SECONDS, MIN_LANE_SHARE, SweepMonitor
from flexengine.plan.layout import lay_out
from flexengine.plan.loading import reading as reading_of
from flexengine.plan.workload import Workload
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.tier.machine import Links
from flexengine.worker.weights import Weights
from tests.helpers.clock import Clock
from tests.helpers.plans import DEVICE, DISK, HOST, machine_of, opt


def walked(cost: Cost, policy: Policy, rows: list[tuple[int, int]]) -> tuple[SweepMonitor, Counter[str]]:
    """A job's own sweeps: what SweepMonitor expects of each lane, and the sum over the program's own tasks."""
    layout = lay_out(cost.model, policy, cost.workload, cost.hardware.capacity)
    watch, clock = SweepMonitor(cost, layout), Clock.of(cost, layout)
    program = Program([tuple(unit) for unit in clock.units], len(cost.model.layers), policy.slots, STAGED,
                      demand=clock.demand)  # fmt: skip
    sweeps, tasks = Sweeps(policy, layout.pools), Counter[str]()
    for i, (prompt, outputs) in enumerate(rows):
        sweeps.add(Sequence(i, prompt, outputs))
    while not sweeps.idle:
        batches = sweeps.begin(lambda sequence, pages: None)
        price = clock.seconds(batches)
        for task in program.sweep(sweeps.sweep, batches, sweeps.another):
            tasks[task.lane] += price(task)  # type: ignore[assignment]
        watch.note(batches, 1.0, {"device": 1.0})
        sweeps.advance(batches, set())
    watch.report()
    return watch, tasks


@pytest.mark.parametrize("cache", [DEVICE, HOST, DISK])
@pytest.mark.parametrize("weights", [HOST, (0.2, 0.5, 0.3)])
def test_expected_work_is_that_of_the_tasks(weights: Any, cache: Any) -> None:
    rng = random.Random(2)
    rows = [(rng.randint(20, 400), rng.randint(2, 20)) for _ in range(30)]
    hardware = replace(machine_of(rng, "sim"), sweep_seconds=0.0, sequence_seconds=0.0)
    cost = Cost(opt(4, 512, 8, 5000), hardware, Workload.of(rows))
    policy = Policy(4, 3, weights=weights, cache=cache, activations=(0.5, 0.5, 0), prefill_tokens=512)
    watch, tasks = walked(cost, policy, rows)
    for lane, seconds in tasks.items():
        # The device's batches are counted in the mean; what crosses a link is exact but for the rounding of extents.
        assert watch.expected[lane] == pytest.approx(seconds, rel=0.15 if lane == "device" else 0.08), lane


def test_weights_that_are_brought_home_are_expected_and_no_work_of_a_lane() -> None:
    """The job is predicted to take longer by what they add; lanes are expected to be slowed by their reading."""
    talk = {"device": {"disk_read": 0.5}, "h2d": {"device": 0.25}}
    hardware = replace(machine_of(random.Random(5), "sim"), crosstalk=talk)
    cost = Cost(opt(4, 512, 8, 5000), hardware, Workload({(60, 5): 12}))
    layout = lay_out(cost.model, Policy(4, 3, weights=HOST), cost.workload, hardware.capacity)
    watch = SweepMonitor(cost, layout)
    watch.expect_loading()
    reading, told = reading_of(cost.hardware, layout), cost.predict(layout)
    assert watch.report().predicted_seconds == told.load_seconds > 0
    assert watch.slowed["device"] == 0.5 * reading > 0
    assert watch.slowed["h2d"] == 0.0
    assert watch.expected == {"loading": reading}
    watch.seconds, watch.sweeps, watch.busy = 2 * MIN_JOB_SECONDS, 99, {"loading": 9 * MIN_JOB_SECONDS}
    assert watch.factors() == {}


def test_what_an_earlier_job_has_read_is_not_expected_again(tmp_path: Path) -> None:
    """A job that is closed after the first sweep's first layers, and one that brings the rest: bytes that are read."""
    from tests.helpers.families import make_checkpoint

    make_checkpoint("llama", tmp_path / "m")
    rows, params = [{"prompt_token_ids": [5, 6, 7]}] * 3, SamplingParams(max_tokens=4, ignore_eos=True)
    hardware = replace(machine_of(random.Random(6), "cpu"), checkpoint_read=((1.0, 1e3),))
    with Engine(tmp_path / "m", policy=Policy(3, 1, weights=(0.8, 0, 0.2)), hardware=hardware) as engine:
        expected = [r.token_ids for r in engine.generate(rows, params)]
        whole, alone = engine.summary.plan, engine.core._weights
        assert alone is not None
        every = alone.arrivals.loaded_bytes
    assert whole.lanes["loading"].predicted == pytest.approx(every / 1e3)
    with Engine(tmp_path / "m", policy=Policy(3, 1, weights=(0.8, 0, 0.2)), hardware=hardware) as engine:
        with pytest.MonkeyPatch.context() as patch:
            load = Weights.load_resident
            patch.setattr(Weights, "load_resident", lambda w, unit: load(w, unit) if unit < 1 else 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate(rows, params)
        weights = engine.core._weights
        assert weights is not None
        there = weights.arrivals.loaded_bytes
        assert 0 < there < every
        assert weights.arrivals.missing == pytest.approx(1 - there / every)
        assert [r.token_ids for r in engine.generate(rows, params)] == expected
        assert weights.arrivals.loaded_bytes == every
        assert weights.arrivals.missing == 0
        rest = engine.summary.plan
    assert rest.lanes["loading"].predicted == pytest.approx((every - there) / 1e3)
    fewer = whole.predicted_seconds - rest.predicted_seconds
    assert fewer == pytest.approx(there / 1e3, rel=0.05)  # so slow that the disk is what the sweep waits for


def test_ram_that_weights_have_been_written_to_is_not_new() -> None:
    hardware = replace(machine_of(random.Random(5), "sim"), touch=1e6, checkpoint_read=((1.0, 1e15),))
    cost = Cost(opt(4, 512, 8, 5000), hardware, Workload({(60, 5): 12}))
    layout = lay_out(cost.model, Policy(4, 3), cost.workload, hardware.capacity)
    whole, half = (cost.predict(layout, missing).load_seconds for missing in (1.0, 0.5))
    assert whole - half == pytest.approx(layout.account["device"]["weights"] / 2e6)


def test_a_job_tells_loading_apart(tmp_path: Path) -> None:
    """An engine reads the weights that stay in its first job; the second reads none."""
    from tests.helpers.families import make_checkpoint

    make_checkpoint("llama", tmp_path / "m")
    rows, params = [{"prompt_token_ids": [5, 6, 7]}] * 3, SamplingParams(max_tokens=4, ignore_eos=True)
    with Engine(tmp_path / "m", policy=Policy(2, 2, weights=(0.5, 0, 0.5))) as engine:
        first = [r.token_ids for r in engine.generate(rows, params)]
        one = engine.summary
        assert [r.token_ids for r in engine.generate(rows, params)] == first
        two = engine.summary
    assert one.busy["loading"] > 0
    assert "loading" not in two.busy
    assert one.bytes["disk_read"] == two.bytes["disk_read"] > 0


def test_factors_name_the_lanes_that_are_persistently_off() -> None:
    rng = random.Random(3)
    rows = [(100, 12)] * 12
    cost = Cost(opt(4, 512, 8, 5000), machine_of(rng, "sim"), Workload.of(rows))
    watch, _ = walked(cost, Policy(4, 3, weights=HOST), rows)
    watch.seconds = max(MIN_JOB_SECONDS, 2 * sum(watch.expected.values()))
    watch.busy = dict(watch.expected)
    assert watch.factors() == {}
    big = max(watch.expected, key=lambda lane: watch.expected[lane])
    watch.seconds = MIN_JOB_SECONDS + watch.expected[big]
    scale = MIN_JOB_SECONDS / watch.expected[big]
    for lane in watch.expected:
        watch.expected[lane], watch.slowed[lane] = watch.expected[lane] * scale, watch.slowed[lane] * scale
    watch.busy = dict(watch.expected) | {big: 1.2 * watch.expected[big]}
    assert watch.factors() == {}  # within what is tolerated
    watch.busy[big] = 1.5 * watch.expected[big]
    assert watch.factors() == {big: pytest.approx(1.5)}
    watch.slowed[big] = 1.5 * watch.expected[big]
    assert watch.factors() == {}  # others were expected to slow it as much
    watch.busy[big] = 0.5 * watch.expected[big]
    assert watch.factors() == {big: pytest.approx(0.5)}
    watch.seconds = MIN_JOB_SECONDS / 2
    assert watch.factors() == {}  # too short a job to tell


@pytest.mark.parametrize("weights", [HOST, DISK, (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("talk", [{}, {"device": {"h2d": 0.2}, "h2d": {"device": 0.1}}])
@pytest.mark.parametrize("seed", range(3))
def test_corrections_settle_at_the_truth(seed: int, talk: Any, weights: Any) -> None:
    """A machine measured wrongly in every lane, by up to 4 times, and jobs on what it is really like: after a few jobs
    nothing is corrected any more, and but for what lanes may be slowed by others all seconds are those of the truth."""
    rng, model = random.Random(seed), opt(4, 512, 8, 5000)
    rows, policy = [(60, 12)] * 24, Policy(8, 3, weights=weights, cache=(0.5, 0.5, 0))
    tables: dict[str, Any] = {"layers": {model.signature(0): 1e-3 * (1 + rng.random())},
                              "heads": {model.head_signature: 1e-3}}  # fmt: skip
    real = replace(machine_of(rng, "sim"), crosstalk=talk, **tables)
    wrong = {name: 4 ** rng.uniform(-1, 1) for name in (*real.links, "device")}
    known = store.corrected(real, wrong, model)
    known = replace(known, corrected={})  # as if so measured
    work, totals = Workload.of(rows), []
    for _ in range(8):
        watch, _ = walked(Cost(model, known, work), policy, rows)
        truth, _ = walked(Cost(model, real, work), policy, rows)
        scale = MIN_JOB_SECONDS / min(truth.slowed.values())  # as many rows as it takes for every lane to tell
        for seconds in (watch.expected, watch.slowed, truth.slowed):
            seconds.update({lane: scale * x for lane, x in seconds.items()})
        watch.busy, watch.seconds = truth.slowed, max(truth.slowed.values())
        factors = watch.factors()
        known = store.corrected(known, factors, model, watch.cost.hardware)
        totals.append(dict(known.corrected))
    assert factors == {}
    assert totals[-1] == totals[3]
    for lane, seconds in truth.slowed.items():
        if max(seconds, watch.slowed[lane]) > MIN_LANE_SHARE * watch.seconds:
            assert seconds / watch.expected[lane] >= 1 - MAX_RELATIVE_ERROR
            assert seconds / watch.slowed[lane] <= 1 + MAX_RELATIVE_ERROR


def test_summary_compares_lane_by_lane(families: Any, tmp_path: Path) -> None:
    """On a link so slow that its seconds are known: bytes over rate."""
    known, rate = families("llama"), 2e6
    policy = Policy(8, 1, weights=(0, 1, 0))
    links = Links(h2d=rate)
    hardware = replace(machine_of(random.Random(4), "sim"), links={
        "h2d": ((1.0, rate),), "d2h": ((1.0, 1e9),), "disk_read": ((1.0, 1e9),), "disk_write": ((1.0, 1e9),)
    })  # fmt: skip
    options = {"device": "sim", "offload_dir": tmp_path, "links": links, "hardware": hardware}
    with Engine(known.directory, policy=policy, **options) as engine:
        engine.generate(known.rows[:2], SamplingParams(max_tokens=4, ignore_eos=True))
        plan = engine.summary.plan
        lane = plan.lanes["h2d"]
        assert lane.predicted == pytest.approx(engine.summary.bytes["h2d"] / rate, rel=0.02)
        assert lane.measured == pytest.approx(lane.predicted, rel=0.1)
        assert plan.error == pytest.approx(plan.predicted_seconds / plan.measured_seconds - 1)
        assert plan.measured_seconds == pytest.approx(engine.summary.total_seconds)
