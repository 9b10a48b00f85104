"""Several samples of one prompt: the prompt is computed once, its full pages are shared, the tokens are as ever."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import OutOfMemory
from flexengine.kv.free_pages import Pages
from flexengine.lossy import EXACT, Lossy
from flexengine.model.sample import Draw, sample
from flexengine.plan.workload import Workload
from flexengine.schedule.admission import Growing, peak_pages
from flexengine.schedule.order import Batch
from flexengine.schedule.pages import Pool
from flexengine.schedule.program import Task
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.worker.worker import Worker
from tests.helpers.families import prompts_of, reference

D, H, K, MIX = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3)
LENGTHS, NEW, SAMPLES = (37, 48, 5), 20, 4  # of 16 tokens a page: a part of the last, all of it, a part of the only one


# Reference counts.


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 9)), max_size=60))
def test_a_page_is_free_when_its_last_holder_gives_it_back(steps: list[tuple[str, int]]) -> None:
    pages, holders, held = Pages("device", 12), Counter[int](), list[list[int]]()
    for step, number in steps:
        if step == "take":
            if number > 12 - len(holders):
                with pytest.raises(OutOfMemory):
                    pages.take(number)
                continue
            held.append(pages.take(number))
            assert not set(held[-1]) & set(holders)
            assert len(set(held[-1])) == number
            holders.update(held[-1])
        elif held and step == "share":
            held.append(pages.share(held[number % len(held)]))
            holders.update(held[-1])
        elif held:
            gone = held.pop(number % len(held))
            pages.give(gone)
            holders = +(holders - Counter(gone))
        assert pages.used == len(holders)
        assert all(pages.is_shared(page) == (holders[page] > 1) for page in range(12))


def test_the_forecast_counts_shared_pages_once() -> None:
    """Against the pages that samples hold, counted as sets, sweep by sweep."""
    rng = random.Random(2)
    for _ in range(300):
        page, families, growing = rng.choice([1, 4, 16]), list[list[tuple[int, int, int]]](), list[Growing]()
        for _ in range(rng.randint(1, 4)):
            prompt, done, left, samples = (rng.randint(1, n) for n in (60, 5, 20, 5))
            families.append([(prompt, prompt + done, left)] * samples)
            growing += [Growing(prompt + done, left, prompt if i else 0) for i in range(samples)]
        most = 0
        for step in range(20):
            held = set[tuple[int, ...]]()
            for f, family in enumerate(families):
                for i, (prompt, tokens, left) in enumerate(family):
                    numbers = range(-(-(tokens + step) // page)) if left > step else range(0)
                    held |= {(f, n) if n < prompt // page else (f, i, n) for n in numbers}
            most = max(most, len(held))
        assert peak_pages(growing, Pool(0, page)) == most


# Sweeps.


@pytest.mark.parametrize("schedule", ["row", "zigzag", "diagonal", "continuous"])
@pytest.mark.parametrize("roomy", [True, False])
def test_samples_compute_a_prompt_once(schedule: str, roomy: bool) -> None:
    """In small blocks, with samples that end early: no page too many, every token once. In small pools there may be no
    room to keep a prompt for the samples that wait; then these compute it again."""
    for seed in range(60):
        rng = random.Random(f"{schedule} {seed}")
        policy = Policy(rng.randint(1, 5), rng.randint(1, 3), cache=rng.choice([D, H, (0.5, 0.5, 0)]),
                        schedule=schedule, prefill_tokens=rng.choice([4, 64]))  # fmt: skip
        rows = [(rng.randint(1, 30), rng.randint(1, 12), rng.randint(1, 6)) for _ in range(rng.randint(1, 6))]
        longest, page = max(p + n - 1 for p, n, _ in rows), rng.choice([2, 4])
        least = -(-longest // page)
        pages, near = (10**4, 10**4) if roomy else (least + rng.randint(0, 3 * least), 5 * policy.block_size)
        pools = {tier: (Pool(pages, page), Pool(near, page, window=7))
                 for tier, share in zip(("device", "host"), policy.cache, strict=False) if share}  # fmt: skip
        sweeps, number = Sweeps(policy, pools), 0
        for i, (prompt, new, samples) in enumerate(rows):
            for _ in range(samples):
                sweeps.add(Sequence(number, prompt, new, prompt=i))
                number += 1
        done, entered, prefilled = Counter[int](), Counter[int](), Counter[tuple[int | None, str]]()
        while not sweeps.idle:
            before = set(sweeps.live)
            batches = sweeps.begin(lambda sequence, tokens: None)
            assert before or sweeps.live
            check_pages(sweeps)
            joined = {s.id for s in sweeps.joined}
            fresh = [s for s in sweeps.live.values() if s.id not in before | joined]
            entered.update(set(sweeps.live) - before)
            computed = Counter(p.sequence for b in batches for p in b.pieces if p.final)
            prefilled.update((s.prompt, s.home) for s in fresh if computed[s.id])
            for s in fresh:  # one of those of a prompt and tier computes it
                together = [o.id for o in fresh if (o.prompt, o.home) == (s.prompt, s.home)]
                assert sum(computed[i] for i in together) == 1
            assert all(computed[i] == 1 for i in before | joined)
            done.update(joined)  # drawn when the prompt was computed
            live = list(sweeps.live.values())
            ended = {s for s in sweeps.live if rng.random() < 0.1}
            sweeps.advance(batches, ended)
            for s in live:
                done[s.id] += 1
                assert s.source is None
                assert (s.cached, s.generated) == (s.prompt_tokens + done[s.id] - 1, done[s.id])
        assert entered == dict.fromkeys(range(number), 1)
        assert not sweeps.kept
        if roomy:
            assert all(times == 1 for (i, _), times in prefilled.items() if i is not None and rows[i][1] > 1)


def check_pages(sweeps: Sweeps) -> None:
    """Pages that are really needed: full ones of a prompt once for all that entered together, and all of a kept one."""
    for tier, (pool, near) in sweeps.pools.items():
        held, windowed = set[tuple[int, ...]](), 0
        for s in (s for s in (*sweeps.live.values(), *sweeps.kept.values()) if s.home == tier):
            tokens = s.prompt_tokens if s.id < 0 else s.cached + s.pending
            full = s.prompt_tokens // pool.page_tokens
            held |= {(s.first, n) if n < full else (s.first, s.id, n) for n in range(-(-tokens // pool.page_tokens))}
            windowed += near.held(tokens)
        assert len(held) <= pool.pages
        assert windowed <= near.pages


# The engine.


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Prompt tokens that were computed, and the most pages held at once by tier, of the first group of layers."""
    found, begin, take = Counter[str](), Sweeps.begin, Pages.take

    def beginning(self: Sweeps, *hooks: Any) -> list[Batch]:
        batches = begin(self, *hooks)
        found["prompt"] += sum(p.count for b in batches for p in b.pieces if not self.live[p.sequence].generated)
        return batches

    def taking(self: Pages, n: int) -> list[int]:
        taken = take(self, n)
        found[self.tier] = max(found[self.tier], self.used)
        return taken

    monkeypatch.setattr(Sweeps, "begin", beginning)
    monkeypatch.setattr(Pages, "take", taking)
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(601, LENGTHS)


@torch.no_grad()
def drawn(model: Any, prompts: list[list[int]], params: SamplingParams) -> Iterator[list[list[int]]]:
    """The samples of every prompt: transformers' logits of the whole text, one token after the other."""
    for row, prompt in enumerate(prompts):
        answers = []
        for number in range(params.n):
            text: list[int] = []
            while len(text) < params.max_tokens:
                logits = model(torch.tensor([[*prompt, *text]])).logits[:, -1].float()
                text.append(sample(logits, [Draw(params, row, number, prompt, text)])[0].token)
            answers.append(text)
        yield answers


@pytest.fixture(scope="module")
def expected(families: Any, prompts: list[list[int]]) -> Any:
    made: dict[str, list[list[list[int]]]] = {}

    def get(family: str) -> list[list[list[int]]]:
        if family not in made:
            made[family] = list(drawn(families(family).model, prompts, DRAWN))
        return made[family]

    return get


DRAWN = SamplingParams(max_tokens=NEW, n=SAMPLES, temperature=1.3, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=NEW, n=SAMPLES, ignore_eos=True)
POLICIES = {
    "device": Policy(12, 1),
    "device in pieces": Policy(5, 3, prefill_tokens=23),
    "host": Policy(3, 4, cache=H, schedule="zigzag"),
    "host in pieces": Policy(5, 2, cache=H, prefill_tokens=20, slots=3),
    "disk": Policy(4, 3, cache=K),
    "disk, one slot": Policy(3, 4, cache=K, prefill_tokens=17, slots=1),
    "delegated": Policy(4, 3, cache=H, delegate=True),
    "everywhere": Policy(2, 6, weights=MIX, cache=MIX, activations=MIX, schedule="diagonal"),
    "one at a time": Policy(1, 1),
}


def generated(
    directory: Any, prompts: list[list[int]], policy: Policy | None, params: SamplingParams, lossy: Lossy = EXACT,
    device: str = "sim", **options: Any,
) -> list[list[list[int]]]:  # fmt: skip
    with Engine(directory, policy=policy, device=device, lossy=lossy, **options) as engine:
        results = engine.generate([{"prompt_token_ids": p} for p in prompts], params)
        assert [r.error for r in results] == [None] * len(prompts)
        return [[s.token_ids for s in r.samples] if r.samples else [r.token_ids] for r in results]


@pytest.mark.slow
# Windows decide which pages are shared, not where they are: every second policy with a family that has windows.
@pytest.mark.parametrize(("family", "name"), [
    (family, name) for family in ("llama", "gemma3") for i, name in enumerate(POLICIES) if family == "llama" or i % 2
])  # fmt: skip
def test_samples_are_drawn_from_the_logits_of_transformers(
    families: Any, prompts: list[list[int]], expected: Any, counted: Counter[str], family: str, name: str
) -> None:
    assert generated(families(family).directory, prompts, POLICIES[name], DRAWN) == expected(family)
    if POLICIES[name].block_size >= SAMPLES * len(LENGTHS) and name != "everywhere":
        assert counted["prompt"] == sum(LENGTHS)
    elif name == "host in pieces":  # two places are missing, and there is no page to keep the last prompt in
        assert counted["prompt"] == sum(LENGTHS) + LENGTHS[-1]


@pytest.mark.slow
def test_on_a_cpu(families: Any, prompts: list[list[int]], expected: Any) -> None:
    for policy in (Policy(12, 1), Policy(4, 3, cache=(0.5, 0, 0.5))):
        found = generated(families("gemma3").directory, prompts, policy, DRAWN, device="cpu")
        assert found == expected("gemma3")


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [Lossy(cache="int8"), Lossy(cache="int4"), Lossy(sparse_attention=0.3)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_samples_are_the_answer_of_one(
    families: Any, prompts: list[list[int]], family: str, lossy: Lossy
) -> None:
    """Shared pages are encoded, and so are mean keys apart from them."""
    single = SamplingParams(max_tokens=NEW, ignore_eos=True)
    one = generated(families(family).directory, prompts, Policy(3, 1), single, lossy)
    for name in ("device", "host", "disk", "delegated"):
        found = generated(families(family).directory, prompts, POLICIES[name], GREEDY, lossy)
        assert found == [answer * SAMPLES for answer in one]


@pytest.mark.slow
def test_a_smaller_plan_draws_the_same_samples(
    families: Any, prompts: list[list[int]], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out twice on the way; unfinished rows are run anew in smaller blocks."""
    count, perform = 0, Worker.perform

    def failing(worker: Worker, task: Task) -> None:
        nonlocal count
        count += 1
        if count in (9, 60):
            raise OutOfMemory("device", "activations", 4096, 10, 20)
        perform(worker, task)

    monkeypatch.setattr(Worker, "perform", failing)
    assert generated(families("llama").directory, prompts, None, DRAWN) == expected("llama")
    assert count > 100


@pytest.mark.slow
@pytest.mark.parametrize(("home", "split"), [("device", D), ("host", H), ("disk", K)])
def test_a_prompt_is_computed_once_and_its_full_pages_are_shared(
    families: Any, tmp_path: Any, counted: Counter[str], home: str, split: Any
) -> None:
    known, prompt = families("llama"), prompts_of(601, (205,))
    params = SamplingParams(max_tokens=20, n=8, ignore_eos=True)
    answer = reference(known.model, prompt, 20)
    policy = Policy(8, 1, cache=split)
    assert generated(known.directory, prompt, policy, params, offload_dir=tmp_path) == [answer * 8]
    assert counted["prompt"] == 205
    page = 16 if home == "device" else 224  # the longest sequence, 224 tokens, is one page off the device
    assert counted[home] == 205 // page + 8 * (-(-224 // page) - 205 // page)
    with Engine(known.directory, policy=policy, device="sim") as engine:
        booked = engine.plan(Workload({(205, 20): 8})).pools[home][0]
        assert counted[home] <= booked.pages


@pytest.mark.slow
def test_sharing_lets_more_samples_in(families: Any, counted: Counter[str]) -> None:
    """A pool for two sequences of their own: all eight samples are alive at once, as one page of 14 is their own."""
    known, prompt = families("llama"), prompts_of(601, (205,))
    params, policy = SamplingParams(max_tokens=4, n=8, ignore_eos=True), Policy(8, 1)
    with Engine(known.directory, policy=policy, device="sim") as engine:
        layout = engine.plan(Workload({(205, 4): 8}))
    enough = layout.total("device") - layout.account["device"]["KV cache"] * 3 // 4 + 4096
    with Engine(known.directory, policy=policy, device="sim", device_mem=enough) as tight:
        (result,) = tight.generate([{"prompt_token_ids": prompt[0]}], params)
        assert [s.token_ids for s in result.samples or ()] == reference(known.model, prompt, 4) * 8
        assert tight.summary.sweeps == 4
    assert counted["prompt"] == 205
    assert counted["device"] == 12 + 8
