"""Jobs with logit_bias, bad_words and min_tokens: tokens of transformers.generate with the same processors, whatever
computes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from tests.helpers.chained import chained

MORE = 16  # generated tokens

EVERYWHERE = Policy(2, 3, weights=(0.4, 0.3, 0.3), cache=(0.4, 0.3, 0.3), prefill_tokens=20)


def edited(known: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return rows whose parameters forbid what the model would generate, and the tokens of transformers."""
    rows, expected = list[dict[str, Any]](), list[list[int]]()
    for number, (prompt, plain) in enumerate(zip(known.prompts, known.expected, strict=True)):
        words = [[plain[0]], plain[1:3], [prompt[-1], plain[0] + 1 if number % 2 else plain[1]], plain[3:6]]
        bias = {plain[4]: -100.0, plain[5]: 3.0, 7: 2.5}
        end = plain[2]
        own = {"bad_words": words, "logit_bias": {str(t): b for t, b in bias.items()}, "min_tokens": 2 + number,
               "stop_token_ids": [end], "repetition_penalty": 1.1, "max_tokens": MORE}  # fmt: skip
        ids = torch.tensor([prompt])
        made = known.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, max_new_tokens=MORE,
            sequence_bias={(t,): b for t, b in bias.items()}, bad_words_ids=words, min_new_tokens=2 + number,
            repetition_penalty=1.1, eos_token_id=end,
        )  # fmt: skip
        rows.append({"prompt_token_ids": prompt, "ignore_eos": True, **own})
        expected.append(made[0, len(prompt) :].tolist())
    assert all(made != plain[: len(made)] for made, plain in zip(expected, known.expected, strict=True))
    return rows, expected


@pytest.mark.slow
def test_tokens_are_those_of_transformers_processors(families: Any, tmp_path: Path) -> None:
    """In an engine, in a chain of stages, and in a job of a file that is interrupted and continued."""
    known = families("llama")
    with torch.no_grad():
        rows, expected = edited(known)
    with chained(known.directory, (0, 2, 4), EVERYWHERE, device="sim") as chain:
        assert [result.token_ids for result in chain.generate(rows, SamplingParams())] == expected
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Engine(known.directory, device="cpu", policy=EVERYWHERE) as engine:
        assert [result.token_ids for result in engine.generate(rows)] == expected
        samples = engine.generate([{**row, "n": 2} for row in rows])
        assert [[s.token_ids for s in result.samples or ()] for result in samples] == [[e, e] for e in expected]
        engine.run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", limit=2)
        engine.run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["token_ids"] for line in lines] == expected


@pytest.mark.slow
def test_parameters_of_a_job_hold_for_rows_without_them(families: Any) -> None:
    known = families("llama")
    first = known.expected[0][0]
    with Engine(known.directory, device="cpu") as engine:
        results = engine.generate(known.rows, SamplingParams(max_tokens=MORE, ignore_eos=True, bad_words=[[first]]))  # type: ignore[arg-type]
        assert all(first not in result.token_ids for result in results)
        (bad,) = engine.generate([{"prompt_token_ids": [5], "bad_words": [[10**6]]}])
        assert "bad_words holds token 1000000; token ids lie in" in str(bad.error)
