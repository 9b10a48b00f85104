"""plan.layout against formulas written anew here."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from flexengine.codec.forms import make_form
from flexengine.errors import OutOfMemory, size
from flexengine.places import TIERS
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.sizes import (
    READ,
    READ_BUFFERS,
    SHORT_READ,
    SHORT_READERS,
    STRAIGHT,
    slot_bytes,
    slot_offsets,
    workspace,
)
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.schedule.place import assign_tiers, place_groups
from flexengine.tier import disk
from tests.helpers.drawn import model_of, policy_of, work_of
from tests.helpers.plans import opt
from tests.helpers.strategies import RANDOMS

FREE = Capacity(None, None, None, shared=False, staged=True)


def up(n: int, to: int) -> int:
    return n if n % to == 0 else n + to - n % to


def lengths_of(work: Workload) -> list[tuple[int, int]]:
    """(prompt tokens, most tokens to generate) of every sequence."""
    return [size for size, times in work.sizes.items() for _ in range(times)]


def num_buffers(policy: Policy) -> int:
    """With overlap, one gpu_batch is loaded, one computed and one stored; a third slot is one more to load ahead."""
    return {1: 1, 2: 3, 3: 4}[policy.slots]


def expected(model: ModelFacts, policy: Policy, work: Workload, staged: bool) -> dict[str, dict[str, int]]:
    """The whole account where memory has no end."""
    account: dict[str, dict[str, int]] = {t: {} for t in TIERS}
    buffers = num_buffers(policy)
    slot, stage = streamed_unit(model, policy)
    homes = [pair for unit in placed(model, policy) for pair in unit]
    homes += [(t, "device") for t in model.others]
    account["device"]["weights"] = sum(up(t.held_bytes, 4096) for t, home in homes if home == "device")
    account["host"]["weights"] = sum(up(t.stored_bytes, 4096) for t, home in homes if home == "host")
    account["device"]["weight slots"] = policy.slots * up(slot, 4096)
    account["host"]["weight staging"] = policy.slots * up(stage, 4096) if staged else 0
    account["device"]["workspace"] = workspace(model, policy, work)
    block = policy.gpu_batch_size * (1 if policy.schedule == "row" else policy.num_gpu_batches)
    row = model.hidden * model.itemsize
    longest = sorted((p for p, _ in lengths_of(work)), reverse=True)
    entering = policy.gpu_batch_size if policy.schedule == "diagonal" else block
    tokens = sum(longest[:entering]) + len(longest[entering:block])  # whole prompts enter; others add 1
    homes = {tier: min(tokens, math.ceil(share * tokens) + policy.prefill_tokens) if share else 0
             for tier, share in zip(TIERS, policy.activations, strict=True)}  # fmt: skip
    if block > policy.gpu_batch_size or sum(longest[:block]) > policy.prefill_tokens:  # several passes open at a time
        logits = 4 * model.vocabulary * min(block, len(lengths_of(work)))
        each = row + 8 * model.head_dim + 16  # the embedding's output, cosines and sines, id and position
        passes = (min(block, len(longest)) + tokens // policy.prefill_tokens + 1) * 192 * 1024
        account["device"]["paused forwards"] = up(tokens * each + homes["device"] * row + logits + passes, 4096)
    away = [t for t in ("host", "disk") if policy.activations[TIERS.index(t)] > 0]
    account["device"]["hidden buffers"] = buffers * up(policy.prefill_tokens * row, 4096) if away else 0
    account["host"]["hidden staging"] = account["device"]["hidden buffers"] if staged and "disk" in away else 0
    for tier in away:
        batches = min(block, len(longest)) + tokens // policy.prefill_tokens + 1
        account[tier]["hidden states"] = up(homes[tier] * row, 4096) + 4096 * batches
    cache_account(account, model, policy, work, staged)
    away = max(account["device"]["cache buffers"], account["device"]["hidden buffers"]) // buffers
    longest = max(sum(t.stored_bytes for t in model.tensors), away)
    ring = 3 * min(4 << 20, up(longest, 2 << 20)) if longest >= 1 << 20 else 0  # each buffer in huge pages
    account["host"]["read buffers"] = ring + 4 * up(min(1 << 20, longest) + 8192, 4096)
    return {tier: {what: n for what, n in booked.items() if n} for tier, booked in account.items()}


def placed(model: ModelFacts, policy: Policy) -> list[list[tuple[TensorFact, str]]]:
    """Each unit's tensors with their homes: the layers, the head (or the tied embedding), the embedding."""
    units = [*model.layers, *([(model.head,)] if model.head else []), (model.embedding,)]
    homes = place_groups(tuple(tuple(t.elements for t in unit) for unit in units), policy.weights)
    return [list(zip(unit, at, strict=True)) for unit, at in zip(units, homes, strict=True)]


def streamed_unit(model: ModelFacts, policy: Policy) -> tuple[int, int]:
    """Bytes of the largest streamed unit in a slot, and of its disk part in staging."""
    slot = stage = 0
    units = placed(model, policy)
    for pairs in units[: len(model.layers)]:
        slot = max(slot, sum(in_slot(t.held_bytes) for t, home in pairs if home != "device"))
        stage = max(stage, sum(in_slot(t.stored_bytes) for t, home in pairs if home == "disk"))
    head, home = units[len(model.layers)][0]
    if home != "device":
        row = model.hidden * head.held
        room = slot or 64 << 20
        most = max(1, (room - 4096 * (room >= STRAIGHT)) // row)
        rows = math.ceil(model.vocabulary / math.ceil(model.vocabulary / most))  # as many chunks, of the same size
        slot = max(slot, in_slot(rows * row))
        if home == "disk":
            stage = max(stage, in_slot(rows * model.hidden * head.stored))
    return slot, stage


def in_slot(nbytes: int) -> int:
    return up(nbytes, 64) + 4096 * (nbytes >= STRAIGHT)


def cache_account(
    account: dict[str, dict[str, int]], model: ModelFacts, policy: Policy, work: Workload, staged: bool
) -> None:
    token = 2 * model.kv_heads * model.head_dim * model.itemsize
    lengths = sorted((p + n - 1 for p, n in lengths_of(work)), reverse=True)
    homes = assign_tiers([1] * policy.block_size, policy.cache)
    buffer = stage = 0  # pages of the host are copied straight to the device
    for tier in set(homes):
        tokens = 16
        if tier != "device":  # an extent: 256 KiB or the longest sequence, in steps of 16 tokens, whole blocks
            tokens = next(t for t in range(16, 1 << 20, 16) if t >= min(lengths[0], (256 << 10) / token)
                          and t * token % 4096 == 0)  # fmt: skip
            most = lengths[: min(policy.gpu_batch_size, homes.count(tier))]
            buffer = max(buffer, pages := sum(up(n, tokens) for n in most) * token)
            stage = pages if tier == "disk" else stage
        cached = sum(up(n, tokens) for n in lengths[: homes.count(tier)])
        account[tier]["KV cache"] = up(cached * token * len(model.layers), 4096)
    buffers = num_buffers(policy)
    account["device"]["cache buffers"] = buffers * up(buffer, 4096)
    account["host"]["cache staging"] = buffers * up(stage, 4096) if staged else 0


def totals(layout: Layout) -> dict[str, int]:
    return {tier: layout.total(tier) for tier in TIERS}


def within(layout: Layout, capacity: Capacity) -> bool:
    used = totals(layout)
    if capacity.shared:
        used["device"] += used.pop("host")
    return all(getattr(capacity, t) is None or n <= getattr(capacity, t) for t, n in used.items())


@pytest.mark.parametrize("staged", [True, False])
@given(rng=RANDOMS)
@settings(max_examples=100)
def test_account(staged: bool, rng: random.Random) -> None:
    model, policy, work = model_of(rng), policy_of(rng), work_of(rng)
    layout = lay_out(model, policy, work, replace(FREE, staged=staged))
    assert layout.account == expected(model, policy, work, staged)
    assert layout.homes["norm"] == "device"
    for unit in placed(model, policy):
        assert {t.name: home for t, home in unit}.items() <= layout.homes.items()


@given(rng=RANDOMS)
@settings(max_examples=100)
def test_workspace_bounds_its_parts(rng: random.Random) -> None:
    """At least what the widest moment and the logits need, at most a few times that; less budget, less workspace."""
    model, policy, work = model_of(rng), policy_of(rng), work_of(rng)
    tokens = min(policy.prefill_tokens, sum(sorted(p for p, _ in lengths_of(work))[::-1][: policy.block_size]))
    gated = tokens * (3 * model.width + model.hidden) * model.itemsize
    attention = tokens * 2 * (model.heads + 2 * model.kv_heads) * model.head_dim * model.itemsize
    logits = 4 * model.vocabulary * min(policy.gpu_batch_size, len(lengths_of(work)))
    least = max(gated, attention) + logits
    found = workspace(model, policy, work)
    assert found % 4096 == 0
    assert least <= found
    fewer = workspace(model, replace(policy, prefill_tokens=8), work)
    assert fewer <= found


@given(rng=RANDOMS)
@settings(max_examples=50)
def test_head_chunks_cover_the_vocabulary(rng: random.Random) -> None:
    model, policy = model_of(rng), policy_of(rng)
    layout = lay_out(model, policy, work_of(rng), FREE)
    chunks = layout.head_chunks(model.vocabulary)
    assert [row for low, high in chunks for row in range(low, high)] == list(range(model.vocabulary))
    head = model.edges[0]
    if layout.homes[head.name] == "device":
        assert len(chunks) == 1
    else:
        sizes = [high - low for low, high in chunks]
        assert max(sizes) * model.hidden * head.held <= layout.slot
        assert max(sizes) - min(sizes) < len(chunks)


@pytest.mark.parametrize("home", [(0, 1, 0), (0, 0, 1)])
def test_the_slot_of_an_encoded_head_holds_its_largest_chunk(home: tuple[float, float, float]) -> None:
    """The last block of 32001 rows has one row, so the mean of all blocks is less than one of them."""
    form = make_form("fp8-128x128", 32001, 4096)
    most, mean = form.with_rows(form.step).nbytes, form.nbytes // 251 + 1
    head = TensorFact("head", 32001 * 4096, 4, 1, encoded=form.nbytes, together=form.step, most=most)
    model = replace(opt(1, 4096, 32, 32001), layers=((TensorFact("0", 10 * mean, 1, 1),),), head=head)
    policy = Policy(gpu_batch_size=1, num_gpu_batches=1, weights=home)
    layout = lay_out(model, policy, Workload({(8, 8): 1}), FREE)
    for low, high in layout.head_chunks(model.vocabulary):
        chunk = form.with_rows(high - low).nbytes
        assert chunk <= layout.slot
        assert home[1] or chunk <= layout.stages["disk"]


def test_slot_offsets() -> None:
    assert slot_offsets([("a", 1), ("b", 64), ("c", 65), ("d", 3)], {"a": 7}) == {"a": 0, "b": 64, "c": 128, "d": 256}
    assert slot_offsets([], {}) == {}
    assert slot_bytes([]) == 0


def test_a_large_tensor_lies_in_a_slot_as_in_its_file() -> None:
    """As many bytes after a multiple of 4096, unless its elements would lie across multiples of their size."""
    sizes = [("a", 100), ("b", STRAIGHT), ("c", STRAIGHT + 3), ("d", STRAIGHT), ("e", STRAIGHT - 1)]
    starts = {"a": 8, "b": 3 * 4096 + 112, "c": 8, "d": 8 * 4096 + 4, "e": 16}
    found = slot_offsets(sizes, starts)
    assert (found["b"] % 4096, found["c"] % 4096) == (112, 8)
    assert found["d"] % 64 == found["e"] % 64 == 0
    rising = [found[name] for name, _ in sizes]
    ends = [start + nbytes for start, (_, nbytes) in zip(rising, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*rising[1:], slot_bytes(n for _, n in sizes)], strict=True))


@given(rng=RANDOMS)
@settings(max_examples=100)
def test_a_slot_ends_where_its_last_tensor_does(rng: random.Random) -> None:
    sizes = [rng.choice((300, 3 * STRAIGHT)) * rng.randint(1, 300) // 300 for _ in range(rng.randint(1, 8))]
    starts = {str(i): rng.randrange(10**9) for i in range(len(sizes)) if rng.random() < 0.8}
    tensors = [(str(i), n) for i, n in enumerate(sizes)]
    last = slot_offsets(tensors, {})[str(len(sizes) - 1)]
    assert last + in_slot(sizes[-1]) == slot_bytes(sizes)
    offsets = slot_offsets(tensors, starts)
    ends = [offsets[name] + nbytes for name, nbytes in tensors]
    assert all(end <= start for end, start in zip(ends, [*offsets.values()][1:], strict=False))
    assert ends[-1] <= slot_bytes(sizes)
    for name, nbytes in tensors:
        step = 4096 if nbytes >= STRAIGHT and starts.get(name, 1) % 8 == 0 else 64
        assert (offsets[name] - (starts[name] if step == 4096 else 0)) % step == 0


@pytest.mark.parametrize("shared", [False, True])
def test_limited_memory_is_never_overbooked_and_well_used(shared: bool) -> None:
    rng = random.Random(4)
    done = refused = 0
    while done < 150 or refused < 50:
        model, policy, work = model_of(rng), policy_of(rng), work_of(rng)
        free = totals(lay_out(model, policy, work, replace(FREE, staged=not shared)))
        if shared:
            free["device"] += free.pop("host")
        sizes = {t: int(n * rng.uniform(0.3, 1.1)) + 8192 for t, n in free.items()}
        tiers = set(assign_tiers([1] * policy.block_size, policy.cache))
        if shared and "host" in tiers:
            tiers.add("device")
        limits = {t: sizes.get(t) if t in tiers else None for t in TIERS}
        capacity = Capacity(**limits, shared=shared, staged=not shared)
        try:
            layout = lay_out(model, policy, work, capacity)
        except OutOfMemory:
            refused += 1
            continue
        done += 1
        assert within(layout, capacity)
        needed = lay_out(model, policy, work, replace(FREE, staged=not shared)).pools
        longest = max(p + n - 1 for p, n in lengths_of(work))
        assert any(pool.pages for (pool,) in layout.pools.values())
        for tier, (pool,) in layout.pools.items():
            assert pool.pages == 0 or pool.pages * pool.page_tokens >= longest
            assert pool.pages <= needed[tier][0].pages
            if not shared and longest <= pool.pages * pool.page_tokens and pool.pages < needed[tier][0].pages:
                page = layout.page_bytes[tier][0] * len(model.layers)
                assert sizes[tier] - layout.total(tier) < page + 2 * 4096  # not one page more would have fitted


@given(rng=RANDOMS)
@settings(max_examples=60)
def test_what_is_enough_is_enough(rng: random.Random) -> None:
    """With the bytes of the unlimited layout (and one block for rounding) it comes out the same."""
    model, policy, work = model_of(rng), policy_of(rng), work_of(rng)
    free = lay_out(model, policy, work, FREE)
    sizes = {t: n + 4096 for t, n in totals(free).items()}
    assert lay_out(model, policy, work, Capacity(**sizes, shared=False, staged=True)).account == free.account
    if "device" in free.pools:
        least = free.total("device") - free.account["device"]["KV cache"]
        with pytest.raises(OutOfMemory):
            lay_out(model, policy, work, Capacity(least - 1, None, None, shared=False, staged=True))


@pytest.mark.parametrize(("tier", "split"), [("device", (1, 0, 0)), ("host", (0, 1, 0)), ("disk", (0, 0, 1))])
@given(rng=RANDOMS)
@settings(max_examples=20)
def test_out_of_memory_carries_numbers(tier: str, split: tuple[float, float, float], rng: random.Random) -> None:
    """One byte less than the weights and buffers, and one less than the cache of one sequence needs."""
    model, work = model_of(rng), work_of(rng)
    policy = Policy(4, 2, weights=split, cache=split, activations=split)
    free = lay_out(model, policy, work, FREE)
    rest = free.total(tier) - free.account[tier]["KV cache"]
    longest = max(p + n - 1 for p, n in lengths_of(work))
    (pool,) = free.pools[tier]
    one = up(longest, pool.page_tokens) // pool.page_tokens * free.page_bytes[tier][0] * len(model.layers)
    for limit in (rest - 1, rest + one - 1):
        capacity = replace(FREE, **{tier: limit})
        with pytest.raises(OutOfMemory, match=f"^{tier} memory: ") as caught:
            lay_out(model, policy, work, capacity)
        error = caught.value
        assert (error.tier, error.capacity) == (tier, limit)
        # What it needs and what is in use add up to what there would have to be, up to rounding.
        booked = free.account[tier]
        before_cache = rest - booked.get("cache buffers", 0) - booked.get("cache staging", 0)
        assert limit < error.needed + error.used <= rest + up(one, 4096)
        assert error.needed + error.used >= before_cache
        for number in (error.needed, error.used, error.capacity, error.needed + error.used - limit):
            assert size(number) in str(error)
        remedy = "set --offload-dir" if tier == "disk" else "give more memory"
        assert f"; {remedy}" in str(error)
        if limit >= rest:
            assert error.needed == up(one, 4096)
            assert f"one sequence of {longest:,} tokens" in str(error)


def test_reads_are_those_of_the_disk_tier() -> None:
    assert (READ, READ_BUFFERS, SHORT_READ) == (disk.CHUNK, disk.HELPERS + 1, disk.SHORT)
    assert SHORT_READERS == disk.DIRECT_READERS + disk.HELPERS


def test_the_output_of_the_embedding_is_booked_for_one_gpu_batch_where_hidden_states_leave() -> None:
    """Unless layers may read it, as the trial of a model tells."""
    model, endless = opt(3, 256, 4, 512), Capacity(None, None, None, shared=False, staged=True)
    for split in ((1, 0, 0), (0, 1, 0)):
        policy, work = Policy(4, 5, activations=split, schedule="zigzag", prefill_tokens=96), Workload({(400, 8): 20})
        kept, freed = (lay_out(replace(model, embedding_stays=stays), policy, work, endless) for stays in (True, False))
        less = kept.account["device"]["paused forwards"] - freed.account["device"]["paused forwards"]
        assert less == (20 * 400 - 96) * 256 * 2 * split[1]
