"""Several samples of one prompt, and prompts with a common prefix: the prefix is computed once, its full pages are
shared, the tokens are as ever."""

import random
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import OutOfMemory
from flexengine.lossy import EXACT, Lossy
from flexengine.model.sample import Draw, sample
from flexengine.plan.workload import Workload
from flexengine.schedule.batches import Batch
from flexengine.schedule.pages import Pool
from flexengine.schedule.prefixes import MIN_SHARED_TOKENS
from flexengine.schedule.sweeps import Growing, Sweeps, peak_pages
from flexengine.schedule.tasks import Task
from flexengine.worker.cache.pools import Pages
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


# The engine.


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Prompt tokens that were computed, and the most pages held at once by tier, of the first group of layers."""
    found, begin, take = Counter[str](), Sweeps.begin, Pages.take

    def beginning(self: Sweeps, *hooks: Any) -> list[Batch]:
        batches = begin(self, *hooks)
        found["prompt"] += sum(p.count for b in batches for p in b.pieces if self.in_prompt(p))
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


def computed_once(lengths: Seq[int], samples: int) -> int:
    """Prompt tokens to compute: each sample computes the last token, and short prompts, itself."""
    return sum(n - 1 + samples if n - 1 >= MIN_SHARED_TOKENS else samples * n for n in lengths)


DRAWN = SamplingParams(max_tokens=NEW, n=SAMPLES, temperature=1.3, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=NEW, n=SAMPLES, ignore_eos=True)
POLICIES = {
    "device": Policy(12, 1),
    "device in pieces": Policy(5, 3, prefill_tokens=23),
    "host": Policy(3, 4, cache=H, schedule="zigzag"),
    "host in pieces": Policy(5, 2, cache=H, prefill_tokens=20, slots=3),
    "disk": Policy(4, 3, cache=K),
    "disk, one slot": Policy(3, 4, cache=K, prefill_tokens=17, slots=1),
    "delegated": Policy(4, 3, cache=H, delegate="host"),
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
        assert counted["prompt"] == computed_once(LENGTHS, SAMPLES)


def test_on_a_cpu(families: Any, prompts: list[list[int]], expected: Any) -> None:
    for policy in (Policy(12, 1), Policy(4, 3, cache=(0.5, 0, 0.5))):
        found = generated(families("gemma3").directory, prompts, policy, DRAWN, device="cpu")
        assert found == expected("gemma3")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lossy"), [("llama", Lossy(cache="int4")), ("gemma3", Lossy(sparse_attention=0.3))])
def test_nothing_is_shared_if_the_cache_is_lossy(
    families: Any, prompts: list[list[int]], counted: Counter[str], family: str, lossy: Lossy
) -> None:
    """A prefix would be read from the lossy cache. So each sample computes its prompt, and answers as one alone."""
    single = SamplingParams(max_tokens=NEW, ignore_eos=True)
    one = generated(families(family).directory, prompts, Policy(3, 1), single, lossy)
    counted.clear()
    found = generated(families(family).directory, prompts, POLICIES["host"], GREEDY, lossy)
    assert found == [answer * SAMPLES for answer in one]
    assert counted["prompt"] == SAMPLES * sum(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [
    (family, name) for i, family in enumerate(("llama", "gemma3")) for j, name in enumerate(POLICIES) if (i + j) % 2
])  # fmt: skip
def test_prompts_with_common_prefixes_have_the_tokens_of_transformers(
    families: Any, counted: Counter[str], family: str, name: str
) -> None:
    """Prefixes in prefixes, across pages, windows and pieces; a prompt that is a prefix of others; one that is none."""
    known, (a, b, c, d) = families(family), prompts_of(601, (43, 21, 9, 30))
    rows = [a + b + d[:5], d, a + d[:7], a + b + c, a[:20] + c, a, a + b + d[:1]]
    answers = reference(known.model, rows, 4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert generated(known.directory, rows, POLICIES[name], params) == [[answer] for answer in answers]
    if max(POLICIES[name].cache) == 1:
        # a[:20], the rest of a without its last token, that token and b; then what each row adds to these.
        assert counted["prompt"] == 20 + 22 + 22 + (5 + 30 + 8 + 9 + 9 + 1 + 1)


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
    assert counted["prompt"] == computed_once([205], 8)
    if home == "device":  # the stem's 12 full pages, a part of one, and two pages of each sample's own
        assert counted[home] == 12 + 1 + 8 * 2
    with Engine(known.directory, policy=policy, device="sim") as engine:
        booked = engine.plan(Workload({(205, 20): 8}, {(205, 20): 204 * 7 / 8}, 1, 204)).pools[home][0]
        assert counted[home] <= booked.pages


def test_a_gpu_batch_loads_shared_pages_once(families: Any, tmp_path: Any) -> None:
    """Full pages in RAM cross the link once for all samples of a gpu_batch."""
    known, prompt, batches = families("llama"), prompts_of(601, (205,)), 2
    params = SamplingParams(max_tokens=20, n=8, ignore_eos=True)
    with Engine(known.directory, policy=Policy(4, batches, cache=H), device="sim", offload_dir=tmp_path) as engine:
        assert engine.generate([{"prompt_token_ids": prompt[0]}], params)[0].error is None
        layout = engine.plan(Workload({(205, 20): 8}, {(205, 20): 204 * 7 / 8}, 1, 204))
        (pool,), (page,), moved = layout.pools["host"], layout.page_bytes["host"], engine.summary.bytes["h2d"]
        shared = 204 // pool.page_tokens
        own = sum(-(-(204 + step) // pool.page_tokens) - shared for step in range(20))
        assert moved == 4 * page * (20 * shared * batches + 8 * own)


@pytest.mark.slow
def test_sharing_lets_more_samples_in(families: Any, counted: Counter[str]) -> None:
    """A pool for two sequences of their own: all eight samples are alive at once, as one page of 13 is their own."""
    known, prompt = families("llama"), prompts_of(601, (205,))
    params, policy = SamplingParams(max_tokens=4, n=8, ignore_eos=True), Policy(8, 1)
    with Engine(known.directory, policy=policy, device="sim") as engine:
        layout = engine.plan(Workload({(205, 4): 8}))
    pages = layout.account["device"]["KV cache"]
    enough = layout.total("device") - pages * 3 // 4 + pages // (8 * 14) + 4096
    with Engine(known.directory, policy=policy, device="sim", device_mem=enough) as tight:
        (result,) = tight.generate([{"prompt_token_ids": prompt[0]}], params)
        assert [s.token_ids for s in result.samples or ()] == reference(known.model, prompt, 4) * 8
        assert tight.summary.sweeps == 4
    assert counted["prompt"] == computed_once([205], 8)
    assert counted["device"] == 12 + 1 + 8


# Seeds.


@pytest.mark.usefixtures("one_thread")
def test_a_row_with_its_own_seed_gives_the_same_text_wherever_it_stands(families: Any) -> None:
    """At any position and in batches of any size; alone, it is row 0 of a job with that seed."""
    family, drawn = families("llama"), SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, n=2)
    rows: list[Any] = [
        {"prompt_token_ids": [5 + i % 2, 7, 9], "seed": seed} for i, seed in enumerate((3, 3, 4, 3, 0, 0))
    ]
    texts = dict[tuple[int, int], set[Any]]()
    random_orders = [list(range(6)), [5, 4, 3, 2, 1, 0], [2, 0, 5, 1], [4]]
    for size, order in zip((1, 2, 3, 1), random_orders, strict=True):
        with Engine(family.directory, device="cpu", policy=Policy(size, 1)) as engine:
            for number, result in zip(order, engine.generate([rows[i] for i in order], drawn), strict=True):
                assert result.samples is not None
                key = rows[number]["prompt_token_ids"][0], rows[number]["seed"]
                texts.setdefault(key, set()).add(tuple(tuple(each.token_ids) for each in result.samples))
            alone = engine.generate({"prompt_token_ids": [5, 7, 9]}, SamplingParams(**{**vars(drawn), "seed": 4}))
            same = engine.generate([{"prompt_token_ids": [5, 7, 9]}] * 2, SamplingParams(**{**vars(drawn), "seed": 4}))
    assert all(len(found) == 1 for found in texts.values()), texts
    assert len(set.union(*texts.values())) == len(texts)
    assert alone.samples is not None
    assert {tuple(tuple(each.token_ids) for each in alone.samples)} == texts[5, 4]
    assert same[0].token_ids == alone.token_ids != same[1].token_ids  # a seed of the whole job: rows differ
