"""Sliding windows: layers with a window keep, book and move only the pages that later queries see."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine import Engine, Policy, SamplingParams
from flexengine.lossy import EXACT, Lossy
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.profile import unit
from flexengine.plan.sizes import LayerPages, shared_out
from flexengine.plan.workload import Workload
from flexengine.schedule.batches import split_prompt
from flexengine.schedule.pages import Pool
from flexengine.schedule.sweeps import Sequence, Sweeps
from tests.helpers.families import prompts_of, reference
from tests.helpers.plans import sweeps_of

ENDLESS = Capacity(None, None, None, shared=False, staged=True)
D, H, K, MIX = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3)
FAMILIES = ("gemma3", "gpt-oss", "mistral")  # every second layer has a window of 9 tokens; in Mistral all have
LENGTHS, NEW = (150, 3, 61, 100, 33), 17  # up to 17 windows, and more than a page of new tokens
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


# Formulas, against which tokens each query sees, counted one by one.


class Tokens:
    """One sequence's pages as a set of tokens each. Nothing is read that was not written or was overwritten since."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.entries, self.most = pool, dict[int, dict[int, int]](), 0

    def sees(self, position: int) -> range:
        return range(max(0, position + 1 - (self.pool.window or position + 1)), position + 1)

    def piece(self, start: int, end: int) -> None:
        """A piece of a prompt reads its past, then writes; a single token writes, then reads."""
        pool, size = self.pool, self.pool.page_tokens
        table = pool.table(list(range(pool.held(end))), end)
        assert len(table) == -(-end // size)
        assert set(table) == set(range(pool.held(end)))
        past = {s for position in range(start, end) for s in self.sees(position) if s < start}
        assert {s // size for s in past} <= set(pool.read(start))
        self.check(past, table)
        assert pool.entries(pool.read(start)) == sorted(table[n] for n in pool.read(start))
        written = pool.written(start, end)
        kept = range(max(start, written.start * size), end)
        assert len({table[n] for n in written}) == len(written)
        for s in kept:
            self.entries.setdefault(table[s // size], {})[s % size] = s
        self.check(set(self.sees(end)) - {end}, table)
        self.most = max(self.most, len(self.entries))
        assert self.most <= pool.held(end)

    def check(self, seen: set[int], table: list[int]) -> None:
        size = self.pool.page_tokens
        assert all(self.entries[table[s // size]][s % size] == s for s in seen)


@given(st.integers(1, 20), st.none() | st.integers(1, 50), st.integers(1, 150), st.integers(1, 40), st.integers(0, 60))
def test_no_token_is_lost_while_a_query_sees_it(
    page: int, window: int | None, prompt: int, budget: int, more: int
) -> None:
    tokens = Tokens(Pool(0, page, window=window))
    for piece in split_prompt(0, 0, prompt, budget):
        tokens.piece(piece.start, piece.start + piece.count)
    for position in range(prompt, prompt + more):
        tokens.piece(position, position + 1)


@given(st.integers(1, 20), st.integers(1, 60))
def test_a_ring_has_as_many_pages_as_a_query_sees(page: int, window: int) -> None:
    seen = [len({s // page for s in range(max(0, t + 1 - window), t + 1)}) for t in range(window + 3 * page)]
    assert Pool(0, page, window=window).ring == max(seen)


@given(st.integers(1, 20), st.none() | st.integers(1, 50), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 99))))
def test_arrays_give_what_numbers_give(page: int, window: int | None, spans: list[tuple[int, int]]) -> None:
    pool, starts = Pool(0, page, window=window), np.array([start for start, _ in spans], dtype=float)
    ends = np.array([start + count for start, count in spans], dtype=float)
    assert list(pool.held(ends)) == [pool.held(start + count) for start, count in spans]
    assert list(pool.num_read(starts)) == [len(pool.read(start)) for start, _ in spans]
    assert list(pool.num_written(starts, ends)) == [len(pool.written(start, start + n)) for start, n in spans]


def test_every_pool_gets_its_share() -> None:
    """Never more bytes than there are, never fewer pages than the longest sequence takes, and none is left idle."""
    rng = random.Random(1)
    for _ in range(500):
        sizes = [rng.randint(1, 50) for _ in range(rng.randint(1, 3))]
        least = [rng.randint(1, 20) for _ in sizes]
        needed = [n + rng.choice([0, rng.randint(0, 300)]) for n in least]
        whole, few = (sum(n * size for n, size in zip(x, sizes, strict=True)) for x in (needed, least))
        assert shared_out(needed, least, sizes, None) == shared_out(needed, least, sizes, whole) == needed
        assert not any(shared_out(needed, least, sizes, few - 1))
        room = rng.randint(few, whole)
        pages = shared_out(needed, least, sizes, room)
        assert all(n <= got <= most for n, got, most in zip(least, pages, needed, strict=True))
        left = room - sum(n * size for n, size in zip(pages, sizes, strict=True))
        assert left >= 0
        assert all(got == most or size > left for got, most, size in zip(pages, needed, sizes, strict=True))


@pytest.mark.parametrize("schedule", ["zigzag", "continuous"])
def test_the_profile_counts_what_sweeps_move(schedule: str) -> None:
    """Half of the layers see 50 tokens: page tokens kept, read and written, against every piece of every sweep."""
    rng = random.Random(schedule)
    for _ in range(10):
        pools = Pool(10**6, 64), Pool(10**6, 16, window=50)
        rows = [(rng.randint(1, 400), 30)] * rng.randint(1, 40)
        policy = Policy(rng.randint(1, 9), rng.randint(1, 3), cache=H, schedule=schedule,
                        prefill_tokens=rng.choice([64, 192, 512]))  # fmt: skip
        groups = tuple(LayerPages(0.5, Pool(0, 16, window=pool.window), pool) for pool in pools)
        each = unit(Workload.of(rows), policy.prefill_tokens, groups, 1.0)
        found = sweeps_of(each, len(rows), schedule, (policy.gpu_batch_size, policy.num_gpu_batches))
        walk, read, written, kept = Sweeps(policy, {"host": pools}), 0.0, 0.0, 0.0
        for i, (prompt, most) in enumerate(rows):
            walk.add(Sequence(i, prompt, most))
        while not walk.idle:
            batches = walk.begin(lambda sequence, tokens: None)
            for piece in (p for b in batches for p in b.pieces):
                for pool in pools:
                    read += len(pool.read(piece.start)) * pool.page_tokens / 2
                    written += len(pool.written(piece.start, piece.start + piece.count)) * pool.page_tokens / 2
            ends = [s.cached + s.pending for s in walk.live.values()]
            kept = max(kept, sum(pool.held(n) * pool.page_tokens / 2 for pool in pools for n in ends))
            walk.advance(batches, set())
        assert float((found.loaded * found.times).sum()) == pytest.approx(read)
        assert float((found.stored * found.times).sum()) == pytest.approx(written)
        assert found.peak == pytest.approx(kept)


# Bytes that are booked.


def test_a_gemma_of_one_billion_books_what_its_windows_need() -> None:
    """26 layers, one KV head of 256 numbers, 22 of the layers with a window of 512: 8 sequences of 8,192 tokens."""
    tensor = TensorFact("w", 1152, 2, 4)
    windows = tuple(None if j % 6 == 5 else 512 for j in range(26))
    gemma = ModelFacts(((tensor,),) * 26, (), tensor, None, 262144, 1152, 6912, 4, 1, 256, 4, windows=windows)
    work, token = Workload({(8000, 193): 8}), 2 * 256 * 4
    every, seen = 8 * 8192 * token, 8 * 512 * token
    assert every * 26 == 3_489_660_928
    for tier, split in (("device", D), ("host", H), ("disk", K)):
        policy = Policy(8, 1, cache=split)
        whole = lay_out(replace(gemma, windows=()), policy, work, ENDLESS).account[tier]["KV cache"]
        booked = lay_out(gemma, policy, work, ENDLESS).account[tier]["KV cache"]
        assert whole == every * 26
        page = 16 if tier == "device" else 128  # a page of 256 KiB
        assert booked == every * 4 + 22 * 8 * token * page * ((512 + page - 2) // page + 1)
        assert booked < 1.07 * (every * 4 + seen * 22)  # 0.72 GB


# The engine.


@pytest.fixture(scope="module")
def long(families: Any) -> Any:
    """Long prompts, and the reference's answers: long("gemma3")."""
    prompts, answers = prompts_of(601, LENGTHS), dict[str, list[list[int]]]()

    def get(name: str) -> tuple[Any, list[dict[str, Any]], list[list[int]]]:
        if name not in answers:
            answers[name] = reference(families(name).model, prompts, NEW)
        return families(name).directory, [{"prompt_token_ids": p} for p in prompts], answers[name]

    return get


def generated(
    directory: Any, rows: Any, policy: Policy, device: str = "sim", lossy: Lossy = EXACT, **options: Any
) -> tuple[list[list[int]], Engine]:
    with Engine(directory, policy=policy, device=device, lossy=lossy, **options) as engine:
        results = engine.generate(rows, GREEDY)
        assert [r.error for r in results] == [None] * len(rows)
        layout = engine.plan(Workload.of((n, NEW) for n in LENGTHS))
        if device == "sim":
            assert engine.summary.peak_bytes == {t: layout.total(t) for t in ("device", "host", "disk")}
        return [r.token_ids for r in results], engine


POLICIES = {
    "device": Policy(5, 1),
    "device in pieces": Policy(2, 3, prefill_tokens=23),
    "host": Policy(2, 3, cache=H, schedule="zigzag"),
    "host in pieces": Policy(3, 2, cache=H, prefill_tokens=40, slots=3),
    "disk": Policy(2, 3, cache=K),
    "disk in pieces": Policy(3, 2, cache=K, prefill_tokens=17, slots=1),
    "delegated": Policy(2, 3, cache=H, delegate="host"),
    "delegated in pieces": Policy(2, 3, cache=H, delegate="host", prefill_tokens=40),
    "everywhere": Policy(2, 3, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=50, schedule="diagonal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(long: Any, family: str, name: str) -> None:
    directory, rows, expected = long(family)
    assert generated(directory, rows, POLICIES[name])[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_cpu(long: Any, family: str) -> None:
    directory, rows, expected = long(family)
    for policy in (Policy(5, 1, prefill_tokens=30), Policy(3, 2, cache=(0.5, 0, 0.5))):
        assert generated(directory, rows, policy, "cpu")[0] == expected


LOSSY = (Lossy(cache="bf16"), Lossy(cache="int8"), Lossy(cache="int4"), Lossy(cache="int2"),
         Lossy(sparse_attention=0.3), Lossy(cache="int4", sparse_attention=0.5))  # fmt: skip


# Which pages are held does not depend on how they are encoded, so each form of the cache is tried with one family.
@pytest.mark.parametrize(("family", "lossy"), [(FAMILIES[i % 3], lossy) for i, lossy in enumerate(LOSSY)], ids=str)
def test_lossy_caches_give_the_same_tokens_everywhere(long: Any, family: str, lossy: Lossy) -> None:
    """Prompts are not cut: queries of a later piece would see earlier tokens as they are encoded."""
    directory, rows, _ = long(family)
    found = [generated(directory, rows, POLICIES[name], lossy=lossy)[0]
             for name in ("device", "host", "disk", "delegated")]  # fmt: skip
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_bytes_moved_are_those_of_pages_in_sight(long: Any, family: str, home: str) -> None:
    """Per decode step: the pages that hold the window's past. Written: a page to disk, a token to RAM, and of a prompt
    the pages that the first decode step sees."""
    directory, rows, expected = long(family)
    found, engine = generated(directory, rows, Policy(5, 1, cache=H if home == "host" else K))
    assert found == expected
    token, window, page = 2 * 2 * 32 * 4, 9, 16  # two KV heads of 32 numbers
    whole = -(-(max(LENGTHS) + NEW - 1) // 16) * 16  # one page holds the longest sequence
    step = page if home == "disk" else 1
    read = written = 0
    for length in LENGTHS:
        for past in range(length, length + NEW - 1):
            read += 2 * token * (whole + page * len({s // page for s in range(max(0, past + 1 - window), past)}))
        first = {s // page for s in range(max(0, length + 1 - window), length)}
        written += 2 * token * (whole + page * len(first))
        written += 2 * token * (NEW - 1) * ((whole if home == "disk" else 1) + step)
    moved = engine.summary.bytes
    assert (moved["h2d"], moved["d2h"]) == (read, written)
    assert (moved["disk_read"], moved["disk_write"]) == ((read, written) if home == "disk" else (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "windowed"), [("gemma3", 2), ("gpt-oss", 2), ("mistral", 4)])
def test_bytes_booked_are_those_of_pages_in_sight(long: Any, family: str, windowed: int) -> None:
    """On the device, of 16 tokens a page: two pages hold any 9 neighbouring tokens."""
    directory, rows, expected = long(family)
    found, engine = generated(directory, rows, Policy(5, 1))
    assert found == expected
    with Engine(directory, policy=Policy(5, 1), device="sim") as planning:
        facts, layout = planning.facts, planning.plan(Workload.of((n, NEW) for n in LENGTHS))
    page = 16 * facts.kv_token
    pages = [-(-(n + NEW - 1) // 16) for n in LENGTHS]
    near = [min(n, 2) for n in pages]
    expect = page * ((4 - windowed) * sum(pages) + windowed * sum(near))
    assert layout.account["device"]["KV cache"] == -(-expect // 4096) * 4096
    small = expect - (4 - windowed or 1) * page
    rest = layout.total("device") - layout.account["device"]["KV cache"]
    found, tight = generated(directory, rows, Policy(5, 1), device_mem=rest + small + 4096)
    assert found == expected
    assert tight.summary.sweeps > engine.summary.sweeps  # one sequence had to wait
