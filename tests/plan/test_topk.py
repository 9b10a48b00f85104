"""Plans with chosen values: against the virtual clock and bytes by hand; what the search does with them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from bench.kernels.delegation_rule import rule_of
from flexengine.plan.cost import Cost
from flexengine.plan.delegation import PICK_SECONDS, chosen_share, waiting
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import CHOSEN, VALUES, lay_out
from flexengine.plan.search import search
from flexengine.plan.sparse import sparse_factor, sparse_warning
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, Split
from flexengine.shell.explain.text import topk_words
from tests.helpers.plans import DEVICE, DISK, FLAT, HOST, both, machine_of, opt, predicted

HALF: Split = (0.5, 0.5, 0)


@pytest.mark.parametrize("slots", [1, 2])
def test_the_clock_agrees(slots: int) -> None:
    """Windows, grouped heads and encoded caches among them."""
    rng, errors = random.Random(f"topk {slots}"), []
    for _ in range(16):
        batch, batches = rng.choice([4, 16, 32]), rng.choice([2, 3, 6])
        policy = Policy(batch, batches, rng.choice([DEVICE, HALF]), rng.choice([HOST, HALF, DISK]), DEVICE, slots,
                        "zigzag")  # fmt: skip
        model = replace(opt(6, 4096, 32), topk=rng.choice([0.05, 0.1, 0.4]), kv_heads=rng.choice([32, 8]),
                        windows=rng.choice([(), (100,) * 6]), kv_kept=rng.choice([0, 4608]))  # fmt: skip
        work = Workload({(rng.choice([128, 512]), rng.choice([4, 12])): batch * batches})
        told, walked = both(model, machine_of(rng, rng.choice(["sim", "cpu"])), work, policy)
        errors.append(abs(told.seconds / walked.seconds - 1))
    assert np.median(errors) < 0.03
    assert max(errors) < 0.25


def test_bytes_and_seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query head with a kv head of its own: keys and a tenth of the values of full pages, and the page that is
    being filled; the device waits for the former."""
    monkeypatch.setattr("flexengine.plan.delegation.PICK_SECONDS", 0.0)
    layers, h, s, n, b, page = 10, 4096, 512, 20, 32, 16
    model, policy = opt(layers, h, 32, vocabulary=8192), Policy(16, 2, DEVICE, HOST, schedule="zigzag")
    whole, told = (predicted(m, Workload({(s, n): b}), policy) for m in (model, replace(model, topk=0.1)))
    ahead = chosen = 0.0
    for past in range(s, s + n - 1):
        full = past // page * page
        ahead += -(-past // page) * page + page * (past % page > 0)
        chosen += 0.1 * full * (past + 1) / past
    half = 2 * h * layers * b  # bytes of the keys, or values, of one token of all rows
    assert told.busy["h2d"] == pytest.approx(half * (ahead + chosen) / 1e10, rel=0.005)
    assert told.busy["device"] - whole.busy["device"] == pytest.approx(half * chosen / 1e10, rel=0.01)
    assert told.busy["h2d"] / whole.busy["h2d"] == pytest.approx((1 + 0.1) / 2, rel=0.03)
    assert told.busy["d2h"] == whole.busy["d2h"]


def test_groups_want_more_and_disks_read_what_lies_between() -> None:
    model = replace(opt(2, 4096, 32), topk=0.1)
    assert chosen_share(model) == pytest.approx(0.1)
    assert chosen_share(replace(model, kv_heads=8)) == pytest.approx(1 - 0.9**4)
    assert chosen_share(model, 16) == pytest.approx(1 - 0.9**16)
    lanes, handling = waiting(model, FLAT, "disk", 1000.0, 1000.0)
    near = 64 * 1024 / (128 * 2) + 1  # values that a disk reads together: nearer than 64 KiB
    assert lanes["disk_read"] == pytest.approx(1000 * (1 - 0.9**near) * 2 * 4096 / 2e9)
    assert lanes["h2d"] == pytest.approx(1000 * 0.1 * 2 * 4096 / 1e10)
    assert handling == pytest.approx(1000 * 0.1 * 32 * PICK_SECONDS)


def test_delegation_and_resident_caches_load_no_values() -> None:
    model, work = opt(4, 2048, 32), Workload({(256, 8): 32})
    for policy in (Policy(16, 2, schedule="zigzag"), Policy(16, 2, cache=HOST, schedule="zigzag", delegate="host")):
        assert predicted(replace(model, topk=0.1), work, policy).busy == predicted(model, work, policy).busy


def test_memory() -> None:
    """A buffer for values on either side, where some cache is away."""
    model, endless = replace(opt(2, 512, 8), topk=0.1), Capacity(None, None, None, shared=False, staged=True)
    for rows, prompt in ((4, 20), (16, 2000)):
        layout = lay_out(model, Policy(rows, 1, cache=HALF), Workload({(prompt, 5): rows}), endless)
        assert layout.values == min(CHOSEN, -(-layout.cache_buffer // 2 // 4096) * 4096)
        assert layout.account["device"][VALUES] == layout.account["host"][VALUES] == layout.values
    assert VALUES not in lay_out(model, Policy(4, 1), Workload({(20, 5): 4}), endless).account["device"]


def test_it_is_said_where_it_matters() -> None:
    model, work = replace(opt(2, 512, 8), topk=0.1), Workload({(64, 8): 8})
    told = {cache: topk_words(model, predicted(model, work, Policy(4, 2, cache=cache))) for cache in (DEVICE, HALF)}
    assert not told[DEVICE]
    assert "10 % of the values" in told[HALF][0]
    exact = replace(model, topk=None)
    assert not topk_words(exact, predicted(exact, work, Policy(4, 2, cache=HALF)))


@pytest.mark.parametrize(("link", "longer"), [(1e11, True), (1e8, False)])
def test_a_plan_says_if_the_switch_makes_the_job_longer(link: float, longer: bool) -> None:
    """Where computing takes longer than loading, the device waits for the values on top. Where the link is the limit,
    fewer bytes save time."""
    hardware = replace(FLAT, links={**FLAT.links, "h2d": ((1.0, link),)})
    model, work = replace(opt(10, 4096, 32, vocabulary=8192), topk=0.3), Workload({(512, 20): 32})
    policy = Policy(16, 2, DEVICE, HOST, schedule="zigzag")
    with_values, without = (predicted(m, work, policy, hardware) for m in (model, replace(model, topk=None)))
    cost, factor = Cost(model, hardware, work), with_values.seconds / without.seconds
    assert sparse_factor(cost, with_values) == pytest.approx(factor)
    assert (factor > 1.03) == longer
    warning = sparse_warning(cost, with_values)
    assert ("times as long" in warning and "leave --sparse-attention out" in warning) == longer
    exact = Cost(replace(model, topk=None), hardware, work)
    assert (sparse_factor(exact, without), sparse_warning(exact, without)) == (1.0, "")


def test_the_rule_moves_what_attention_reads() -> None:
    """Half of the cache less to move puts delegation off."""
    model = opt(2, 2048, 16)
    rates = dict(up=1e9, down=1e9, host=3e9, sequences=8, computing=1e-4)
    every, few = (rule_of(model, topk, **rates) for topk in (None, 0.1))
    assert few.on_device[0][1] == pytest.approx(0.55 * every.on_device[0][1])
    lanes = [line for _, line in replace(few, overlap=True).on_device]
    assert lanes[0] == pytest.approx(0.55 * 8 * few.kv / 1e9)
    assert lanes[2] == pytest.approx(0.05 * 8 * few.kv / 1e9)


@pytest.mark.slow
def test_the_search_knows_where_it_pays() -> None:
    """OPT-30B whose cache lies in host RAM. Where each query head has its own keys and values, it saves a sixth; where
    four share them they want more than a third of the values, and it saves less: 4 % on the virtual clock (1,366 and
    1,305 s), and 11 % in the prediction, which does not know how chosen values wait beside prompts."""
    links = {"disk_read": 2e9, "disk_write": 1e9, "h2d": 1.2e10, "d2h": 1.2e10}
    hardware = replace(
        FLAT, kind="cuda", device_bytes=14 << 30, host_bytes=200 << 30, products={"float16": 3e13}, links=links,
        prompt_attention=2e13, decode_attention=3e11,
    )  # fmt: skip
    work, model = Workload({(512, 64): 512}), opt(48, 7168, 56)
    found = {
        (topk, kv_heads): search(replace(model, topk=topk, kv_heads=kv_heads), hardware, work).best
        for topk in (None, 0.1) for kv_heads in (56, 14)
    }  # fmt: skip
    assert all(p.fractions["cache@host"] > 0.5 for p in found.values())
    assert found[0.1, 56].total_seconds < 0.9 * found[None, 56].total_seconds
    assert found[0.1, 14].total_seconds > 0.87 * found[None, 14].total_seconds
