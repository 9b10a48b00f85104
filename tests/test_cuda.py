"""The exactness grid on a GPU, in fp32 and bf16. Skips visibly where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, LENGTHS, NEW, make_checkpoint, prompts_of
from test_exactness import GRID

from flexengine import Engine, Policy, SamplingParams

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", range(len(GRID)))
def test_fp32(families: Any, tmp_path: Path, family: str, case: int) -> None:
    known = families(family)
    fields, overlap = GRID[case]
    options = dict(device="cuda", device_mem="2G", host_mem="2G", dtype="float32", offload_dir=tmp_path)
    with Engine(known.directory, Policy(**fields), overlap=overlap, **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", range(0, len(GRID), 3))
def test_bf16(tmp_path: Path, family: str, case: int) -> None:
    """bf16 sums depend on the batch, so near ties may fall either way: every token must be within rounding of the
    largest logit that transformers computes at that place, and nearly all must be that largest one."""
    model = make_checkpoint(family, tmp_path / "model").to("cuda", torch.bfloat16)
    prompts = prompts_of(601)
    fields, overlap = GRID[case]
    options = dict(device="cuda", device_mem="2G", host_mem="2G", dtype="bfloat16", offload_dir=tmp_path)
    with Engine(tmp_path / "model", Policy(**fields), overlap=overlap, **options) as engine:
        results = engine.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    best = 0
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt + result.token_ids], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(result.token_ids, device="cuda")[:, None])[:, 0]
        top = logits.max(dim=1).values
        assert (top - chosen <= 0.04 * (top - logits.min(dim=1).values)).all()
        best += int((top == chosen).sum())
    assert best >= 0.9 * NEW * len(LENGTHS)
