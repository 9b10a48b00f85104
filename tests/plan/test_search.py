"""plan.search: what it chooses always fits, no policy drawn at random is better, a better machine is never slower."""

import random
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pulp
import pytest

from flexengine import shipped
from flexengine.engine.job import Job
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.places import TIERS
from flexengine.plan import placement, refinement
from flexengine.plan import search as searching
from flexengine.plan.candidates import Candidates, Options
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.lp import NoSolver, Solution, SolverFailed
from flexengine.plan.min_memory import planned
from flexengine.plan.problem import Problem
from flexengine.plan.search import Search, frontier, search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.drawn import policy_of, work_of
from tests.helpers.listening import listening
from tests.helpers.plans import machine_of, opt

SMALL = opt(24, 256, 4, 4096)
WEIGHTS = sum(t.held_bytes for t in SMALL.tensors)
WORK = Workload({(20, 8): 12, (48, 12): 4})
BUFFERS = 17 << 20
KINDS = ("cpu", "sim")


def squeezed(hardware: Hardware, device: float | None, host: float | None = None) -> Hardware:
    """The same machine with so many times the model's weights in memory, beside the buffers for reading."""
    room = [None if share is None else int(WEIGHTS * share) for share in (device, host)]
    reading = room[0 if hardware.shared else 1]
    if reading is not None:
        room[0 if hardware.shared else 1] = reading + BUFFERS
    return replace(hardware, device_bytes=room[0], host_bytes=None if hardware.shared else room[1], disk_bytes=1 << 40)


def totals(prediction: Prediction) -> float:
    return prediction.seconds + prediction.load_seconds


def check_fits(prediction: Prediction, hardware: Hardware) -> None:
    """Every tier's account, summed here, is within what the machine has."""
    account = prediction.layout.account
    booked = {tier: sum(account[tier].values()) for tier in TIERS}
    if hardware.shared:
        booked["device"] += booked.pop("host")
    limits = {"device": hardware.device_bytes, "host": hardware.host_bytes, "disk": hardware.disk_bytes}
    for tier, used in booked.items():
        limit = limits[tier]
        assert limit is None or used <= limit, (tier, used, limit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_everything_tried_fits_and_the_best_is_the_best(seed: int, kind: str) -> None:
    """Rounded to tensors and sequences, hundreds of placements stay within capacities that leave little."""
    rng = random.Random(seed)
    hardware = squeezed(machine_of(rng, kind), rng.uniform(0.5, 0.95), rng.uniform(0.3, 1.5))
    found = search(SMALL, hardware, WORK)
    for prediction in found.tried:
        check_fits(prediction, hardware)
        assert prediction.rows == 16
        assert prediction.tokens == 12 * 8 + 4 * 12
    assert totals(found.best) <= 1.005 / 0.995 * min(map(totals, found.tried))
    assert len(found.tried) > 25


def test_two_hundred_policies_rounded_from_the_program_fit() -> None:
    """Counts the placements that are no corner: the program's fractions after rounding."""
    rounded = 0
    for seed in range(1, 4):
        rng = random.Random(f"rounded {seed}")
        hardware = squeezed(machine_of(rng, rng.choice(KINDS)), rng.uniform(0.4, 1.3), rng.uniform(0.2, 1.2))
        for prediction in search(SMALL, hardware, work_of(rng)).tried:
            check_fits(prediction, hardware)
            rounded += any(0 < share < 1 for share in prediction.policy.weights)
    assert rounded >= 200


@pytest.mark.parametrize("kind", KINDS)
def test_resident_when_all_fits(kind: str) -> None:
    best = search(SMALL, squeezed(machine_of(random.Random(1), kind), 40.0, 40.0), WORK).best
    assert (best.policy.weights, best.policy.cache, best.policy.activations) == ((1, 0, 0),) * 3
    assert set(best.layout.homes.values()) == {"device"}


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_when_it_does_not(kind: str) -> None:
    hardware = squeezed(machine_of(random.Random(2), kind), 0.7, 0.3)
    best = search(SMALL, hardware, WORK).best
    assert best.policy.weights[0] < 1
    assert "disk" in best.layout.homes.values()


def test_steps_of_a_block_size() -> None:
    shapes = Candidates(Cost(SMALL, machine_of(random.Random(2), "sim"), WORK), Options())
    assert WORK.count == 16

    def steps(gpu_batch_size: int, num_gpu_batches: int) -> list[tuple[int, int]]:
        return [(p.gpu_batch_size, p.num_gpu_batches) for p in shapes.steps(Policy(gpu_batch_size, num_gpu_batches))]

    assert steps(1, 1) == [(2, 1)]
    assert steps(5, 1) == [(4, 1), (6, 1)]
    assert steps(4, 2) == [(4, 1), (4, 3)]
    assert steps(4, 4) == [(4, 3)]  # no block is larger than the job


def test_all_blocks_are_tried_with_streamed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest one that fits need not be the fastest."""
    for name in ("refine", "_stream"):
        monkeypatch.setattr(refinement, name, lambda placement: None)
    made = SimpleNamespace(weights_on_host=True, failed=None, spills=True)
    monkeypatch.setattr(refinement, "Placement", lambda *_, **__: made)
    tried, tries = SimpleNamespace(blocks=lambda: [8, 4, 1], of=Policy, predictions={}), list[Policy]()
    tried.cost = SimpleNamespace(hardware=SimpleNamespace(assumed=False, workers=()))
    tried.attempt = lambda policy: tries.append(policy) or policy
    refinement.place_off_device(tried, streams=True)  # type: ignore[arg-type]
    assert tries == [Policy(block, weights=refinement.STREAMED) for block in (8, 4, 1)]


def test_without_the_solver_nothing_is_left_out_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda solver: False)
    with pytest.raises(NoSolver, match="pip install highspy"):
        search(SMALL, squeezed(machine_of(random.Random(2), "sim"), 0.7, 0.3), WORK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_drawn_at_random_is_much_better(seed: int, kind: str) -> None:
    """Of 200, priced alike; those that fit must not beat the search by more than 5 %."""
    rng = random.Random(f"grid {seed}")
    hardware = squeezed(machine_of(rng, kind), rng.uniform(0.5, 1.5), rng.uniform(0.4, 1.5))
    best, cost, fitting = search(SMALL, hardware, WORK).best, Cost(SMALL, hardware, WORK), 0
    for _ in range(200):
        policy = policy_of(rng)
        try:
            drawn = cost.predict(lay_out(SMALL, policy, WORK, planned(hardware.capacity)))
        except OutOfMemory:
            continue
        fitting += 1
        assert totals(drawn) >= 0.95 * totals(best), policy
    assert fitting > 10


def better(hardware: Hardware, what: str, factor: float) -> Hardware:
    """The machine with more of one thing."""
    if what in ("device_bytes", "host_bytes"):
        return replace(hardware, **{what: int(getattr(hardware, what) * factor)})
    if what == "products":
        tables = {name: tuple((x, y * factor) for x, y in table) for name, table in hardware.products.items()}
        return replace(hardware, products=tables)
    if what == "checkpoint_read":
        return replace(hardware, checkpoint_read=tuple((x, y * factor) for x, y in hardware.checkpoint_read))
    faster = {link: tuple((x, y * factor) for x, y in hardware.links[link]) for link in what.split()}
    return replace(hardware, links={**hardware.links, **faster})


LONG = Workload({size: 4 * times for size, times in WORK.sizes.items()})  # so long that loading is no third of it


@cache
def plain(seed: int) -> tuple[Hardware, float]:
    """A machine, and the seconds that LONG takes on it."""
    hardware = squeezed(machine_of(random.Random(f"more {seed}"), "sim"), 0.8, 0.6)
    return hardware, totals(search(SMALL, hardware, LONG).best)


@pytest.mark.parametrize(
    "what", ["device_bytes", "host_bytes", "checkpoint_read", "h2d d2h", "disk_read disk_write", "products"]
)
def test_more_of_anything_is_never_slower(what: str) -> None:
    """Throughput of what is chosen; rounding to tensors and sequences may cost 1 %."""
    hardware, before = plain(0)
    assert totals(search(SMALL, better(hardware, what, 2.0), LONG).best) <= 1.01 * before


def test_the_prefill_that_is_asked_for_is_kept() -> None:
    hardware = squeezed(machine_of(random.Random(3), "sim"), 0.8, 0.6)
    found = search(SMALL, hardware, WORK, Options(prefill_tokens=96))
    assert {p.policy.prefill_tokens for p in found.tried} == {96}


def test_without_overlap_lanes_add_up() -> None:
    hardware = squeezed(machine_of(random.Random(6), "sim"), 0.8, 0.6)
    found = search(SMALL, hardware, WORK, Options(overlap=False))
    for prediction in found.tried:
        assert prediction.seconds == pytest.approx(sum(prediction.busy.values()))
    assert totals(found.best) > totals(search(SMALL, hardware, WORK).best)


def test_the_latency_limit_is_kept() -> None:
    """The limit holds; it costs throughput; one that nothing keeps is refused with the least there is."""
    hardware = squeezed(machine_of(random.Random(4), "sim"), 0.6, 0.5)
    free = search(SMALL, hardware, WORK, Options(frontier=True))
    least = min(p.latency for p in free.tried)
    assert least < 0.9 * free.best.latency
    limit = (least + free.best.latency) / 2
    kept = search(SMALL, hardware, WORK, Options(latency_limit=limit)).best
    assert kept.latency <= limit
    assert totals(kept) >= 0.99 * totals(free.best)
    with pytest.raises(InvalidInput, match=r"latency limit is .* the least found here is") as refused:
        search(SMALL, hardware, WORK, Options(latency_limit=least / 100))
    named = float(str(refused.value).split("found here is ")[1].split(" s")[0])
    assert named <= 1.05 * least
    assert search(SMALL, hardware, WORK, Options(latency_limit=named)).best.latency <= named


def test_where_all_fits_smaller_blocks_serve_the_latency() -> None:
    """A limit below the latency of the whole job at once can be kept, and the frontier says so."""
    hardware = squeezed(machine_of(random.Random(1), "sim"), 40.0, 40.0)
    free = search(SMALL, hardware, WORK, Options(frontier=True))
    assert free.best.policy.block_size == WORK.count
    curve = frontier(free)
    assert curve[0].latency < 0.7 * free.best.latency
    limit = 0.8 * free.best.latency
    kept = search(SMALL, hardware, WORK, Options(latency_limit=limit)).best
    assert kept.latency <= limit
    assert kept.policy.block_size < WORK.count


@pytest.mark.parametrize("seed", range(4))
def test_the_frontier_adds_policies_and_changes_no_choice(seed: int) -> None:
    rng = random.Random(f"frontier {seed}")
    hardware = squeezed(machine_of(rng, rng.choice(KINDS)), rng.uniform(0.3, 1.2), rng.uniform(0.3, 1.5))
    without, found = search(SMALL, hardware, WORK), search(SMALL, hardware, WORK, Options(frontier=True))
    assert found.best.policy == without.best.policy
    assert len([*found.tried]) > len([*without.tried])
    assert frontier(found)[0].latency <= frontier(without)[0].latency


def test_what_is_placed_stays() -> None:
    """A later job of an engine whose weights are loaded: only the block shape is free."""
    hardware = squeezed(machine_of(random.Random(5), "sim"), 0.9, 0.9)
    placed = Policy(4, 1, weights=(0.3, 0.4, 0.3), cache=(0.5, 0.5, 0), activations=(0, 1, 0), slots=1)
    found = search(SMALL, hardware, WORK, Options(placed=placed))
    for prediction in found.tried:
        p = prediction.policy
        assert (p.weights, p.cache, p.activations, p.slots) == ((0.3, 0.4, 0.3), (0.5, 0.5, 0), (0, 1, 0), 1)
    assert found.best.policy.block_size > 4


def test_a_later_job_has_the_shape_of_the_first_one_if_all_fits() -> None:
    hardware = squeezed(machine_of(random.Random(1), "cpu"), 40.0, 40.0)
    work = Workload.of([(100, 50)] * 96)
    first = search(SMALL, hardware, work)
    later = search(SMALL, hardware, work, Options(placed=first.best.policy))
    assert later.best.policy == first.best.policy
    assert first.best.policy.block_size == 96


def test_what_does_not_fit_at_all_is_refused_with_numbers() -> None:
    hardware = squeezed(machine_of(random.Random(6), "sim"), 0.01, 0.01)
    with pytest.raises(OutOfMemory) as caught:
        search(SMALL, hardware, WORK)
    error = caught.value
    assert error.needed + error.used > error.capacity > 0
    assert error.tier in TIERS


def test_the_frontier_is_what_nothing_dominates() -> None:
    found = search(SMALL, squeezed(machine_of(random.Random(7), "sim"), 0.6, 0.5), WORK, Options(frontier=True))
    kept = frontier(found)
    assert len(kept) > 1

    def dominated(p: Prediction) -> bool:
        others = ((q.latency, q.seconds) for q in found.tried)
        return any(a <= p.latency and b <= p.seconds and (a, b) != (p.latency, p.seconds) for a, b in others)

    free = {(p.latency, p.seconds) for p in found.tried if not dominated(p)}
    assert {(p.latency, p.seconds) for p in kept} == free
    assert [p.latency for p in kept] == sorted(p.latency for p in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_question_has_the_same_answer(kind: str) -> None:
    def answer() -> Search:
        return search(SMALL, squeezed(machine_of(random.Random(8), kind), 0.7, 0.5), WORK)

    assert answer().best.policy == answer().best.policy


def test_one_row_and_one_token() -> None:
    hardware = squeezed(machine_of(random.Random(9), "cpu"), 0.8)
    best = search(SMALL, hardware, Workload({(1, 1): 1})).best
    assert best.policy.block_size == 1
    assert best.tokens == 1


def test_a_process_keeps_some_of_its_ram() -> None:
    """Where the device is this process's RAM, the plan leaves some for what is no tensor; elsewhere nothing."""
    cpu, sim = (squeezed(machine_of(random.Random(0), kind), 1.0, 1.0).capacity for kind in KINDS)
    assert planned(sim) == sim
    assert cpu.device is not None
    assert planned(cpu).device == cpu.device - cpu.device // 4
    large = replace(cpu, device=1 << 40)
    assert planned(large).device == (1 << 40) - (1 << 40) // 25


def model_175b() -> ModelFacts:
    return opt(96, 12288, 96)


def test_a_175b_model_on_a_small_gpu_is_streamed() -> None:
    """The block that is chosen is larger than a gpu_batch, with most weights off the device."""
    hardware = replace(
        machine_of(random.Random(0), "sim"),
        device_bytes=16 << 30,
        host_bytes=200 << 30,
        disk_bytes=1500 << 30,
        links={"disk_read": 2e9, "disk_write": 1e9, "h2d": 1.2e10, "d2h": 1.2e10},
    )
    best = search(model_175b(), hardware, Workload({(512, 32): 1024})).best
    check_fits(best, hardware)
    assert best.policy.weights[0] < 0.1
    assert best.policy.block_size > 32


@pytest.mark.parametrize("share", [0.3, 0.45, 0.6])
def test_no_memory_is_left_that_a_tensor_would_fit_in(share: float) -> None:
    """Tensors are large beside this memory; no other placement of the weights is quicker by more than is cared for."""
    hardware = squeezed(machine_of(random.Random(3), "cpu"), share, 1.0)
    best = search(SMALL, hardware, WORK).best
    cost, least = Cost(SMALL, hardware, WORK), best.total_seconds
    for k in range(501):
        policy = replace(best.policy, weights=(k / 500, 0.0, round(1 - k / 500, 3)))
        with suppress(OutOfMemory):
            least = min(least, cost.predict(lay_out(SMALL, policy, WORK, planned(hardware.capacity))).total_seconds)
    assert best.policy.weights[0] < 1
    assert best.total_seconds <= 1.02 * least


def test_a_program_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search continues without it, and reports this."""
    hardware, calls = squeezed(machine_of(random.Random(1), "sim"), 0.6, 1.0), 0
    solve = placement.solve

    def failing(problem: Problem) -> Solution | None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise SolverFailed("HiGHS stopped with status TimeLimit")
        return solve(problem)

    monkeypatch.setattr(placement, "solve", failing)
    with listening() as heard:
        found = search(SMALL, hardware, WORK)
    (said,) = heard.messages
    assert re.search("may not be the best.*TimeLimit", said)
    assert calls > 10
    check_fits(found.best, hardware)


def test_the_largest_block_is_tried_as_one_gpu_batch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if half of all rows at a time are predicted to be faster than all of them in two gpu_batches."""
    thought, predict = {(48, 2): 3.0, (48, 1): 2.0, (96, 1): 1.0}, Cost.predict

    def told(cost: Cost, layout: Layout, missing: float = 1.0) -> Prediction:
        shape = layout.policy.gpu_batch_size, layout.policy.num_gpu_batches
        return replace(predict(cost, layout, missing), seconds=thought.get(shape, 9.0), load_seconds=0.0)

    monkeypatch.setattr(Cost, "predict", told)
    best = search(SMALL, squeezed(machine_of(random.Random(1), "cpu"), 40.0), Workload({(20, 9): 96})).best.policy
    assert (best.gpu_batch_size, best.num_gpu_batches) == (96, 1)


LONG = Workload({(512, 128): 1000})  # 18 minutes
ROOMY = replace(Hardware.load(shipped.find("hardware", "cpu-2core_24gb")), device_bytes=1 << 40)


def test_results_of_a_long_job_come_at_least_every_tenth_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one block are fastest, but end together. A smaller block is chosen if it costs at most 3 %."""
    model, searched = opt(12, 768, 12, 4096), search(opt(12, 768, 12, 4096), ROOMY, LONG)
    fastest = min(searched.tried, key=totals)
    assert fastest.policy.block_size >= 1000
    assert fastest.first == pytest.approx(totals(fastest), rel=0.01)
    assert fastest.at_stake == pytest.approx(1.0)
    assert searched.best.at_stake <= 0.1
    assert searched.best.first < 0.1 * totals(searched.best)
    assert totals(fastest) < totals(searched.best) <= 1.03 * totals(fastest)
    half = search(model, ROOMY, Workload({(512, 128): 500})).best  # under 10 minutes
    assert half.at_stake == pytest.approx(1.0)
    limit = totals(searched.best) / totals(fastest) - 0.001
    monkeypatch.setattr(searching, "MAX_LONGER", limit)
    assert search(model, ROOMY, LONG).best.policy.block_size > 100  # no block of a tenth is that cheap


@pytest.mark.parametrize(("measured", "rows", "said"), [(True, 300, 1), (False, 300, 0), (True, 1, 0)])
def test_a_job_says_when_its_first_results_come(measured: bool, rows: int, said: int) -> None:
    work = Workload({(512, 128): rows})
    cost = Cost(opt(12, 768, 12, 4096), replace(ROOMY, measured=measured), work)
    layout = lay_out(cost.model, Policy(50, 6), work, ROOMY.capacity)
    job = SimpleNamespace(planner=SimpleNamespace(cost=lambda _: cost, alone=True), core=SimpleNamespace(resident=None))
    with listening() as heard:
        Job._say_plan(job, work, layout)  # type: ignore[arg-type]
    seconds = round(totals(cost.predict(layout)))  # all rows end together
    line = f"first results in about {seconds // 60}:{seconds % 60:02} (predicted)"
    assert heard.messages[1:] == [line] * said
    assert seconds > 60 or rows == 1
