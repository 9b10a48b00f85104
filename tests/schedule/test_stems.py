"""Stems in sweeps: computed once, before their sequences, with no page too many; computed again if they are lost."""

import random
from collections import Counter

import pytest

from flexengine.policy import Policy
from flexengine.schedule.batches import Batch
from flexengine.schedule.pages import Pool
from flexengine.schedule.prefixes import Stem, order_of, stems_above, stems_of
from flexengine.schedule.sweeps import Sequence, Sweeps


@pytest.mark.parametrize("schedule", ["row", "zigzag", "diagonal", "continuous"])
@pytest.mark.parametrize("roomy", [True, False])
def test_common_prefixes_are_computed_once(schedule: str, roomy: bool) -> None:
    """In small blocks, with sequences that end early: no page too many, every token once. In small pools there may be
    no room to keep a prefix for the sequences that wait; then these compute it again."""
    for seed in range(60):
        rng = random.Random(f"{schedule} {seed}")
        policy = Policy(rng.randint(1, 5), rng.randint(1, 3), cache=rng.choice([(1, 0, 0), (0, 1, 0), (0.5, 0.5, 0)]),
                        schedule=schedule, prefill_tokens=rng.choice([4, 64]))  # fmt: skip
        prompts = some_prompts(rng)
        stems = stems_of(prompts)
        rows = [(len(prompt) + 1, rng.randint(1, 12)) for prompt in prompts]
        longest, page = max(p + n - 1 for p, n in rows), rng.choice([2, 4])
        least = -(-longest // page)
        pages, near = (10**4, 10**4) if roomy else (least + rng.randint(0, 3 * least), 5 * policy.block_size)
        pools = {tier: (Pool(pages, page), Pool(near, page, window=7))
                 for tier, share in zip(("device", "host"), policy.cache, strict=False) if share}  # fmt: skip
        sweeps, computed, tiers = Sweeps(policy, pools), Counter[int](), Counter[tuple[Stem, str]]()
        for i, ((prompt, new), stem) in enumerate(zip(rows, stems, strict=True)):
            sweeps.add(Sequence(i, prompt, new, stem))
        while not sweeps.idle:
            before = set(sweeps.live)
            batches = sweeps.begin(lambda sequence, tokens: None)
            assert before or sweeps.live
            check_pages(sweeps)
            check_order(sweeps, batches)
            tiers.update(key for key, trunk in sweeps.trunks.items() if trunk.id in sweeps.stems)
            for piece in (p for b in batches for p in b.pieces):
                assert piece.sequence < 0 or piece.start == (
                    sweeps.live[piece.sequence].shared + computed[piece.sequence]
                    if piece.sequence not in before else sweeps.live[piece.sequence].cached
                )  # fmt: skip
                computed[piece.sequence] += piece.count
            live, ended = list(sweeps.live.values()), {s for s in sweeps.live if rng.random() < 0.1}
            assert all(sum(p.final for b in batches for p in b.pieces if p.sequence == s.id) == 1 for s in live)
            sweeps.advance(batches, ended)
            for s in live:
                assert s.cached == s.shared + computed[s.id] == s.prompt_tokens + s.generated - 1
        assert {i for i in computed if i >= 0} == set(range(len(rows)))
        assert not sweeps.trunks
        if roomy:
            assert all(times == 1 for times in tiers.values())
            assert {stem for stem, _ in tiers} == {s for stem in stems for s in stems_above(stem)}


@pytest.mark.parametrize("schedule", ["row", "zigzag", "diagonal", "continuous"])
def test_lost_prefixes_are_computed_again(schedule: str) -> None:
    """Sweeps break off at random, and a tier loses its KV cache: its stems are computed again before their sequences,
    and so are stems of the sweep itself. Other stems stay."""
    for seed in range(60):
        rng = random.Random(f"{schedule} {seed}")
        policy = Policy(rng.randint(1, 5), rng.randint(1, 3), cache=(0.5, 0.5, 0), schedule=schedule, prefill_tokens=9)
        prompts = some_prompts(rng)
        rows = [(len(prompt) + 1, rng.randint(1, 12)) for prompt in prompts]
        pools = {tier: (Pool(10**4, 4), Pool(10**4, 4, window=7)) for tier in ("device", "host")}
        sweeps, stored, claimed, left = Sweeps(policy, pools), dict[int, int](), set[int](), list[int]()
        for i, ((prompt, new), stem) in enumerate(zip(rows, stems_of(prompts), strict=True)):
            sweeps.add(Sequence(i, prompt, new, stem))

        def release(sequence: Sequence, stored: dict[int, int] = stored, claimed: set[int] = claimed) -> None:
            claimed.remove(sequence.id)
            stored.pop(sequence.id, None)

        while not sweeps.idle:
            batches = sweeps.begin(lambda sequence, tokens, claimed=claimed: claimed.add(sequence.id), release)
            before, found = dict(stored), {**sweeps.live, **{t.id: t for t in sweeps.trunks.values()}}
            check_pages(sweeps)
            for batch in batches:
                for piece in batch.pieces:
                    sequence = found[piece.sequence]
                    if sequence.source is not None and piece.sequence not in stored:
                        assert stored[sequence.source.id] == sequence.source.prompt_tokens == sequence.shared
                    assert piece.start == stored.get(piece.sequence, sequence.shared)
                stored.update((p.sequence, p.start + p.count) for p in batch.pieces)
            if rng.random() < 0.2:
                homes = {s.id: s.home for s in found.values()}
                tier = rng.choice(["device", "host"])
                stored.clear()
                stored.update({i: n for i, n in before.items() if homes[i] != tier})
                sweeps.lose(tier, lambda sequence, claimed=claimed: claimed.remove(sequence.id))
                assert {*sweeps.live} | {t.id for t in sweeps.trunks.values()} == claimed == {*stored}
            else:
                left += [s.id for s in sweeps.advance(batches, {s for s in sweeps.live if rng.random() < 0.1}, release)]
        assert sorted(left) == list(range(len(rows)))
        assert not sweeps.trunks
        assert not claimed


def some_prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """Prompts without their last token, of which some begin alike, in the order of `order_of`."""
    trunk = [rng.randrange(9) for _ in range(30)]
    prompts = list[tuple[int, ...]]()
    for _ in range(rng.randint(1, 5)):
        prompt = (*trunk[: rng.randint(0, 30)], *(rng.randrange(9) for _ in range(rng.randint(0, 9))))
        prompts += [prompt] * rng.randint(1, 4)
    return [prompts[i] for i in order_of(prompts)]


def check_order(sweeps: Sweeps, batches: list[Batch]) -> None:
    """All tokens that a piece reads, and that are not cached, are computed in earlier gpu_batches."""
    ends = {i: s.cached for i, s in sweeps.live.items()}
    ends |= {t.id: stem.start if t.id in sweeps.stems else t.cached for (stem, _), t in sweeps.trunks.items()}
    found = {**sweeps.live, **{t.id: t for t in sweeps.trunks.values()}}
    for batch in batches:
        for piece in batch.pieces:
            assert piece.start == ends[piece.sequence]
            source = found[piece.sequence].source
            if source is not None and not found[piece.sequence].generated:
                assert ends[source.id] == source.prompt_tokens == found[piece.sequence].shared
                assert piece.source == source.id
        ends.update((p.sequence, p.start + p.count) for p in batch.pieces)


def check_pages(sweeps: Sweeps) -> None:
    """Pages that are really needed: full ones of a stem once for all that share it."""
    for tier, (pool, near) in sweeps.pools.items():
        held, windowed = set[tuple[object, int]](), 0
        for s in (s for s in (*sweeps.live.values(), *sweeps.trunks.values()) if s.home == tier):
            tokens = s.cached + s.pending
            for number in range(-(-tokens // pool.page_tokens)):
                end = (number + 1) * pool.page_tokens
                owner = next((x for x in reversed(stems_above(s.stem)) if end <= x.end), s.id)
                if s.id < 0 and owner == s.id and end <= tokens:
                    owner = next(stem for (stem, _), trunk in sweeps.trunks.items() if trunk is s)
                held.add((owner, number))
            windowed += near.held(tokens)
        assert len(held) <= pool.pages
        assert windowed <= near.pages
