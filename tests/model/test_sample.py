"""Sampling against transformers' own processors, formulas and statistics; noise depends on (seed, row, sample, token)
alone; a row gets the same tokens whatever stands beside it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flexengine import Engine, Policy, SamplingParams
from flexengine.kernels.sampling import plain_choice
from flexengine.model import drawing
from flexengine.model import sample as module
from flexengine.model.sample import NONFINITE, Draw, Sampled, logprob_entry, sample, uniform

INF, NAN = math.inf, math.nan
V = 300


@pytest.fixture(autouse=True, params=["native", "plain torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms must pass all tests; that of GPUs is computed on the CPU here."""
    if request.param == "plain torch":
        monkeypatch.setattr(drawing, "choose_tokens", plain_choice)


def draw(row: int = 0, token: int = 0, sample: int = 0, prompt: Any = (), **fields: Any) -> Draw:
    return Draw(SamplingParams(**fields), row, sample, prompt, [0] * token)


def tokens(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return [s.token for s in sample(logits, draws)]


def random_logits(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def every_token_drawn(row: torch.Tensor, one: Draw, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The distribution that tokens come from, by bisection of the noise: token t comes for an interval of it."""
    noise = 0.0
    monkeypatch.setattr(module, "uniform", lambda *_: noise)

    def at(point: float) -> int:
        nonlocal noise
        noise = point
        return sample(row[None], [one])[0].token

    found = torch.zeros(row.shape[-1], dtype=torch.float64)
    left, last = 0.0, at(1 - 2**-53)
    while True:
        token, low, high = at(left), left, 1.0
        if token == last:
            found[token] += 1 - left
            return found
        while math.nextafter(low, 1) < high:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) == token else (low, middle)
        found[token] += high - left
        left = high


# Greedy and noise.


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 5.0], [-INF, -INF, -1e38]])
    assert sample(logits, [draw(0), draw(1, 9), draw(2)]) == [Sampled(t, None, ()) for t in (1, 0, 2)]
    assert sample(logits[:0], []) == []


def test_uniform_is_a_pure_function_and_uniform() -> None:
    places = [(row, sample, token) for row in range(25) for sample in range(4) for token in range(100)]
    numbers = [uniform(1, *place) for place in places]
    assert numbers == [uniform(1, *place) for place in places]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    apart = [(1, 0, 0, 0), (2, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({uniform(*place) for place in apart}) == 5
    assert uniform(0, 1, 11, 1) != uniform(0, 11, 1, 1)


def test_noise_is_that_of_seed_row_sample_and_token() -> None:
    """Of nothing else: with equal probabilities the token tells the noise."""
    logits = torch.zeros(1, 1000)
    for row, which, token in [(0, 0, 0), (3, 0, 0), (0, 2, 0), (0, 0, 7), (5, 6, 7)]:
        one = Draw(SamplingParams(temperature=1, seed=11), row, which, [1, 2], [5] * token)
        assert tokens(logits, [one]) == [int(uniform(11, row, which, token) * 1000)]


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    logits = random_logits(4, 50) * 3
    assert tokens(logits, [draw(row, 1, temperature=temperature) for row in range(4)]) == logits.argmax(-1).tolist()


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0]])
    for temperature in (0.5, 1.0, 3.0):
        draws = [draw(row, temperature=temperature, seed=5) for row in range(4000)]
        found = torch.bincount(torch.tensor(tokens(logits.expand(4000, 4), draws)), minlength=4)
        wanted = torch.softmax(logits[0] / temperature, 0) * 4000
        assert ((found - wanted) ** 2 / wanted).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


def test_draws_follow_the_distribution_that_is_left() -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -1.0]])
    draws = [draw(row, temperature=1.5, top_k=4, top_p=0.9, seed=6) for row in range(4000)]
    found = torch.bincount(torch.tensor(tokens(logits.expand(4000, 6), draws)), minlength=6)
    wanted = torch.softmax(logits[0, :4] / 1.5, 0) * 4000  # the fourth has 0.15 of it, so 0.9 takes all four
    assert found[4:].sum() == 0
    assert ((found[:4] - wanted) ** 2 / wanted).sum() < 16.3


# Against transformers' processors.

CUTS: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_k": V}, {"top_k": V + 1}, {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.95},
    {"top_p": 0.9999}, {"min_p": 0.2}, {"min_p": 1.0}, {"min_p": 0.001}, {"top_k": 20, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.5, "top_k": 9},
]  # fmt: skip


def theirs(scores: torch.Tensor, ids: list[int], temperature: float, fields: dict[str, Any]) -> torch.Tensor:
    made = LogitsProcessorList()
    if "repetition_penalty" in fields:
        made.append(RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    made.append(TemperatureLogitsWarper(float(temperature)))
    for name, kind in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in fields:
            made.append(kind(fields[name]))
    out: torch.Tensor = made(torch.tensor([ids]), scores[None].double())[0].softmax(-1)
    return out


@pytest.mark.parametrize("fields", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_distribution_is_that_of_transformers(
    fields: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is drawn at both ends of its interval of the noise, whose length is its probability, and no other."""
    for seed in range(5):
        row, prompt, generated = random_logits(V, seed=seed), [3, 5, 3], [8, 250, 250]
        params = SamplingParams(temperature=temperature, **fields)
        wanted = theirs(row, prompt + generated, temperature, fields)
        kept, ends = wanted.nonzero()[:, 0], wanted.cumsum(0)
        probable = kept[wanted[kept] > 1e-9]  # the ends of others are lost in the running sum's rounding
        inset = 1e-6 * wanted[probable] + 1e-15
        noise = torch.cat([ends[probable] - wanted[probable] + inset, ends[probable] - inset]).tolist()
        monkeypatch.setattr(module, "uniform", lambda seed, place, *_, noise=noise: noise[place])
        draws = [Draw(params, place, 0, prompt, generated) for place in range(len(noise))]
        assert tokens(row.expand(len(noise), V), draws) == probable.tolist() * 2


ALONE: list[dict[str, Any]] = [
    {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.7}, {"logprobs": 2},
    {"logit_bias": {3: 2.5, 8: -1.5}}, {"bad_words": [[4, 5, 1], [2], [5, 9]]},
    {"min_tokens": 4, "stop_token_ids": [1, 3]}, {"presence_penalty": 1.1}, {"frequency_penalty": -0.4},
]  # fmt: skip
TOGETHER: dict[str, Any] = {name: value for fields in ALONE for name, value in fields.items()}


def probabilities(scores: torch.Tensor, prompt: list[int], generated: list[int], s: SamplingParams) -> torch.Tensor:
    """Return those of transformers' processors, in the documented order; presence and frequency: OpenAI's formula."""
    ids = torch.tensor([prompt + generated])
    before = LogitsProcessorList()
    if s.logit_bias:
        before.append(SequenceBiasLogitsProcessor({(token,): number for token, number in s.logit_bias.items()}))
    if s.bad_words:
        before.append(NoBadWordsLogitsProcessor([list(word) for word in s.bad_words]))
    before.append(MinNewTokensLengthLogitsProcessor(len(prompt), s.min_tokens, list(s.stop_token_ids)))
    before.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    after = LogitsProcessorList([TemperatureLogitsWarper(s.temperature)])
    if s.top_k:
        after.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        after.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        after.append(MinPLogitsWarper(s.min_p))
    changed = before(ids, scores[None].clone())
    for token in set(generated):
        changed[0, token] -= generated.count(token) * s.frequency_penalty + s.presence_penalty
    out: torch.Tensor = after(ids, changed)[0].double().softmax(-1)
    return out


def test_draws_of_each_option_and_of_all_follow_transformers() -> None:
    """Chi-square of 6,000 rows each, all options in one gpu_batch, so that rows with other options stand between."""
    many, words, prompt, generated = 6000, 40, [7, 5, 5], [9, 4, 5]
    options = [SamplingParams(max_tokens=9, temperature=1.3, seed=8, **fields) for fields in (*ALONE, TOGETHER)]
    logits = random_logits(words, seed=3) / 2
    draws = [Draw(s, row, 0, prompt, generated) for row in range(many) for s in options]
    found = torch.tensor(tokens(logits.expand(len(draws), words), draws)).view(many, -1)
    for column, s in zip(found.T, options, strict=True):
        wanted = probabilities(logits, prompt, generated, s) * many
        counts = torch.bincount(column, minlength=words).double()
        assert counts[wanted == 0].sum() == 0
        often = wanted >= 5
        ours = torch.cat([counts[often], counts[~often].sum()[None]])
        theirs = torch.cat([wanted[often], wanted[~often].sum()[None] + 1e-9])
        if theirs[-1] < 5:  # too few for a class of their own
            ours, theirs = ours[:-1], theirs[:-1]
        degrees = len(theirs) - 1
        most = degrees * (1 - 2 / 9 / degrees + 3.09 * (2 / 9 / degrees) ** 0.5) ** 3  # p = 0.001 (Wilson, Hilferty)
        assert ((ours - theirs) ** 2 / theirs).sum() < most, s


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"repetition_penalty": 2.0}])
def test_draws_invert_that_distribution(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `sample` alone: how much of the noise's range leads to each token."""
    row = random_logits(24, seed=4)
    one = Draw(SamplingParams(temperature=0.9, **fields), 0, 0, [1], [2])
    found = every_token_drawn(row, one, monkeypatch)
    torch.testing.assert_close(found, theirs(row, [1, 2], 0.9, fields), rtol=0, atol=1e-14)


def test_presence_and_frequency_are_openais_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """logit[j] - count[j] * frequency - (count[j] > 0) * presence, counted over generated tokens only."""
    row, generated = random_logits(24, seed=2), [4, 4, 4, 9, 1]
    for presence, frequency in [(1.5, 0.0), (0.0, 0.7), (-2.0, 0.3), (0.5, -2.0)]:
        wanted = row.double().clone()
        for j in set(generated):
            wanted[j] -= generated.count(j) * frequency + presence
        params = SamplingParams(temperature=1, presence_penalty=presence, frequency_penalty=frequency)
        found = every_token_drawn(row, Draw(params, 0, 0, [7, 7, 8], generated), monkeypatch)
        torch.testing.assert_close(found, wanted.softmax(0), rtol=0, atol=1e-14)


def test_greedy_is_the_largest_after_penalties() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0]])

    def greedy(prompt: list[int], generated: list[int], **fields: float) -> int:
        return sample(logits, [Draw(SamplingParams(**fields), 0, 0, prompt, generated)])[0].token  # type: ignore[arg-type]

    assert greedy([0], [], repetition_penalty=1.2) == 0  # 5 / 1.2 = 4.17
    assert greedy([0], [], repetition_penalty=1.3) == 1
    assert greedy([0], [1], repetition_penalty=2) == 2
    assert greedy([0, 0], [], presence_penalty=2, frequency_penalty=2) == 0
    assert greedy([], [0], presence_penalty=1.1) == 1
    assert greedy([], [0, 0], frequency_penalty=0.6) == 1
    assert greedy([], [0, 1, 1], presence_penalty=1.5, frequency_penalty=0.5) == 0  # 3, 1.5, 3: the first of equals
    assert greedy([99], [99], repetition_penalty=2, presence_penalty=2) == 0  # an id the head does not have


def test_greedy_with_the_largest_penalised() -> None:
    assert tokens(torch.tensor([[5.0, 4.4]]), [draw(prompt=[0], repetition_penalty=1.2)]) == [1]
    assert tokens(torch.tensor([[-5.0, -4.4]]), [draw(prompt=[1], repetition_penalty=1.2)]) == [0]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("temperature", [0, 1])
def test_extreme_penalties_leave_legal_tokens(penalty: float, temperature: float) -> None:
    logits = torch.tensor([[5.0, -4.0, -INF, 0.0], [-5.0, -4.0, -INF, -3.0]])
    draws = [draw(row, 3, prompt=[0, 1, 2, 3], repetition_penalty=penalty, temperature=temperature) for row in range(2)]
    assert all(token in (0, 1, 3) for token in tokens(logits, draws))


# Ties, forbidden tokens, broken rows.


def test_ties_are_decided_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0])

    def kept(**fields: Any) -> list[int]:
        return every_token_drawn(row, draw(temperature=1, **fields), monkeypatch).nonzero()[:, 0].tolist()

    assert kept(top_k=1) == [1, 4]
    assert kept(top_k=3) == [0, 1, 2, 3, 4]
    # Probabilities 0.115 three times and 0.327 twice: those ahead of a token must have less than p.
    assert kept(top_p=0.3) == [1]
    assert kept(top_p=0.4) == [1, 4]
    assert kept(top_p=0.7) == [0, 1, 4]
    assert kept(top_p=0.8) == [0, 1, 2, 4]
    assert kept(min_p=1) == [1, 4]


def test_forbidden_tokens_never_come() -> None:
    logits = torch.full((200, V), -INF)
    logits[:, 7], logits[:, 150], logits[:, -1] = 0.0, 0.1, -1.0
    for fields in CUTS:
        draws = [draw(row, temperature=50, prompt=[5, 7], logprobs=20, **fields) for row in range(200)]
        found = sample(logits, draws)
        assert {s.token for s in found} <= {7, 150, V - 1}
        assert all(s.logprob is not None and math.isfinite(s.logprob) for s in found)
        assert all([t for t, _ in s.top] == [150, 7, V - 1] for s in found)


def test_noise_at_the_end_of_its_range_draws_a_legal_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding makes noise times the total the total itself."""
    monkeypatch.setattr(module, "uniform", lambda *_: 1 - 2**-53)
    for tail in range(1, 200):
        logits = torch.full((1, 6), -INF)
        logits[0, 2], logits[0, 3] = 0.0, -tail / 5
        assert tokens(logits, [draw(temperature=1)])[0] in (2, 3)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1}, {"temperature": 1, "top_p": 0.5}, {"logprobs": 3},
                                    {"repetition_penalty": 2.0}], ids=str)  # fmt: skip
def test_rows_that_are_not_finite_are_reported_and_the_others_are_not(fields: dict[str, Any]) -> None:
    good = torch.tensor([0.0, -INF, 9.0])
    rows = [good, torch.tensor([0.0, NAN, 9.0]), torch.tensor([INF, 0.0, 0.0]), torch.full((3,), -INF),
            torch.tensor([INF, NAN, -INF]), torch.tensor([-INF, -INF, NAN]), good]  # fmt: skip
    found = sample(torch.stack(rows), [draw(0, prompt=[0, 1], **fields) for _ in rows])
    assert [s.token for s in found] == [found[0].token, *[NONFINITE] * 5, found[0].token]
    assert found[0].token in (0, 2)
    assert all(s == Sampled(NONFINITE, None, ()) for s in found[1:6])


# Log-probabilities.


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(k: int) -> None:
    """Log probabilities are those before penalties, temperature and cuts."""
    logits = random_logits(3, V)
    wanted = logits.log_softmax(-1)
    changed = dict(temperature=2, top_k=50, min_p=0.01, repetition_penalty=3, presence_penalty=2)
    for fields in ({}, changed):
        for i, found in enumerate(sample(logits, [draw(i, 4, prompt=[1, 2], logprobs=k, **fields) for i in range(3)])):
            assert found.logprob == pytest.approx(wanted[i, found.token].item(), abs=1e-5)
            values, ids = wanted[i].topk(k)
            assert [t for t, _ in found.top] == ids.tolist()
            assert [v for _, v in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_most_likely_tokens_among_equals_and_in_small_vocabularies() -> None:
    [found] = sample(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), [draw(logprobs=3)])
    assert [t for t, _ in found.top] == [1, 0, 2]
    [found] = sample(torch.tensor([[1.0, 2.0]]), [draw(logprobs=20)])
    assert [t for t, _ in found.top] == [1, 0]
    assert math.fsum(math.exp(v) for _, v in found.top) == pytest.approx(1, abs=1e-12)


def test_logits_are_left_as_they_were() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = random_logits(2, V).to(dtype)
        before = logits.clone()
        sample(logits, [draw(0, 3, prompt=[1], temperature=1, top_p=0.5, logprobs=2, repetition_penalty=2,
                             presence_penalty=1)] * 2)  # fmt: skip
        assert (logits == before).all()


def test_an_entry_of_logprobs() -> None:
    class Words:
        """Decodes as sentencepiece does: without the first leading space."""

        def decode(self, ids: list[int]) -> str:
            return "".join([" the", ",", " cat"][i] for i in ids).removeprefix(" ")

    found = Sampled(0, -0.5, ((2, -0.25), (1, -3.0)))
    wanted = [(0, " the", -0.5), (2, " cat", -0.25), (1, ",", -3.0)]
    first, *top = [dict(zip(("token_id", "token", "logprob"), entry, strict=True)) for entry in wanted]
    assert logprob_entry(found, Words()) == {**first, "top_logprobs": top}
    assert logprob_entry(Sampled(0, -0.5, ()), None) == {**first, "token": None, "top_logprobs": []}


# Company.


def test_a_row_is_the_same_in_any_company() -> None:
    """Bit for bit, logprobs too."""
    logits = random_logits(len(CUTS) * 2, 5000)
    draws = [draw(i, 3, prompt=[1, 2, 3], temperature=i % 2, logprobs=2, **fields) for i, fields in enumerate(CUTS * 2)]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(draws)]
    assert together == sample(logits.flip(0), draws[::-1])[::-1]


def test_a_row_gets_the_same_tokens_in_any_company(families: Any, tmp_path: Path) -> None:
    """Batching, schedule and the other rows change nothing; the seed and the row's own index do."""
    known = families("llama")
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
    cut = SamplingParams(9, 0.8, 3, True, top_k=100, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.5)

    def run(policy: Policy, params: SamplingParams) -> list[list[int]]:
        with Engine(known.directory, policy=policy, device="sim", offload_dir=tmp_path) as engine:
            return [r.token_ids for r in engine.generate(known.rows, params)]

    small = Policy(gpu_batch_size=2, num_gpu_batches=2, weights=(0, 0, 1), schedule="diagonal")
    one = run(Policy(gpu_batch_size=8, num_gpu_batches=1), params)
    assert one == run(small, params)
    assert one != known.expected
    assert run(Policy(gpu_batch_size=8, num_gpu_batches=1), cut) == run(small, cut)
    other = run(Policy(gpu_batch_size=8, num_gpu_batches=1), SamplingParams(9, 0.8, 4, True))
    assert sum(a == b for a, b in zip(one, other, strict=True)) <= 1
    same_prompt = [{"prompt_token_ids": known.prompts[0]}] * 4
    with Engine(known.directory, device="sim", offload_dir=tmp_path) as engine:
        rows = [r.token_ids for r in engine.generate(same_prompt, params)]
    assert len({tuple(r) for r in rows}) > 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_draws_what_the_cpu_draws() -> None:
    logits = random_logits(len(CUTS), 5000)
    draws = [draw(i, 3, prompt=[1, 2], temperature=1, logprobs=2, **fields) for i, fields in enumerate(CUTS)]
    assert tokens(logits.cuda(), draws) == tokens(logits, draws)
    assert tokens(torch.full((1, 9), NAN).cuda(), draws[:1]) == [NONFINITE]


def edits(seed: int) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return a prompt, tokens after it, and parameters that often match them: small vocabulary, words of their tail."""
    noise = torch.Generator().manual_seed(seed)

    def some(count: int, top: int = 12) -> list[int]:
        return torch.randint(0, top, (count,), generator=noise).tolist()

    prompt, generated = some(1 + seed % 3), some(seed % 5)
    words = [some(1 + i % 4) for i in range(6)] + [[*(prompt + generated)[-2:], token] for token in some(3)]
    bias = {token: float(number - 50) for token, number in zip(some(5), some(5, 100), strict=True)}
    ends, least = some(2), some(1, 6)[0]
    fields = dict(logit_bias=bias, bad_words=words, min_tokens=least, stop_token_ids=ends, max_tokens=9)
    return prompt, generated, fields


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("seed", range(60))
def test_bias_bad_words_and_least_length_are_those_of_transformers(seed: int, penalty: float) -> None:
    prompt, generated, fields = edits(seed)
    logits = random_logits(1, 12, seed=seed)
    ids, least = torch.tensor([prompt + generated]), fields["min_tokens"]
    processors = LogitsProcessorList([
        SequenceBiasLogitsProcessor({(token,): number for token, number in fields["logit_bias"].items()}),
        RepetitionPenaltyLogitsProcessor(penalty),
        NoBadWordsLogitsProcessor(fields["bad_words"]),
        MinNewTokensLengthLogitsProcessor(len(prompt), least, fields["stop_token_ids"]),
    ])  # fmt: skip
    expected = processors(ids, logits.clone())
    one = Draw(SamplingParams(repetition_penalty=penalty, **fields), 0, 0, prompt, generated)
    if expected.max() == -INF:
        assert tokens(logits, [one]) == [NONFINITE]
        return
    assert tokens(logits, [one]) == [int(expected.argmax())]
    hot = Draw(SamplingParams(repetition_penalty=penalty, temperature=2, **fields), 0, 0, prompt, generated)
    assert expected[0, tokens(logits, [hot])[0]] > -INF


def test_a_bias_is_added_in_fp32_as_in_transformers() -> None:
    """Above 100, fp32 has steps of 7.6e-6: two logits become equal, and the first token is taken."""
    logits = torch.tensor([[1.0, 1.0 + 2**-22, 0.0]])
    assert tokens(logits, [draw(logit_bias={0: 100, 1: 100})]) == [0]
    assert tokens(logits, [draw(logit_bias={2: -100})]) == [1]


def test_every_token_forbidden_is_no_token() -> None:
    for heat in (0, 1):
        assert tokens(random_logits(1, 3), [draw(bad_words=[[0], [1], [2]], temperature=heat)]) == [NONFINITE]
    beyond = draw(bad_words=[[7]], logit_bias={9: 5})
    assert tokens(random_logits(1, 3), [beyond]) == tokens(random_logits(1, 3), [draw()])
