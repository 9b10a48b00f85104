"""Plans with delegated attention: against the virtual clock and bytes by hand; what the search does with it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from flexengine import shipped
from flexengine.errors import InvalidInput
from flexengine.plan.cost import Cost
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.policy import DELEGATES, Policy, Split
from flexengine.shell.explain.text import policy_words
from tests.helpers.plans import DEVICE, DISK, FLAT, HOST, OPT, both, machine_of, opt, predicted

HALF: Split = (0.5, 0.5, 0)
SPREAD: Split = (0, 0.5, 0.5)
KNOWN = replace(FLAT, host_attention=4e10)


def machine(rng: random.Random) -> Hardware:
    return replace(machine_of(rng, "sim"), host_attention=10 ** rng.uniform(9.5, 11))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_delegation_takes_what_the_clock_says(slots: int) -> None:
    """Lane by lane the same work; and about the same seconds, where weights leave the link to what attention needs."""
    rng, errors = random.Random(f"delegated {slots}"), []
    for _ in range(12):
        batch, batches = rng.choice([4, 16, 32]), rng.choice([2, 3, 6])
        cache, delegate = rng.choice([(HOST, "host"), (HALF, "host"), (SPREAD, "host"), (SPREAD, "all"), (DISK, "all")])
        policy = Policy(batch, batches, rng.choice([DEVICE, HALF]), cache, DEVICE, slots, "zigzag", delegate=delegate)
        work = Workload({(rng.choice([128, 512]), rng.choice([4, 12])): batch * batches})
        told, walked = both(opt(8, *OPT["6.7b"][1:]), machine(rng), work, policy)
        for lane, busy in walked.busy.items():
            assert told.busy[lane] == pytest.approx(busy, rel=0.05, abs=0.02 * walked.seconds), (lane, policy)
        errors.append(abs(told.seconds / walked.seconds - 1))
    assert np.median(errors) < 0.05
    assert max(errors) < 0.35


def test_one_gpu_batch_waits_for_the_host() -> None:
    rng = random.Random(5)
    for _ in range(10):
        hardware, policy = machine(rng), Policy(16, 1, cache=HOST, schedule="zigzag", delegate="host")
        told, walked = both(opt(8, 4096, 32), hardware, Workload({(512, 12): 16}), policy)
        assert told.seconds == pytest.approx(walked.seconds, rel=0.1)


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_lanes_wait_as_the_order_of_cells_says(batches: int) -> None:
    """Streamed layers end before the next begins, and most answers follow the next layer's weights in their lane. The
    lanes of attention, computing and weights are about equally busy, and prompts take almost no time."""
    rng, errors = random.Random(f"order {batches}"), []
    model = opt(4, *OPT["6.7b"][1:], vocabulary=8192)
    for _ in range(8):
        policy = Policy(16, batches, rng.choice([DEVICE, HALF, (0.8, 0.2, 0)]), rng.choice([HOST, HALF]), DEVICE,
                        2, "zigzag", 4096, delegate="host")  # fmt: skip
        work = Workload({(512, 8): 16 * batches})
        quick = replace(machine(rng), cell_seconds=3e-3, products={"float16": ((1.0, 1e16),)}, elementwise=1e14,
                        prompt_attention=((1.0, 1e16),), host_attention=1e10)  # fmt: skip
        alike = predicted(model, work, policy, quick).busy
        host = 1e10 * alike["cpu"] / alike["device"] * 2 ** rng.uniform(-1, 1)
        told, walked = both(model, replace(quick, host_attention=host), work, policy)
        errors.append(told.seconds / walked.seconds - 1)
    assert np.median(np.abs(errors)) < 0.05
    assert min(errors) > -0.15
    assert max(errors) < 0.3


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("slots", [2, 3])
def test_the_device_waits_for_all_workers_at_once(count: int, slots: int) -> None:
    """They attend at the same time, each to the caches of its own gpu_batches."""
    model, names = opt(4, 4096, 32, vocabulary=8192), [f"worker{i + 1}" for i in range(count)]
    for attention in (1e8, 1e9):
        hardware = replace(
            FLAT, workers=(None,) * count, worker_attention=dict.fromkeys(names, attention),
            worker_links=dict.fromkeys(names, 1e10), worker_seconds=1e-5,
        )  # fmt: skip
        for batches, weights in ((2, HALF), (4, DEVICE), (4, HALF), (8, HOST)):
            policy = Policy(16, batches, weights, {"workers": 1.0}, DEVICE, slots, "zigzag", 4096)
            told, walked = both(model, hardware, Workload({(512, 8): 16 * batches}), policy)
            assert told.seconds == pytest.approx(walked.seconds, rel=0.12), (attention, policy)


def test_bytes_and_seconds_by_hand() -> None:
    """Pages go down for prompts alone; per generated token 4 h elements cross the links, the host reads the cache."""
    layers, h, s, n, b, page = 10, 4096, 512, 20, 32, 16
    model = opt(layers, h, 32, vocabulary=8192)
    policy = Policy(16, 2, DEVICE, HOST, schedule="zigzag", delegate="host")
    told = predicted(model, Workload({(s, n): b}), policy, KNOWN)
    tokens = b * (n - 1) * layers
    kv = 2 * 2 * h
    assert told.busy["h2d"] == pytest.approx(tokens * 2 * h / 1e10)
    assert told.busy["d2h"] == pytest.approx((tokens * 3 * 2 * h + layers * b * -(-s // page) * page * kv) / 8e9)
    assert told.busy["cpu"] == pytest.approx(layers * b * kv * sum(s + i for i in range(1, n)) / 4e10)
    moved = predicted(model, Workload({(s, n): b}), Policy(16, 2, DEVICE, HOST, schedule="zigzag"), KNOWN)
    read = layers * b * kv * sum(s + i for i in range(1, n)) / FLAT.decode_attention[0][1]
    assert moved.busy["device"] - told.busy["device"] == pytest.approx(read, rel=1e-6)
    assert "cpu" not in moved.busy
    lost = replace(KNOWN, delegation={model.signature(0): 0.25})
    longer = predicted(model, Workload({(s, n): b}), policy, lost)
    cells = (n - 1) * layers * 2
    assert longer.busy["device"] - told.busy["device"] == pytest.approx(cells * (0.25 - KNOWN.task_seconds))


def test_cost_is_monotone_in_the_host() -> None:
    model, work = opt(6, 2048, 32), Workload({(512, 16): 32})
    policy = Policy(8, 4, cache=HOST, schedule="zigzag", delegate="host")
    seconds = [predicted(model, work, policy, replace(FLAT, host_attention=x)).seconds for x in (1e8, 1e9, 1e10, 1e12)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 2 * seconds[-1]
    unknown = predicted(model, work, policy, replace(FLAT, host_attention=0.0))  # as slow as moving pages
    as_slow = predicted(model, work, policy, replace(FLAT, host_attention=1e10))
    assert unknown.busy["cpu"] == pytest.approx(as_slow.busy["cpu"])


def tight(hardware: Hardware) -> Hardware:
    """Room for the weights on the device, but not for the cache."""
    model = opt(12, 1024, 16, 4096)
    weights = sum(t.held_bytes for t in model.tensors)
    return replace(hardware, device_bytes=int(1.3 * weights), host_bytes=1 << 36, disk_bytes=1 << 40)


@pytest.mark.slow
def test_the_search_delegates_where_that_is_quicker_and_only_there() -> None:
    model, work = opt(12, 1024, 16, 4096), Workload({(900, 64): 256})
    slow_link = tight(replace(FLAT, links={**FLAT.links, "h2d": ((1.0, 1e9),), "d2h": ((1.0, 1e9),)}))
    quick_host = search(model, replace(slow_link, host_attention=1e11), work)
    slow_host = search(model, replace(slow_link, host_attention=1e7), work)
    unknown = search(model, slow_link, work)
    assert quick_host.best.policy.delegates
    assert quick_host.best.busy["cpu"] > 0
    assert quick_host.best.total_seconds < 0.9 * unknown.best.total_seconds
    assert not slow_host.best.policy.delegates
    assert not any(p.policy.delegates for p in unknown.tried)
    assert slow_host.best.total_seconds <= 1.01 * unknown.best.total_seconds
    for p in quick_host.tried:  # each is one that runs
        assert not p.policy.delegates or p.layout.delegation["host"] > 0


@pytest.mark.slow
def test_the_cpu_attends_to_pages_of_disks_if_that_is_faster() -> None:
    """RAM cannot hold the KV cache of OPT-30B, and long pages take the link to the device too long: as the virtual
    clock says of one policy with each choice, on a few layers, and as the search chooses."""
    t4 = Hardware.load(shipped.find("hardware", "t4-16gb_208gb_ssd"))
    policy = Policy(8, 32, (0.2, 0.8, 0), (0, 0.8, 0.2), DEVICE, 2, "diagonal")
    model, work = opt(3, *OPT["30b"][1:]), Workload({(512, 32): policy.block_size})
    walked = {each: both(model, t4, work, replace(policy, delegate=each))[1].seconds for each in DELEGATES}
    assert sorted(walked, key=walked.__getitem__) == ["all", "host", "none"]
    found = search(opt(*OPT["30b"]), t4, Workload({(512, 32): 1024}))
    assert (found.best.policy.delegate, found.best.policy.cache[2] > 0) == ("all", True)
    assert {p.policy.delegate for p in found.tried} == set(DELEGATES)


def test_a_layout_is_refused_where_there_is_no_host_apart() -> None:
    model, work = opt(2, 256, 4, 512), Workload({(20, 5): 8})
    policy = Policy(4, 2, cache=HALF, delegate="host")
    with pytest.raises(InvalidInput, match="RAM is the device"):
        lay_out(model, policy, work, Capacity(None, None, None, shared=True, staged=False))
    lay_out(model, policy, work, Capacity(None, None, None, shared=False, staged=True))
    cpu = replace(machine_of(random.Random(0), "cpu"), host_attention=1e10)
    found = search(model, replace(cpu, device_bytes=1 << 25, disk_bytes=1 << 30), work)
    assert not any(p.policy.delegates for p in found.tried)


def test_the_plan_says_so() -> None:
    assert not any("delegated" in line for line in policy_words(Policy()))
    assert any("attention is delegated" in line for line in policy_words(Policy(cache=HALF, delegate="host")))
    assert any("queries go first" in line for line in policy_words(Policy(cache={"workers": 1}, queries_first=True)))
    cost = Cost(opt(2, 256, 4, 512), KNOWN, Workload({(20, 5): 8}))
    assert cost.slowing(Policy(4, 2, cache=HOST, delegate="host")) == cost.crosstalk
    assert cost.slowing(Policy(8, 1, cache=HOST, delegate="host"))["device"]["cpu"] == 1.0
