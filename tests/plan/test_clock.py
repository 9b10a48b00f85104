"""plan.cost against the virtual clock, for placements and schedules drawn at random."""

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from flexengine import shipped
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, Split
from flexengine.schedule.order import Cell
from flexengine.schedule.pages import Pool
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.schedule.tasks import Op
from tests.helpers.clock import simulated
from tests.helpers.plans import DEVICE, DISK, FLAT, HOST, OPT, SPLITS, both, machine_of, opt, random_case

# The virtual clock.


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", OPT)
def test_zigzag_takes_what_the_clock_says(name: str, slots: int) -> None:
    """Within 10 % on FlexGen's models; gpu_batches of one block are alike, and the cache lies on one tier."""
    rng = random.Random(f"{name} {slots}")
    for _ in range(6):
        batch, batches, blocks = rng.choice([4, 16, 32]), rng.choice([3, 4, 6]), rng.choice([1, 2])
        weights, cache, hidden = rng.choice(SPLITS), rng.choice([DEVICE, HOST, DISK]), rng.choice([DEVICE, HOST])
        policy = Policy(batch, batches, weights, cache, hidden, slots, "zigzag", 2048)
        work = Workload({(rng.choice([128, 512]), rng.choice([3, 6])): batch * batches * blocks})
        told, walked = both(opt(*OPT[name]), machine_of(rng, rng.choice(["sim", "cpu"])), work, policy)
        assert told.seconds == pytest.approx(walked.seconds, rel=0.1), policy


@pytest.mark.parametrize(("slots", "median", "most", "worst"), [(1, 0.005, 0.05, 0.2), (2, 0.03, 0.12, 0.45)])
def test_any_placement_takes_about_what_the_clock_says(slots: int, median: float, most: float, worst: float) -> None:
    """Where KV cache or hidden states share a slow lane with weights, or lie spread over tiers, a lane that is first
    come first served waits, and a buffer may be the same one every layer: the closed form knows neither."""
    rng, errors = random.Random(1), []
    for _ in range(60):
        told, walked = both(*random_case(rng, slots))
        errors.append(told.seconds / walked.seconds - 1)
    errors = sorted(map(abs, errors))
    assert errors[30] < median
    assert errors[51] < most
    assert errors[-1] < worst


def test_lanes_do_the_work_of_their_tasks() -> None:
    """Lane by lane. Blocks are full: how the last, smaller one is spread over the tiers is another matter."""
    rng = random.Random(2)
    for _ in range(30):
        model, hardware, _, policy = random_case(rng, 2)
        size = (rng.choice([32, 128, 512]), rng.choice([4, 16]))
        told, walked = both(model, hardware, Workload({size: 2 * policy.block_size}), policy)
        for lane, busy in walked.busy.items():
            assert told.busy[lane] == pytest.approx(busy, rel=0.05, abs=0.02 * walked.seconds), (lane, policy)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["row", "diagonal", "continuous"])
def test_other_schedules_and_ragged_rows(schedule: str) -> None:
    """Fewer than one row enters a sweep where blocks are small: some sweeps compute a prompt then and some do not,
    which takes longer than the mean of both; and one gpu_batch alone overlaps with nothing but its weights."""
    rng, errors = random.Random(f"{schedule}"), []
    for _ in range(12):
        model, hardware, _, policy = random_case(rng, 2)
        policy = replace(policy, schedule=schedule, cache=rng.choice([DEVICE, HOST]), activations=DEVICE)
        work = Workload.of((rng.randint(10, 300), rng.randint(2, 24)) for _ in range(80))
        told, walked = both(model, hardware, work, policy)
        errors.append(abs(told.seconds / walked.seconds - 1))
    assert np.median(errors) < 0.1
    assert max(errors) < 0.4


@pytest.mark.parametrize("delegate", ["none", "host"])
def test_pages_wait_while_prompts_are_computed(delegate: str) -> None:
    """Rows enter in gpu_batches while others decode, whose pages cross a link as slow as computing. Few are loaded
    beside a prompt; attention on the host goes on beside it."""
    model = opt(3, 7168, 56)
    hardware = Hardware.load(shipped.find("hardware", "t4-16gb_208gb_ssd"))
    policy = Policy(8, 16, HOST, HOST, DEVICE, 2, "diagonal", 2048, delegate=delegate)
    told, walked = both(model, hardware, Workload({(512, 16): 320}), policy)
    busiest = max(walked.busy.values())
    assert told.seconds == pytest.approx(walked.seconds, rel=0.16)
    assert (walked.seconds > 1.3 * busiest) == (delegate == "none")


@pytest.mark.parametrize(
    ("cache", "delegate", "error"), [(HOST, "host", 0.05), (DISK, "all", 0.05), ((0, 0.7, 0.3), "all", 0.07)]
)
def test_halves_of_layers_and_pages_of_a_disk_take_what_the_clock_says(
    cache: Split, delegate: str, error: float
) -> None:
    """A whole block decodes with attention on the host, and prompts wait for both halves of a layer."""
    hardware = Hardware.load(shipped.find("hardware", "t4-16gb_208gb_ssd"))
    policy = Policy(16, 3, (0.2, 0.8, 0), cache, HOST, 2, "zigzag", 2048, delegate=delegate, half_layers=True)
    told, walked = both(opt(12, 7168, 56), hardware, Workload({(512, 16): 48}), policy)
    assert told.seconds == pytest.approx(walked.seconds, rel=error)


@pytest.mark.parametrize("weights", [(0.2, 0.8, 0), (0.7, 0.3, 0), DEVICE])
@pytest.mark.parametrize("delegate", ["host", "all"])
def test_pages_of_a_disk_wait_for_attention_on_the_host(weights: Split, delegate: str) -> None:
    """Pages that are loaded to the device cross its link after the answers of the host. OPT-30B, 128/48, a part of its
    layers."""
    hardware = Hardware.load(shipped.find("hardware", "t4-16gb_208gb_ssd"))
    policy = Policy(48, 7, weights, (0.057, 0.755, 0.188), DEVICE, 2, "zigzag", 2048, delegate=delegate)
    told, walked = both(opt(3, 7168, 56), hardware, Workload({(128, 48): 336}), policy)
    assert told.seconds == pytest.approx(walked.seconds, rel=0.12)


def test_pages_of_a_further_disk_do_not_wait_for_the_host() -> None:
    """They cross on a lane of their own, so that the device computes while the host attends."""
    hardware = Hardware.load(shipped.find("hardware", "t4-16gb_208gb_ssd"))
    links = {f"disk2_{way}": hardware.links[f"disk_{way}"] for way in ("read", "write")}
    hardware = replace(hardware, links={**hardware.links, **links}, more_disks=(hardware.disk_bytes,))
    cells = Policy(48, 7, (0.7, 0.3, 0), (0.057, 0.755, 0.188), DEVICE, 2, "zigzag", 2048, delegate="host")
    policies = cells, replace(cells, cache=(0.057, 0.755, 0, 0.188))
    first, further = (both(opt(3, 7168, 56), hardware, Workload({(128, 48): 336}), policy) for policy in policies)
    assert further[0].seconds == pytest.approx(further[1].seconds, rel=0.15)
    assert further[1].seconds < 0.9 * first[1].seconds


def test_latency_is_how_long_rows_live() -> None:
    rng = random.Random(3)
    for schedule in ("zigzag", "continuous"):
        policy = Policy(8, 3, weights=HOST, schedule=schedule)
        rows = [(rng.randint(10, 300), rng.randint(2, 24)) for _ in range(150)]
        cost = Cost(opt(6, 2048, 32), FLAT, Workload.of(rows))
        layout = lay_out(cost.model, policy, cost.workload, FLAT.capacity)
        forecast = simulated(cost, layout, rows)
        ends = {task.cell.sweep: end for task, _, end in forecast.spans if task.cell.layer < 0}
        lives = [ends[last] - ends.get(first - 1, 0.0) for first, last in lifetimes(policy, layout.pools, rows)]
        assert cost.predict(layout).latency == pytest.approx(np.mean(lives), rel=0.1)


def lifetimes(policy: Policy, pools: dict[str, tuple[Pool, ...]], rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First and last sweep of every row."""
    walk, first, lives = Sweeps(policy, pools), dict[int, int](), []
    for i, (prompt, most) in enumerate(rows):
        walk.add(Sequence(i, prompt, most))
    while not walk.idle:
        batches = walk.begin(lambda sequence, pages: None)
        for i in walk.live:
            first.setdefault(i, walk.sweep)
        lives += [(first[s.id], walk.sweep) for s in walk.advance(batches, set())]
    return lives


@pytest.mark.parametrize("schedule", ["zigzag", "row", "diagonal", "continuous"])
def test_longer_steps_of_long_outputs_change_nothing(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same prediction with every sweep told apart."""
    rng = random.Random(6)
    for _ in range(15):
        model, hardware, _, policy = random_case(rng, rng.choice([1, 2]))
        most, hardware = rng.randint(260, 1100), replace(hardware, checkpoint_read=1e8 * rng.random() + 1e7)
        uniform = rng.random() < 0.3
        rows = [(100, most) if uniform else (rng.randint(1, 200), rng.randint(1, most)) for _ in range(90)]
        work, policy = Workload.of(rows), replace(policy, schedule=schedule)
        layout = lay_out(model, policy, work, hardware.capacity)
        thin = Cost(model, hardware, work).predict(layout)
        with monkeypatch.context() as patch:
            patch.setattr("flexengine.plan.profile.MAX_AGES", 10**6)
            full = Cost(model, hardware, work).predict(layout)
        assert thin.load_seconds == pytest.approx(full.load_seconds, rel=0.01, abs=1e-9)
        assert thin.seconds == pytest.approx(full.seconds, rel=0.02)
        assert thin.latency == pytest.approx(full.latency, rel=0.03)


@pytest.mark.parametrize("attention", [2e11, 2e12])
def test_queries_first_hide_keys_and_values(attention: float) -> None:
    """With one gpu_batch of a model without grouped heads: queries are a third of the projections and of the bytes.

    Keys, values and their copy run beside the copy of queries and attention. Adding the new tokens takes as long as a
    question. The closed form hides what is computed, not its copy.
    """
    hardware = replace(FLAT, workers=(None,), worker_attention={"worker1": attention}, worker_seconds=1e-5)
    model, work, policy = opt(6, 4096, 32), Workload({(512, 16): 16}), Policy(16, 1, cache={"workers": 1})
    plain, first = (both(model, hardware, work, replace(policy, queries_first=x)) for x in (False, True))
    cells: dict[Cell, dict[Op, float]] = defaultdict(dict)
    for task, began, end in plain[1].spans:
        cells[task.cell][task.op] = end - began
    saved = hidden = 0.0
    for ops in (ops for ops in cells.values() if Op.ATTEND in ops):
        project, send, attend = (ops[op] for op in (Op.PROJECT, Op.SEND, Op.ATTEND))
        beside = max(send / 3 + attend, 2 * (project + send) / 3)
        saved += project + send + attend - (project / 3 + beside + 1e-5)
        hidden += min(2 * project / 3, attend - 1e-5) - 1e-5
    assert saved > 0
    assert plain[1].seconds - first[1].seconds == pytest.approx(saved, rel=1e-6)
    assert plain[0].seconds - first[0].seconds == pytest.approx(hidden, rel=0.05)
    assert first[0].seconds == pytest.approx(first[1].seconds, rel=0.01)
