"""Engines that share attention workers: against the virtual clock, plans with other workers, and all numbers."""

import random
from dataclasses import replace
from typing import Any

import pytest

from bench.simulate import simulate
from bench.stagger.orders import POOL, Stagger, replica_lane, steady
from flexengine.policy import HEADS, REQUESTS, TOKENS, Policy
from flexengine.schedule.tasks import Op
from flexengine.shell.explain import text as explain
from flexengine.shell.explain.stagger import MOST_ENGINES, EngineSharing, Pace, as_json, best, sharing_words
from tests.helpers.explained import model
from tests.helpers.plans import both
from tests.shell.explain.test_links import POLICY, WORK, machine, run

PRICES = {"device": 3.0, "host": 0.5, "worker1": 0.25, "worker2": 0.25}


def pace(k: int, t_m: float, t_a: float) -> Pace:
    """Return the pace of an engine with k gpu_batches, each with t_a seconds of the pool."""
    return Pace(k * t_m, k * t_a, t_m + t_a)


def rate(n: int, engines: int, t_m: float, t_a: float) -> float:
    """Return gpu_batches per layer and second: the least of the three bounds."""
    return min(1 / t_a, engines / t_m, n / (t_m + t_a))


def with_workers(count: int, **more: float) -> Any:
    """Return `machine` with another number of workers, all with the same rates."""
    made, names = machine(**more), [f"worker{number}" for number in range(1, count + 1)]
    return replace(made, workers=(1 << 30,) * count,
                   worker_attention=dict.fromkeys(names, made.worker_attention["worker1"]),
                   worker_links=dict.fromkeys(names, made.worker_links["worker1"]))  # fmt: skip


# The formula.


def test_the_period_is_that_of_the_virtual_clock() -> None:
    rng = random.Random(1)
    for k in range(1, 4):
        for engines in range(1, 5):
            t_m, t_a = rng.uniform(0.5, 2), rng.uniform(0.1, 2)
            seconds = {Op.COMPUTE: t_m, Op.ATTEND: t_a, Op.LEAVE: 0.0}
            spans = simulate(Stagger(k * engines, engines).program(240), lambda task, s=seconds: s[task.op]).spans
            found = steady(spans, 120, 180)
            period = pace(k, t_m, t_a).period(engines)
            assert found.period == pytest.approx(period)
            assert found.busy[POOL] == pytest.approx(engines * k * t_a / period)
            assert found.busy[replica_lane(0)] == pytest.approx(k * t_m / period)


def test_more_engines_than_the_pool_has_time_for_are_slower() -> None:
    rng = random.Random(2)
    for _ in range(200):
        k, t_m, t_a = rng.randrange(1, 4), rng.uniform(0.1, 5), rng.uniform(0.1, 5)
        alone = k / max(k * t_m, t_m + t_a)
        fast = [r for r in range(1, 100) if rate(k * r, r, t_m, t_a) > r * alone / 1.01]
        assert pace(k, t_m, t_a).engines == min(MOST_ENGINES, len(fast))
        assert pace(k, t_m, t_a).steady == (rate(k, 1, t_m, t_a) * t_m > 1 / 1.01)
    assert pace(2, 3.0, 1.0).engines == 3  # Lamina's ratio of n = 4: t_a = t_m / (n - 1)
    assert pace(1, 3.0, 1.0).engines == 4  # they wait for attention a quarter of the time
    assert pace(2, 1.0, 3.0).engines == 0


@pytest.mark.parametrize("prices", [(10.0, 1.0), (1.0, 1.0), (1.0, 4.0), (0.0, 1.0)])
def test_the_best_numbers_for_the_money(prices: tuple[float, float]) -> None:
    rng = random.Random(5)
    for _ in range(5):
        k, t_m, t_a, room = rng.randrange(1, 4), rng.uniform(0.1, 2), rng.uniform(0.1, 8), rng.uniform(0.5, 4)
        allowed = [(r, w) for r in range(1, 65) for w in range(1, 9) if r <= room * w]
        value = {(r, w): rate(k * r, r, t_m, t_a / w) / (r * prices[0] + w * prices[1]) for r, w in allowed}
        found = best({w: pace(k, t_m, t_a / w) for w in range(1, 9)}, room, prices)
        good = [numbers for numbers in allowed if value[numbers] >= 0.99 * max(value.values())]
        assert found in good
        assert sum(found) == min(map(sum, good))


# The pace of a plan.


@pytest.mark.parametrize("partition", [REQUESTS, HEADS, TOKENS])
@pytest.mark.parametrize("rates", [{"rate": 1e10}, {"asking": 1e-4}, {"link": 5e8}, {"rate": 1e10, "asking": 2e-4}])
def test_more_and_fewer_workers_are_as_plans_with_them(partition: str, rates: dict[str, float]) -> None:
    policy = replace(POLICY, partition=partition)
    here, _, _ = run(with_workers(2, **rates), policy)
    for workers in (1, 4, 8):
        there, _, _ = run(with_workers(workers, **rates), policy)
        found = Pace.of(model(), here, workers)
        assert found.pool == pytest.approx(max(there.moving, there.attending), rel=0.01)
        assert found.turn == pytest.approx(there.computing / there.batches + there.away, rel=0.01)
        assert found.device == pytest.approx(there.computing, rel=0.01)


@pytest.mark.parametrize("partition", [REQUESTS, HEADS, TOKENS])
def test_seconds_of_a_gpu_batch_on_a_single_worker(partition: str) -> None:
    """Two workers plan with the seconds that one has: attention of 4 sequences, and a question of 0.2 ms."""
    policy, rates = replace(POLICY, partition=partition), {"rate": 1e10, "link": 5e8, "asking": 2e-4}
    one, _, _ = run(with_workers(1, **rates), policy)
    sharing = EngineSharing.of(model(), with_workers(2, **rates), run(with_workers(2, **rates), policy)[1])
    assert sharing is not None
    assert sharing.attention_seconds == pytest.approx(one.attending / 8, rel=0.01)
    assert sharing.attention_seconds == pytest.approx(4 * 4096 * (192 + 64 / 2 + 0.5) / 1e10 + 2e-4, rel=0.01)
    assert sharing.transfer_seconds == pytest.approx(one.moving / 8, rel=0.01)


def test_a_worker_with_less_than_one_gpu_batch_answers_sooner() -> None:
    two, _, _ = run(with_workers(2, rate=1e10), replace(POLICY, gpu_batch_size=16, num_gpu_batches=2))
    slice_seconds, attention = two.computing / 2, two.away
    assert Pace.of(model(), two, 2).turn == pytest.approx(slice_seconds + attention)
    assert Pace.of(model(), two, 8).turn == pytest.approx(slice_seconds + attention / 4)


CASES = [
    ({}, POLICY), ({"rate": 1e10}, POLICY), ({"link": 2e7}, POLICY),
    ({"asking": 7e-4}, replace(POLICY, partition=HEADS)),
    ({"rate": 5e10}, replace(POLICY, gpu_batch_size=32, num_gpu_batches=1, partition=HEADS)),
    ({"asking": 7e-4}, replace(POLICY, gpu_batch_size=16, num_gpu_batches=2)),
    ({}, replace(POLICY, cache={"workers": 0.75, "device": 0.25})),
]  # fmt: skip


@pytest.mark.parametrize(("rates", "policy"), CASES)
def test_a_device_is_busy_where_its_links_hide(rates: dict[str, float], policy: Policy) -> None:
    links, _, works = run(machine(**rates), policy)
    assert Pace.of(model(), links, 2).steady == links.hides == (works > 0.97)


def test_loads_of_weights_count_once_for_all_gpu_batches() -> None:
    """Half of the weights cross a link that needs twice the time of the products."""
    fast = machine(rate=2e10)
    step = run(fast)[0].computing
    layer = sum(t.held_bytes for t in model().layers[0])
    slow = replace(fast, links={**fast.links, "h2d": 0.5 * layer / (2 * step)})
    links, prediction, _ = run(slow, replace(POLICY, weights=(0.5, 0.5, 0)))
    found = Pace.of(model(), links, 2)
    assert found.device == pytest.approx(2 * step, rel=0.1)
    assert found.device == pytest.approx(prediction.lanes["decode"]["h2d"] / 8)
    assert found.turn == pytest.approx(links.computing / 8 + links.away)
    sharing = EngineSharing.of(model(), slow, prediction)
    assert sharing is not None
    assert sharing.slice_seconds == pytest.approx(found.device / 8)
    assert (sharing.enough, found.engines) == (1, int(1.01 * found.device / links.attending))


# The report.


def test_numbers_of_a_plan() -> None:
    """t_m is a quarter of the attention on one worker, so two workers are half of what the device needs."""
    facts, slow = model(), machine(prices=PRICES)
    step = run(slow)[0].computing
    read = 32 * 4096 * (192 + 64 / 2 + 0.5)  # bytes of KV of a layer, as in test_links
    slow = replace(slow, worker_attention=dict.fromkeys(slow.worker_attention, read / (4 * step)))
    _, prediction, _ = run(slow)
    found = as_json(facts, slow, WORK, prediction)["sharing"]
    assert found["slice_seconds"] == pytest.approx(step / 8)
    assert found["attention_seconds"] == pytest.approx(4 * step / 8, rel=0.01)
    assert found["transfer_seconds"] == pytest.approx(8192 * 4 / 1e12)
    assert (found["workers"], found["engines"], found["batches"]) == (2, 0, pytest.approx(8))
    assert found["enough"] == 3  # t_m + t_a = 5 t_m, and with two workers a gpu_batch ends every 2 t_m
    assert found["fewest"] == 4
    assert found["held"] == int((1 << 30) / prediction.layout.total("worker1"))
    bargain = found["bargain"]
    value = {(r, w): r / max(8 * step, 8 * r * 4 * step / w) / (3.5 * r + 0.25 * w)
             for r in range(1, 65) for w in range(1, 65)}  # fmt: skip
    numbers = (bargain["engines"], bargain["workers"])
    assert value[numbers] >= 0.985 * max(value.values())
    assert numbers == (1, 4)
    assert bargain["tok_s"] == pytest.approx(32 / (8 * step), rel=0.01)
    assert bargain["price"] == pytest.approx(3.5 + 4 * 0.25)
    assert bargain["gain"] == pytest.approx((1 / 4.5) / (0.5 / 4.0), rel=0.02)
    report = explain.report("toy", facts, slow, WORK, prediction)
    assert "3 gpu_batches are enough, a mean sweep has 8\n" in report
    assert "2 workers are too slow for this engine; with 4 workers its device is always busy\n" in report
    assert f"1 engine and 4 workers decode {bargain['tok_s']:,.0f} tok/s at a price of 4.50, 1.78x the tok/s" in report


def test_time_and_memory_for_more_engines() -> None:
    """One worker needs an eighth of the time of the products: two have time for 16, and memory for 2."""
    facts, wide = model(), machine()
    step = run(wide)[0].computing
    read = 32 * 4096 * (192 + 64 / 2 + 0.5)
    wide = replace(wide, worker_attention=dict.fromkeys(wide.worker_attention, read / (step / 8)))
    held = run(wide)[1].layout.total("worker1")
    wide = replace(wide, workers=(2 * held + 4096,) * 2)
    _, prediction, _ = run(wide)
    first, second = sharing_words(facts, wide, prediction)
    assert first.endswith("2 gpu_batches are enough, a mean sweep has 8")
    assert second.strip() == "2 workers have time for 16 engines like this one (128 gpu_batches), and memory for 2;" \
                             " this engine needs 1 worker"  # fmt: skip
    full = replace(wide, workers=(held + 4096,) * 2)
    sharing = EngineSharing.of(facts, full, run(full)[1])
    assert sharing is not None
    assert (sharing.engines, sharing.held, sharing.fewest) == (16, 1, 2)  # one worker has the time, not the memory
    endless = replace(wide, workers=(None, None))
    sharing = EngineSharing.of(facts, endless, run(endless)[1])
    assert sharing is not None
    assert sharing.held is None


def test_workers_of_heads_divide_the_heads() -> None:
    """Five workers would be fast enough, but eight is the next number that divides eight heads."""
    facts, slow = model(), machine()
    step = run(slow)[0].computing
    read = 32 * 4096 * (192 + 64 / 2 + 0.5)
    slow = replace(slow, worker_attention=dict.fromkeys(slow.worker_attention, read / (4.5 * step)))
    fewest = {}
    for partition in (REQUESTS, HEADS):
        sharing = EngineSharing.of(facts, slow, run(slow, replace(POLICY, partition=partition))[1])
        assert sharing is not None
        fewest[partition] = sharing.fewest
    assert fewest == {REQUESTS: 5, HEADS: 8}


def test_no_number_of_workers_helps_a_single_gpu_batch() -> None:
    hardware = machine(asking=1e-4)
    _, prediction, _ = run(hardware, replace(POLICY, gpu_batch_size=32, num_gpu_batches=1, partition=HEADS))
    assert "with no number of workers is its device always busy" in sharing_words(model(), hardware, prediction)[1]


def test_plans_without_workers_say_nothing() -> None:
    near, _ = both(model(), machine(), WORK, replace(POLICY, cache=(1, 0, 0)))
    assert sharing_words(model(), machine(), near) == []
    assert as_json(model(), machine(), WORK, near) == {}
