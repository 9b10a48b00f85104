"""plan.refinement: the search uses attention workers where they pay, and nowhere else."""

import random
from contextlib import suppress
from dataclasses import replace
from math import inf

import pytest

from flexengine.errors import OutOfMemory
from flexengine.places import WORKERS, place_of
from flexengine.plan.candidates import Options
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.min_memory import planned
from flexengine.plan.placement import placement_problem
from flexengine.plan.refinement import partitions, split_of
from flexengine.plan.search import Search, search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, shares
from flexengine.schedule.place import cache_homes
from flexengine.shell.explain.text import report
from tests.helpers.plans import FLAT, both, opt

MODEL = opt(12, 1024, 16, 4096)
WEIGHTS = sum(t.held_bytes for t in MODEL.tensors)
LONG = Workload({(500, 16): 64})
SHORT = Workload({(8, 16): 64})
SEQUENCE = 544 * MODEL.kv_token * len(MODEL.layers)  # bytes of KV pages of one row of LONG
PAGES = 64 * SEQUENCE
WORKERS_OF = dict(workers=(PAGES, PAGES), worker_attention={"worker1": 5e10, "worker2": 5e10}, worker_seconds=1e-5,
                  worker_links={"worker1": 1e10, "worker2": 1e10})  # fmt: skip
# Weights are read from disk in every sweep, so a larger block is faster.
SMALL = replace(FLAT, device_bytes=WEIGHTS // 2 + 4 * SEQUENCE, host_bytes=64 << 20, disk_bytes=1 << 40)
ROOMY = replace(FLAT, device_bytes=1 << 30, host_bytes=1 << 30, disk_bytes=1 << 40)
LARGE = replace(FLAT, device_bytes=WEIGHTS + 2 * PAGES, host_bytes=1 << 30, disk_bytes=1 << 40)


def with_workers(hardware: Hardware, **others: object) -> Hardware:
    return replace(hardware, **{**WORKERS_OF, **others})  # type: ignore[arg-type]


def without(searched: Search) -> float:
    """Seconds of the best policy without workers that the search tried."""
    return min(p.total_seconds for p in searched.tried if not p.policy.works)


def test_they_are_chosen_where_memory_limits_the_block() -> None:
    alone, searched = search(MODEL, SMALL, LONG).best, search(MODEL, with_workers(SMALL), LONG)
    best = searched.best
    assert best.policy.works == 1
    assert best.policy.block_size > alone.policy.block_size
    assert best.total_seconds < alone.total_seconds / 1.5
    # Workers beside it make the search without them no worse.
    assert without(searched) <= 1.01 * alone.total_seconds


@pytest.mark.parametrize(
    ("hardware", "work"),
    [
        (with_workers(LARGE, worker_attention={"worker1": 1e9, "worker2": 1e9}), LONG),  # all fits, workers are slow
        (with_workers(SMALL, worker_links={"worker1": 1e4, "worker2": 1e4}), LONG),  # a slow connection
        (with_workers(SMALL, worker_seconds=1.0), LONG),  # every question takes a second
        (with_workers(SMALL, workers=(SEQUENCE // 4, SEQUENCE // 4)), LONG),  # they hold half a sequence
        (with_workers(LARGE, worker_seconds=1e-3), SHORT),  # attention is short, and all fits
    ],
)
def test_they_are_not_chosen_where_they_do_not_pay(hardware: Hardware, work: Workload) -> None:
    """Nor is any of 300 policies with workers, drawn at random, faster than the policy without them."""
    best = search(MODEL, hardware, work).best
    assert not best.policy.works
    assert min(random_seconds(hardware, work, 0), default=inf) > best.total_seconds


def test_cores_that_workers_share_with_the_device_count() -> None:
    """Everything fits, and two workers attend as fast as the device: on cores of their own they pay, else not."""
    machine = replace(LARGE, kind="cpu", host_bytes=None, links={k: v for k, v in LARGE.links.items() if k != "d2h"},
                      decode_attention=1e10, products={"float16": 1e13})  # fmt: skip
    rates = {"worker_attention": {"worker1": 5e9, "worker2": 5e9}}
    own = search(MODEL, with_workers(machine, **rates), LONG)
    shared = search(MODEL, with_workers(machine, **rates, worker_cores={"worker1": 0.5, "worker2": 0.5}), LONG)
    assert own.best.policy.works > 0
    assert own.best.total_seconds < 0.9 * without(own)
    assert not shared.best.policy.works


def drawn(rng: random.Random) -> Policy:
    """A policy with workers, drawn at random."""
    partition, share = rng.choice(["requests", "heads"]), rng.choice([1.0, 0.9, 0.75, 0.5])
    weights = rng.choice([(1, 0, 0), (0, 0, 1), (0.2, 0, 0.8), (0.1, 0.1, 0.8), (0, 0.2, 0.8)])
    return Policy(rng.randint(1, 32), rng.randint(1, 6), weights, split_of(share), slots=rng.choice([1, 2, 3]),
                  schedule=rng.choice(["zigzag", "diagonal", "continuous"]), prefill_tokens=rng.choice([128, 2048]),
                  partition=partition)  # fmt: skip


def random_seconds(hardware: Hardware, work: Workload, seed: int) -> list[float]:
    """Seconds of those of 300 policies with workers that fit."""
    rng, cost, found = random.Random(seed), Cost(MODEL, hardware, work), []
    for _ in range(300):
        with suppress(OutOfMemory):
            found.append(cost.predict(lay_out(MODEL, drawn(rng), work, planned(hardware.capacity))).total_seconds)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_drawn_at_random_is_much_better(seed: int) -> None:
    """Of 300 with workers, priced alike; those that fit must not beat the search by more than 5 %."""
    rng = random.Random(f"workers {seed}")
    room = tuple(int(PAGES * rng.uniform(0.1, 0.6)) for _ in range(2))
    rates = {name: 5e10 * rng.uniform(0.1, 2) for name in ("worker1", "worker2")}
    hardware = with_workers(SMALL, workers=room, worker_attention=rates, worker_seconds=rng.choice([0.0, 1e-4]))
    fitting = random_seconds(hardware, LONG, seed)
    assert len(fitting) > 10
    assert min(fitting) >= 0.95 * search(MODEL, hardware, LONG).best.total_seconds


@pytest.mark.parametrize("partition", ["heads", "tokens"])
def test_the_slowest_of_workers_that_share_sequences_counts(partition: str) -> None:
    """Attention and connection of two workers, one ten times as slow, take the time of two slow ones."""
    policy = Policy(4, 2, (0, 0, 1), split_of(1.0), prefill_tokens=128, partition=partition)
    rates, links = ({"worker1": a, "worker2": b} for a, b in ((5e8, 5e7), (1e8, 1e7)))
    slow = {"worker_attention": {"worker1": 5e7, "worker2": 5e7}, "worker_links": {"worker1": 1e7, "worker2": 1e7}}
    unequal = both(MODEL, with_workers(ROOMY, worker_attention=rates, worker_links=links), LONG, policy)
    equal = both(MODEL, with_workers(ROOMY, **slow), LONG, policy)
    for one, other in zip(unequal, equal, strict=True):
        assert one.busy["worker1"] == pytest.approx(other.busy["worker1"])
        assert one.busy["worker1_send"] == pytest.approx(other.busy["worker1_send"])
    tokens = sum((n - 1) * times for (_, n), times in LONG.sizes.items()) * len(MODEL.layers)
    each = MODEL.fetched + (MODEL.sent - MODEL.fetched) / 2 if partition == "tokens" else MODEL.sent / 2
    assert equal[1].busy["worker1_send"] == pytest.approx(tokens * each / 1e7)


def test_queries_that_go_first_stay() -> None:
    """In the linear program of a policy, and in its text."""
    hardware = with_workers(ROOMY)
    policy = Policy(4, 2, (0, 0, 1), split_of(1.0), prefill_tokens=128, queries_first=True)
    assert placement_problem(MODEL, hardware, LONG, policy).phases
    prediction = both(MODEL, hardware, LONG, policy)[0]
    assert "queries" in report("toy", MODEL, hardware, LONG, prediction)
    placed = search(MODEL, hardware, LONG, Options(placed=policy)).best.policy
    assert placed.queries_first


def test_a_limit_of_the_block_holds() -> None:
    searched = search(MODEL, with_workers(SMALL), LONG, Options(block=5))
    assert max(p.policy.block_size for p in searched.tried) <= 5
    assert searched.best.policy.works


def test_weights_in_memory_stay_and_so_does_the_partition() -> None:
    best = search(MODEL, with_workers(SMALL), LONG).best.policy
    placed = replace(best, partition="heads")
    again = search(MODEL, with_workers(SMALL), LONG, Options(placed=placed)).best.policy
    assert (again.weights, again.cache, again.partition) == (best.weights, best.cache, "heads")


def test_splits_and_partitions() -> None:
    assert {k: v for k, v in shares(split_of(0.75)).items() if v} == {"device": 0.25, WORKERS: 0.75}
    assert partitions(8, 4) == ("requests", "heads")
    assert partitions(8, 3) == partitions(8, 1) == partitions(8, 1, by_tokens=True) == ("requests",)
    assert partitions(8, 3, by_tokens=True) == ("requests", "tokens")


def test_tokens_are_divided_only_if_that_is_allowed() -> None:
    """One long sequence at three workers, whose number does not divide the heads, with weights in memory: attention of
    a third of it takes a third of the time."""
    long, names = Workload({(1500, 400): 1}), ("worker1", "worker2", "worker3")
    hardware = replace(
        with_workers(ROOMY), workers=(1 << 30,) * 3, worker_attention=dict.fromkeys(names, 1e9),
        worker_links=dict.fromkeys(names, 1e10), decode_attention=((1.0, 1e8),),
    )  # fmt: skip
    found = {allowed: search(MODEL, hardware, long, Options(by_tokens=allowed)) for allowed in (False, True)}
    ways = {allowed: {p.policy.partition for p in each.tried} for allowed, each in found.items()}
    assert "tokens" not in ways[False]
    assert found[True].best.policy.partition == "tokens"
    assert found[True].best.total_seconds < found[False].best.total_seconds


@pytest.mark.parametrize("seed", range(4))
def test_small_blocks_have_no_share_on_workers(seed: int) -> None:
    """A share of a block may be less than a sequence of a smaller block, which the search tries, too."""
    rng = random.Random(seed)
    model, places = opt(4, 256, 4, 1000), [f"worker{i + 1}" for i in range(rng.choice((2, 4)))]
    machine = replace(
        FLAT, kind="cpu", device_bytes=rng.randrange(60, 80) << 20, disk_bytes=1 << 40,
        workers=(rng.choice((1, 4)) << 20,) * len(places), worker_attention=dict.fromkeys(places, 1e11),
        worker_links=dict.fromkeys(places, 1e10), worker_seconds=1e-5,
    )  # fmt: skip
    found = search(model, machine, Workload({(rng.choice((8, 100)), 16): rng.randrange(2, 12)}))
    for each in found.tried:
        homes = cache_homes(each.policy, machine.places)
        assert (each.policy.works > 0) == any(place_of(home).worker for home in homes)
