"""Computing in 16 bits on a CPU: tokens are those of transformers in the same dtype, but for near ties."""

from pathlib import Path

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from tests.helpers.families import make_checkpoint, prompts_of

NEW = 8
WEIGHTS = ((1, 0, 0), (0.4, 0.3, 0.3))
CASES = [
    *(("llama", torch.bfloat16, (5, 40, 17)), ("opt", torch.float16, (5, 40, 17))),
    # slope * position takes more than the 8 bits of bf16 after 256 tokens
    *(("bloom", dtype, lengths) for dtype in (torch.bfloat16, torch.float16) for lengths in ((5, 40, 17), (1, 300, 9))),
]


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("family", "dtype", "lengths"), CASES)
def test_tokens(
    tmp_path: Path, family: str, dtype: torch.dtype, lengths: tuple[int, ...], weights: tuple[float, float, float]
) -> None:
    """Sums of both round differently, so near ties may fall either way: every token must be within rounding of the
    largest logit that transformers computes at its place, and nearly all must be that largest one."""
    model = make_checkpoint(family, tmp_path / "model").to(dtype)
    prompts = prompts_of(601, lengths)
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, weights=weights)
    name = str(dtype).removeprefix("torch.")
    with Engine(tmp_path / "model", device="sim", dtype=name, policy=policy, offload_dir=tmp_path) as engine:
        results = engine.generate(
            [{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=NEW, ignore_eos=True)
        )
    best = 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids is not None
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        top = logits.max(dim=1).values
        assert (top - chosen <= 0.04 * (top - logits.min(dim=1).values)).all()
        best += int((top == chosen).sum())
    assert best >= 0.9 * NEW * len(lengths)
