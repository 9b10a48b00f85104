"""Sampling: greedy is argmax; noise depends on (seed, row, token) alone; draws follow the softmax."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.model.sample import Draw, sample, uniform


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [Draw(0, 0, 0, 0), Draw(0, 1, 1, 9)]) == [1, 0]


def test_uniform_is_a_pure_function_and_uniform() -> None:
    numbers = [uniform(1, row, token) for row in range(100) for token in range(100)]
    assert numbers == [uniform(1, row, token) for row in range(100) for token in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    assert uniform(2, 0, 0) != uniform(1, 0, 0)


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0]])
    for temperature in (0.5, 1.0, 3.0):
        found = torch.zeros(4)
        for token in range(4000):
            found[sample(logits, [Draw(temperature, 5, 0, token)])[0]] += 1
        wanted = torch.softmax(logits[0] / temperature, 0) * 4000
        assert ((found - wanted) ** 2 / wanted).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001


def test_a_row_gets_the_same_tokens_in_any_company(families: Any, tmp_path: Path) -> None:
    """Batching, schedule and the other rows change nothing; the seed and the row's own index do."""
    known = families("llama")
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)

    def run(policy: Policy, params: SamplingParams) -> list[list[int]]:
        with Engine(known.directory, policy, device="sim", offload_dir=tmp_path) as engine:
            return [r.token_ids for r in engine.generate(known.rows, params)]

    one = run(Policy(gpu_batch_size=8, num_gpu_batches=1), params)
    two = run(Policy(gpu_batch_size=2, num_gpu_batches=2, weights=(0, 0, 1), schedule="diagonal"), params)
    assert one == two
    assert one != known.expected
    other = run(Policy(gpu_batch_size=8, num_gpu_batches=1), SamplingParams(9, 0.8, 4, True))
    assert sum(a == b for a, b in zip(one, other, strict=True)) <= 1
    same_prompt = [{"prompt_token_ids": known.prompts[0]}] * 4
    with Engine(known.directory, device="sim", offload_dir=tmp_path) as engine:
        rows = [r.token_ids for r in engine.generate(same_prompt, params)]
    assert len({tuple(r) for r in rows}) > 1


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30])
def test_temperatures_near_zero_are_greedy(temperature: float) -> None:
    logits = torch.randn(4, 50) * 10
    draws = [Draw(temperature, 3, row, 1) for row in range(4)]
    assert sample(logits, draws) == logits.argmax(-1).tolist()
