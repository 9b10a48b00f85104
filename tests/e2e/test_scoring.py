"""Scoring: log probabilities of given tokens are those of transformers, for all families and at all places."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, Result, SamplingParams
from flexengine.lossy import Lossy
from flexengine.schedule.prefixes import MIN_SHARED_TOKENS
from tests.helpers.families import FAMILIES
from tests.helpers.job import Job

HOST, EVERYWHERE = (0.0, 1.0, 0.0), (0.3, 0.3, 0.4)
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {"device": "cpu", "device_mem": "1G"},
    "host": {"policy": Policy(3, 2, cache=HOST, prefill_tokens=16), "device": "sim"},
    "everywhere": {"policy": Policy(2, 3, weights=EVERYWHERE, cache=EVERYWHERE, activations=(0.0, 0.5, 0.5),
                                    prefill_tokens=24), "device": "sim"},
    "one at a time": {"policy": Policy(1, 1, slots=1), "device": "sim"},
}  # fmt: skip
# Every family is run at all tiers; places do not depend on the family.
CASES = [(family, "everywhere") for family in FAMILIES] + [("llama", n) for n in POLICIES if n != "everywhere"]
COMMON = 37  # tokens that begin most contexts


def pairs() -> list[tuple[list[int], list[int]]]:
    """Contexts that begin alike, with three continuations each; a long continuation; and single tokens."""
    generator = torch.Generator().manual_seed(3)

    def some(n: int) -> list[int]:
        return torch.randint(3, 601, (n,), generator=generator).tolist()

    few = some(COMMON)
    rows = [(few + own, some(n)) for own in (some(5), some(12), some(19)) for n in (1, 2, 3)]
    return [*rows, (some(2), some(70)), (some(1), some(1))]


@torch.no_grad()
def expected(model: Any, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].double()
    found = logits.log_softmax(-1)[range(len(continuation)), continuation].tolist()
    return found, logits.argmax(-1).tolist() == continuation


def check(results: list[Result], model: Any) -> None:
    for result, (context, continuation) in zip(results, pairs(), strict=True):
        logprobs, greedy = expected(model, context, continuation)
        assert result.error is None
        assert result.token_ids == continuation
        assert [e["logprob"] for e in result.logprobs or ()] == pytest.approx(logprobs, abs=1e-4)
        assert result.is_greedy == greedy
        (score,) = result.scores or ()
        assert score.logprob == pytest.approx(sum(logprobs), abs=1e-3)
        assert (score.tokens, score.is_greedy) == (len(continuation), greedy)


@pytest.mark.parametrize(("family", "place"), CASES)
def test_log_probabilities_are_those_of_transformers(families: Any, tmp_path: Path, family: str, place: str) -> None:
    known = families(family)
    with Engine(known.directory, offload_dir=tmp_path, **POLICIES[place]) as engine:
        check(engine.score(*map(list, zip(*pairs(), strict=True))), known.model)
        assert engine.summary.scored_tokens == sum(len(rest) for _, rest in pairs())
        assert engine.summary.generated_tokens == 0


def test_a_common_context_is_computed_once(families: Any) -> None:
    """The number of computed tokens, by formula, and not a bit of the results."""
    known, given = families("llama"), pairs()[:9]
    whole = [len(context) + len(rest) - 1 for context, rest in given]
    found = {}
    for shares in (True, False):
        with Engine(known.directory, device="cpu", device_mem="1G", prefix_sharing=shares) as engine:
            found[shares] = [r.logprobs for r in engine.score(*map(list, zip(*given, strict=True)))]
            computed = engine.summary.computed_prompt_tokens
        if shares:  # the common part, the rest of each context without its last token, then each pair's own tokens
            own = [5, 12, 19]
            assert min(own) - 1 < MIN_SHARED_TOKENS  # so the three pairs of the first context compute it themselves
            assert computed == COMMON + 3 * 4 + sum(n - 1 for n in own[1:]) + sum(len(rest) for _, rest in given)
        else:
            assert computed == sum(whole)
    assert found[True] == found[False]


@pytest.mark.parametrize(
    ("lossy", "least"),
    [(Lossy(cache="int4"), 0.05), (Lossy(sparse_attention=0.2), 0.05), (Lossy(cache="int8"), 1e-4),
     (Lossy(cache="bf16"), 1e-5)],
    ids=str,
)  # fmt: skip
def test_a_lossy_cache_is_read_as_in_generation(families: Any, lossy: Lossy, least: float) -> None:
    """Each given token reads the stored keys and values of all before it: the score of greedy tokens is what the
    generation of these tokens reported."""
    known = families("llama")
    with Engine(known.directory, device="cpu", device_mem="1G", lossy=lossy) as engine:
        said = engine.generate(known.rows, SamplingParams(12, logprobs=1, ignore_eos=True))
        scores = engine.score(known.prompts, [result.token_ids for result in said])
        assert engine.summary.sweeps == 1
        exact = Engine(known.directory, device="cpu", device_mem="1G")
    for result, score in zip(said, scores, strict=True):
        assert score.cumulative_logprob == pytest.approx(result.cumulative_logprob, abs=1e-3)
    with exact:
        others = exact.score(known.prompts, [result.token_ids for result in said])
    pairs = zip(scores, others, strict=True)
    assert max(abs((a.cumulative_logprob or 0) - (b.cumulative_logprob or 0)) for a, b in pairs) > least  # it was read


# Files.


@pytest.fixture
def job(tmp_path: Path, families: Any, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(tmp_path, families("llama"), capsys)


def test_rows_of_a_file(job: Job) -> None:
    """All kinds of rows in one job: continuation, choices, a prompt; bad rows."""
    long = torch.randint(3, 601, (600,), generator=torch.Generator().manual_seed(5)).tolist()
    context, choices = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [[20], [21, 22], [23]]
    job.write([
        {"id": "a", "context": context, "continuation": [20, 30]}, {"context": context, "choices": choices},
        {"text": long}, {"prompt_token_ids": context, "max_tokens": 3}, {"context": context}, {"text": []},
        {"text": long, "choices": choices}, {"context": context, "choices": []},
        {"context": "a", "continuation": [3]}, {"context": context, "text": long},
        {"context": context, "choices": [[20], [601]]},
    ])  # fmt: skip
    assert job("--score") == 1
    model, rows = job.family.model, job.rows
    pair, several, text, run = rows[:4]
    assert pair["id"] == "a"
    (found,) = pair["scores"]
    logprobs, greedy = expected(model, context, [20, 30])
    assert found == {"logprob": pytest.approx(sum(logprobs), abs=1e-4), "tokens": 2, "is_greedy": greedy}
    assert [pair["token_ids"], pair["generated_text"]] == [[], None]
    for score, choice in zip(several["scores"], choices, strict=True):
        assert score["logprob"] == pytest.approx(sum(expected(model, context, choice)[0]), abs=1e-4)
    assert "the model has no token that begins or ends a sequence" in text["error"]  # it has no tokenizer
    assert len(run["token_ids"]) == 3
    assert "scores" not in run
    errors = [row["error"] for row in rows[4:]]
    for error, says in zip(errors, (
        "has none of continuation, choices, text to score", "text is []; it must be", "has choices and text; exactly",
        "choices is []; it must be an array of 1 to 1000", "give both as text, or both as token ids",
        "has context and text; a context needs", "choices[1] holds 601; token ids lie in [0, 601)",
    ), strict=True):  # fmt: skip
        assert says in error
    assert "3 rows done, 8 failed" in job.err


def test_tables_and_log_probabilities_of_tokens(job: Job, tmp_path: Path) -> None:
    """A table needs a column to score; --logprobs adds those of each token."""
    job.input = tmp_path / "in.csv"
    job.input.write_text("a,b\n1,2\n")
    assert job("--score") == 2
    assert "no column continuation or choices or text or prompt" in job.err
    job.input = tmp_path / "in.jsonl"
    job.write([{"context": [5, 6], "continuation": [7, 8]}])
    assert job("--score", "--logprobs", "1") == 0
    (row,) = job.rows
    assert row["token_ids"] == [7, 8]
    assert sum(e["logprob"] for e in row["logprobs"]) == pytest.approx(row["scores"][0]["logprob"])


def test_rows_may_request_their_log_probabilities(job: Job) -> None:
    pair = {"context": [5, 6], "continuation": [7, 8]}
    job.write([pair, {**pair, "logprobs": 2}, {**pair, "logprobs": "many"}, {**pair, "logprobs": [{"logprob": -1}]}])
    assert job("--score") == 1
    plain, own, wrong, again = job.rows
    assert ["logprobs" in row for row in (plain, own, again)] == [False, True, False]
    assert [entry["token_id"] for entry in own["logprobs"]] == own["token_ids"] == [7, 8]
    assert plain["scores"] == own["scores"] == again["scores"]
    assert "logprobs is 'many'" in wrong["error"]


def test_the_job_is_continued_only_by_one_that_scores(job: Job) -> None:
    job.write([{"context": [5, 6], "continuation": [7, 8]}])
    assert job("--score") == 0
    scored = job.output.read_bytes()
    assert job("--score") == 0
    assert "finished already" in job.err
    assert job() == 2
    assert "score: was true, now false" in job.err
    assert job.output.read_bytes() == scored
    assert json.loads(scored)["scores"]


def test_an_interrupted_job_ends_with_the_same_bytes(families: Any, tmp_path: Path) -> None:
    """Rows with common prefixes, generated and scored, with log probabilities: after each interruption other rows are
    left, so other prefixes are shared. No bit depends on that."""
    known, generator = families("llama"), torch.Generator().manual_seed(9)

    def some(n: int) -> list[int]:
        return torch.randint(3, 601, (n,), generator=generator).tolist()

    few, rows = some(21), list[dict[str, Any]]()
    for i in range(6):
        context = few[: 10 + 2 * i] + some(3 + i)
        rows += [{"context": context, "choices": [some(1), some(3), some(4)]},
                 {"prompt_token_ids": context + some(1), "max_tokens": 2 + i % 3, "n": 1 + i % 2},
                 {"context": few + some(12), "continuation": some(2)}]  # fmt: skip
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = Policy(2, 2, cache=(0.5, 0.5, 0.0), prefill_tokens=16)
    params = SamplingParams(4, logprobs=1, ignore_eos=True)

    class Stop(Exception):
        pass

    def run(output: Path, sweeps: int | None) -> None:
        def swept(progress: Any) -> None:
            if progress.sweeps == sweeps:
                raise Stop

        with Engine(known.directory, policy=policy, device="sim", on_sweep=swept) as engine:
            engine.run_job(source, output, params, score=True)

    run(whole := tmp_path / "whole.jsonl", None)
    for sweeps in (2, 1, 3, 1):
        with pytest.raises(Stop):
            run(tmp_path / "out.jsonl", sweeps)
    run(tmp_path / "out.jsonl", None)
    assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()
    assert b'"error": null' in whole.read_bytes()
    assert not [line for line in whole.read_text().splitlines() if json.loads(line)["error"]]
