"""plan.problem: the program's bytes against the layout's accounts, for every placement of small models."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from flexengine.places import TIERS
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.problem import MemoryLimit, memories
from flexengine.plan.sizes import ALIGN, sweep_tokens
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, Split
from flexengine.schedule.pages import pages_for
from flexengine.schedule.sweeps import Sequence, Sweeps
from tests.helpers.plans import opt

MODEL = opt(6, 256, 4, 512)
HALVES: tuple[Split, ...] = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 0.5, 0), (0.5, 0, 0.5), (0, 0.5, 0.5))
SCHEDULES = ("row", "zigzag", "diagonal", "continuous")
ENDLESS = Capacity(None, None, None, shared=False, staged=True)
LIMITED = Capacity(1 << 40, 1 << 40, 1 << 40, shared=False, staged=True)
BUFFERS = ("hidden buffers", "hidden staging", "cache buffers", "cache staging")
WORK = Workload({(400, 8): 30})
SHAPE = Policy(4, 5, prefill_tokens=96)
ROW = MODEL.hidden * MODEL.itemsize


def laid_out(policy: Policy, work: Workload = WORK) -> Layout:
    return lay_out(MODEL, policy, work, ENDLESS)


def program(shape: Policy, work: Workload = WORK) -> tuple[MemoryLimit, ...]:
    """The rows for a block shape. Pages are counted here: all rows of a block have them at their end at once."""
    corners = {}
    for tier in TIERS:
        split = tuple(float(t == tier) for t in TIERS)
        corners[tier] = laid_out(replace(shape, weights=split, cache=split, activations=split), work)  # type: ignore[arg-type]
    cache = {tier: float(sum(pages_bytes(work, tokens, shape.block_size))) for tier, tokens in
             ((t, layout.pools[t][0].page_tokens) for t, layout in corners.items())}  # fmt: skip
    return memories(corners, cache, LIMITED)


def pages_bytes(work: Workload, page_tokens: int, count: int) -> Iterator[int]:
    (((prompt, new), _),) = work.sizes.items()
    for _ in range(count):
        yield pages_for(prompt + new - 1, page_tokens) * page_tokens * MODEL.kv_token * len(MODEL.layers)


def placements(shape: Policy) -> Iterator[Policy]:
    for weights, cache, hidden in product(HALVES, HALVES, HALVES):
        yield replace(shape, weights=weights, cache=cache, activations=hidden)


def fractions(policy: Policy) -> dict[str, float]:
    splits = {"weights": policy.weights, "cache": policy.cache, "hidden": policy.activations}
    return {f"{kind}@{t}": share for kind, split in splits.items() for t, share in zip(TIERS, split, strict=True)}


def rounding(layout: Layout) -> int:
    """Half a tensor's worth of each edge of a share, one sequence's pages, one gpu_batch's hidden states."""
    largest = max(t.held_bytes for t in MODEL.tensors)
    page = max(page for pages in layout.page_bytes.values() for page in pages) * len(MODEL.layers)
    sequence = page * max(pages_for(WORK.longest, pool.page_tokens) for (pool,) in layout.pools.values())
    tensors = 2 * largest * (1 + layout.policy.slots)  # of what lies there and of the slots or staging
    return tensors + sequence + SHAPE.prefill_tokens * ROW + (len(MODEL.tensors) + 64) * ALIGN


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_programs_bytes_are_the_layouts(schedule: str) -> None:
    """All 216 placements in halves. What is not away needs no buffers, which the program counts all the same."""
    shape = replace(SHAPE, schedule=schedule)
    if schedule == "row":
        shape = replace(shape, num_gpu_batches=1)
    rows = program(shape)
    for policy in placements(shape):
        layout = laid_out(policy)
        everything = laid_out(replace(policy, weights=(0, 0, 1), cache=(0, 0.5, 0.5), activations=(0, 0.5, 0.5)))
        for memory in rows:
            foreseen, booked = memory.used.value(fractions(policy)), layout.total(memory.label)
            spare = sum(max(0, everything.account[memory.label].get(what, 0)
                             - layout.account[memory.label].get(what, 0)) for what in BUFFERS)  # fmt: skip
            assert booked - rounding(layout) <= foreseen <= booked + rounding(layout) + spare, (memory.label, policy)


def test_every_fraction_is_in_a_row() -> None:
    """Hidden states at home on the device take room there, as do weights and cache."""
    device, host, disk = program(SHAPE)
    for memory, place in ((device, "device"), (host, "host"), (disk, "disk")):
        homes = {name for name, k in memory.used.coefficients.items() if k > 0 and name.endswith(f"@{place}")}
        kinds = {"weights", "cache", "hidden"} - ({"weights"} if place == "disk" else set())  # the checkpoint is there
        assert homes == {f"{kind}@{place}" for kind in kinds}
    assert device.used.coefficients["hidden@device"] == pytest.approx(sweep_tokens(SHAPE, WORK) * ROW, abs=ALIGN)


@pytest.mark.parametrize(("schedule", "prompts"), [("row", 4), ("zigzag", 20), ("diagonal", 4), ("continuous", 20)])
def test_peaks_follow_the_schedule(schedule: str, prompts: int) -> None:
    """In a diagonal schedule the prompts of one gpu_batch are computed in a sweep, not those of the block."""
    policy = replace(SHAPE, schedule=schedule, activations=(0, 1, 0))
    block = policy.block_size
    assert sweep_tokens(policy, WORK) == prompts * 400 + block - prompts
    booked = laid_out(policy).account["host"]["hidden states"]
    assert 0 <= booked - sweep_tokens(policy, WORK) * ROW <= (3 * block + prompts * 5) * ALIGN


RAGGED = ((5, 3), (200, 7), (40, 30), (90, 1), (13, 12), (1, 25), (64, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("hidden", [(1, 0, 0), (0.5, 0.5, 0), (0.2, 0.5, 0.3), (0, 0, 1)])
def test_no_sweep_holds_more_than_is_booked(schedule: str, hidden: Split) -> None:
    """Simulated to the end: tokens of each sweep, and those at home on each tier with a whole block for each batch."""
    policy = Policy(3, 4, activations=hidden, cache=(0.5, 0.5, 0), schedule=schedule, prefill_tokens=64)
    sizes = [RAGGED[i % len(RAGGED)] for i in range(40)]
    work = Workload.of(sizes)
    layout = laid_out(policy, work)
    sweeps = Sweeps(policy, layout.pools)
    for i, (prompt, new) in enumerate(sizes):
        sweeps.add(Sequence(i, prompt, new))
    computed = 0
    while not sweeps.idle:
        batches = sweeps.begin(lambda _, __: None)
        assert sum(b.tokens for b in batches) <= sweep_tokens(policy, work)
        for tier, booked in layout.hidden_home.items():
            there = [b.tokens * ROW for b in batches if b.hidden_home == tier]
            assert sum(-(-n // ALIGN) * ALIGN for n in there) <= booked
        device = sum(b.tokens for b in batches if b.hidden_home == "device")
        held = (sum(b.tokens for b in batches) + device) * ROW
        assert held <= layout.account["device"].get("paused forwards", held)
        computed += sum(b.tokens for b in batches)
        sweeps.advance(batches, set())
    assert computed == sum(p + n - 1 for p, n in sizes)
