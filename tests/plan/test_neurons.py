"""plan.neurons for experts: shares against a simulation, and the memory that fits."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexengine.guests.flash.neurons import Arena
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts, NeuronFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.neurons import Use, experts_share, part_of, reads, rooms, share_of, terms, waits
from flexengine.plan.profile import Profile
from flexengine.plan.rates import Rates
from flexengine.plan.search import search
from flexengine.plan.terms import Sweeping
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.explain import text as explain
from tests.helpers.explained import CPU
from tests.helpers.explained import model as toy_model


def experts(count: int, active: int, record: int = 1000) -> NeuronFacts:
    reuse = tuple(float(experts_share(active, count, tokens)) for tokens in range(1, 65))
    return NeuronFacts(count, record, "experts", reuse=reuse, stored=record // 2, experts=True)


def simulated(count: int, active: int, rows: int, room: int, steps: int = 4000) -> float:
    """Return the mean share of the experts that least recently used memory misses, if tokens choose evenly."""
    rng, held, missed = np.random.default_rng(0), OrderedDict[int, None](), 0
    for _ in range(steps):
        chosen = {int(e) for _ in range(rows) for e in rng.choice(count, active, replace=False)}
        missed += len(chosen - held.keys())
        for expert in chosen:
            held[expert] = None
            held.move_to_end(expert)
        while len(held) > room:
            held.popitem(last=False)
    return missed / steps / count


@pytest.mark.parametrize(("count", "active", "rows", "room"), [(8, 2, 1, 4), (64, 4, 1, 32), (64, 4, 4, 40)])
def test_missing_experts(count: int, active: int, rows: int, room: int) -> None:
    found = float(Use(experts(count, active)).missing(np.asarray(float(rows)), room / count))
    assert found == pytest.approx(simulated(count, active, rows, room), rel=0.12)


def test_no_expert_is_missing_if_all_fit() -> None:
    assert not Use(experts(8, 2)).missing(np.array([1.0, 4.0]), 1.0).any()


@pytest.mark.parametrize("rows", [1, 3])
def test_used_experts(rows: int) -> None:
    assert Use(experts(8, 2)).used(np.array([float(rows)]))[0] == pytest.approx(1 - 0.75**rows)


def facts(*blocks: NeuronFacts | None) -> ModelFacts:
    return ModelFacts((), (), None, None, 100, 8, 8, 1, 1, 8, 4, blocks=blocks)


def test_reads_are_stored_bytes() -> None:
    """Half of the experts in memory: a quarter of those that a token of a mixture of two in eight uses are new."""
    found = reads(facts(experts(8, 2), None), Policy(neurons=0.5), 1.0)
    assert found == pytest.approx(0.25 * (1 - 0.5) * 8 * 500, rel=0.05)


@pytest.mark.parametrize("free", [0, 3000, 50_000, 123_456, 10**9])
def test_share_of(free: int) -> None:
    """The largest share of thousandths whose rooms, in whole pages, take at most `free` bytes more than the least."""
    blocks = (experts(8, 2, 9000), None, experts(6, 2, 7000), NeuronFacts(200, 500, "records"))
    known = facts(*blocks)

    def taken(thousandths: int) -> int:
        held = zip(blocks, rooms(blocks, thousandths / 1000), strict=True)
        return sum(-(-room * b.record // 4096) * 4096 for b, room in held if b is not None)

    best = max(t for t in range(1001) if taken(t) - taken(0) <= free)
    assert share_of(known, free) == best / 1000
    assert share_of(known, None) == 1.0
    assert share_of(facts(), free) == share_of(replace(known, blocks=(None,)), 5) == 0.0


def block(active: float, neurons: int = 1000) -> NeuronFacts:
    """Return a block of which k successive tokens use active * sqrt(k) of the neurons."""
    return NeuronFacts(neurons, 512, "records", reuse=tuple(active * k**0.5 for k in range(1, 17)))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 0.9, 1.0])
def test_rooms(share: float) -> None:
    """Together they take the share of all bytes. Layers have room for the neurons of equally many tokens."""
    blocks = (block(0.02), None, block(0.08), block(0.02, 500))
    found = rooms(blocks, share)
    assert found[1] == 0
    assert all(64 <= n <= b.neurons for n, b in zip(found, blocks, strict=True) if b is not None)
    if share == 1:
        assert found == (1000, 0, 1000, 500)
    if share == 0.2:  # above the least, and below all neurons of the second block
        assert sum(found) == pytest.approx(share * 2500, abs=3)
        assert found[2] == pytest.approx(4 * found[0], rel=0.03)
        assert found[0] == pytest.approx(2 * found[3], rel=0.03) or found[3] == 64


def test_equal_layers_have_equal_rooms() -> None:
    assert rooms((block(0.1), block(0.1)), 0.3) == (300, 300)
    assert rooms((NeuronFacts(1000, 512, "records"),) * 2, 0.3) == (300, 300)


FORM = "2 vectors of 16 float32"
RATES = {"read": ((1.0, 1e6),), "all_read": ((16.0, 4e6),), "some": ((4.0, 5e7),), "all": ((16.0, 2e7),)}


def of(reuse: tuple[float, ...]) -> NeuronFacts:
    return NeuronFacts(1000, 128, FORM, guess=2_000_000, reuse=reuse)


def seconds(facts: ModelFacts, machine: Hardware, policy: Policy, sweeps: Profile, prompt: float) -> Any:
    data = Sweeping(facts, machine, policy, sweeps, (), Rates.of(facts, machine))
    return sum((term.seconds for term in terms(data, prompt)), np.zeros(sweeps.times.shape))


def test_seconds() -> None:
    """Each decode sweep reads the missing neurons and computes the used ones; a prompt passes over all of them."""
    facts = replace(toy_model(2), blocks=(of((0.02, 0.03, 0.035)), None))
    machine = replace(CPU, blocks={facts.blocks[0].signature: RATES})
    policy, work = Policy(1, 1, neurons=0.03), Workload({(8, 5): 1})
    cost = Cost(facts, machine, work)
    sweeps = cost.sweeps(policy)
    found = seconds(facts, machine, policy, sweeps, 8.0)
    # Room for 64 of 1000 neurons: those of the last k = 3 (64 / 35)^p tokens, where 0.035 (k / 3)^p is measured use.
    power = np.log(0.035 / 0.03) / np.log(3 / 2)
    k = 3 * (0.064 / 0.035) ** (1 / power)
    missing = 0.035 * (((k + 1) / 3) ** power - (k / 3) ** power)
    each = missing * 128_000 / 1e6 + 0.02 * 128_000 / 5e7 + 2_000_000 / machine.elementwise
    decode = sweeps.decoding > 0
    assert found[decode] == pytest.approx(np.full(decode.sum(), each), rel=0.01)
    assert found[~decode] == pytest.approx(np.full((~decode).sum(), 128_000 / 4e6))


@pytest.mark.parametrize(("prompts", "batch", "gpu_batches"), [((8,), 8.0, 1), ((4, 60), 64.0, 1), ((50, 50), 50.0, 2)])
def test_seconds_of_prompts(prompts: tuple[int, ...], batch: float, gpu_batches: int) -> None:
    """A gpu_batch of prompts passes over all records, at the rate for its number of tokens; beyond the measured ones,
    seconds grow with tokens."""
    coming = ((4.0, 4e6), (16.0, 4e6))
    facts = replace(toy_model(2), blocks=(of((0.02, 0.03)), None))
    machine = replace(CPU, blocks={facts.blocks[0].signature: {**RATES, "all_read": coming}})
    policy = Policy(len(prompts), 1, neurons=0.1)
    sweeps = Cost(facts, machine, Workload.of((p, 5) for p in prompts)).sweeps(policy)
    found = seconds(facts, machine, policy, sweeps, batch)[sweeps.prompt > 0]
    each = 128_000 / 4e6 * max(1, sum(prompts) / gpu_batches / 16)
    assert found == pytest.approx([gpu_batches * each])


def test_few_prompts_make_one_gpu_batch() -> None:
    """If one prompt enters per sweep, each sweep reads all records, however many prompts a gpu_batch has room for."""
    facts = replace(toy_model(2), blocks=(of((0.02, 0.03)), None))
    machine = replace(CPU, blocks={facts.blocks[0].signature: RATES})
    sweeps = Cost(facts, machine, Workload({(8, 5): 4})).sweeps(Policy(1, 1))
    found = seconds(facts, machine, Policy(1, 1), sweeps, 32.0)[sweeps.prompt > 0]
    assert found == pytest.approx(np.full(len(found), 128_000 / 4e6))


def test_records_that_all_fit_are_read_once() -> None:
    facts = replace(toy_model(2), blocks=(of((0.02, 0.03)), None))
    machine = replace(CPU, blocks={facts.blocks[0].signature: RATES})
    policy = Policy(1, 1, neurons=1.0)
    sweeps = Cost(facts, machine, Workload({(8, 5): 4})).sweeps(policy)
    found = seconds(facts, machine, policy, sweeps, 8.0)[sweeps.prompt > 0]
    assert found == pytest.approx([128_000 / 4e6 + 128_000 / 2e7, *[128_000 / 2e7] * (len(found) - 1)])


@pytest.mark.parametrize(("faults", "expected"), [(5.0, 0.0), (12.0, 3.0)])
def test_page_faults_while_the_device_waits(faults: float, expected: float) -> None:
    """A prompt's records take 10 s to read and 1 s to compute. Page faults hide in the 9 s in which the device
    waits."""
    rates = {**RATES, "all_read": ((16.0, 128_000 / 10),), "all": ((16.0, 128_000 / 1),)}
    facts = replace(toy_model(2), blocks=(of((0.02, 0.03)), None))
    policy, work = Policy(1, 1), Workload({(8, 1): 1})
    machine = replace(CPU, crosstalk={}, checkpoint_read=((1.0, 1e10),), blocks={facts.blocks[0].signature: rates})
    layout = lay_out(facts, policy, work, machine.capacity)
    booked = sum(layout.total(tier) for tier in ("device", "host")) - layout.account["device"]["KV cache"]
    cost = Cost(facts, replace(machine, touch=booked / faults), work)
    assert waits(facts, machine, policy, cost.sweeps(policy), 8.0) == pytest.approx([9.0])
    assert cost.predict(layout).load_seconds == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("room", "part"), [(2, 1), (31, 15), (64, 32), (255, 32), (500, 62), (8000, 1000)])
def test_parts_of_neurons(room: int, part: int) -> None:
    """An eighth of the room, or as many as are read at once; two parts fit."""
    assert part_of(room) == part


def test_tokens_that_use_more_than_fits_read_in_parts() -> None:
    """With room for 320 of 500 neurons, 240 stay, and 40 are read at once, however alike tokens are."""
    slow = {**RATES, "read": ((20.0, 1e6), (80.0, 4e6))}
    facts = replace(toy_model(2), blocks=(of((0.5, 0.5)), None))
    machine = replace(CPU, blocks={facts.blocks[0].signature: slow})
    policy, work = Policy(1, 1, neurons=0.32), Workload({(8, 5): 1})
    sweeps = Cost(facts, machine, work).sweeps(policy)
    found = seconds(facts, machine, policy, sweeps, 8.0)[sweeps.decoding > 0]
    each = 0.26 * 128_000 / 2e6 + 0.5 * 128_000 / 5e7 + 2_000_000 / machine.elementwise
    assert found == pytest.approx(np.full(len(found), each), rel=0.01)


@pytest.mark.parametrize(("active", "room"), [(0.1, 64), (0.1, 90), (0.2, 160), (0.05, 64)])
def test_missing_neurons_if_more_are_used_than_fit(active: float, room: int) -> None:
    """Against the memory itself: random neurons, of which tokens keep half."""
    rng, arena, wanted, read, used = np.random.default_rng(0), Arena(1000, room), np.arange(0), [], []
    count = int(2 * active * 1000)
    for _ in range(40):
        kept = rng.choice(wanted, len(wanted) // 2, replace=False) if len(wanted) else wanted
        rest = np.setdiff1d(np.arange(1000), kept)
        wanted = np.sort(np.append(kept, rng.choice(rest, count - len(kept), replace=False)))
        runs = arena.overlapping(wanted, part_of(room))
        read.append(sum(len(arena.fetch(run).neurons) for run in runs))
        used.append(count)
    facts = of((2 * active, 3 * active))
    assert float(Use(facts).missing(np.asarray(1.0), room / 1000)) * 1000 == pytest.approx(np.mean(read[5:]), rel=0.1)


def test_the_report_has_what_is_used_and_read() -> None:
    facts = replace(toy_model(2), blocks=(of((0.02, 0.03, 0.035)), None))
    found = search(facts, replace(CPU, device_bytes=None), Workload({(8, 5): 1})).best
    assert found.policy.neurons == 1.0
    text = explain.report("toy", facts, CPU, Workload({(8, 5): 1}), found)
    assert "neurons  100.0 % of 128 kB in memory; a token of 1 sequence uses 2.0 % and reads 0.00 %: 0 B" in text
    assert "waits for computing and reads of neurons" in text
