"""Streamed weights are read by direct I/O straight into their slots."""

import os
from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from flexengine import Engine, Policy, SamplingParams
from flexengine.tier.file import File
from flexengine.tier.memory import HUGE, in_huge_pages, mapped
from tests.helpers.families import prompts_of, reference
from tests.helpers.tiers import watch_buffers


def test_large_weights_of_a_checkpoint_pass_through_no_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only biases, norms, and the blocks at the ends of a weight are copied from a buffer."""
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=300, hidden_size=512, ffn_dim=1024, num_hidden_layers=3, num_attention_heads=8,
                       max_position_embeddings=128, word_embed_proj_dim=512)  # fmt: skip
    model = OPTForCausalLM(config).half().eval()
    model.save_pretrained(tmp_path)
    room = mapped(HUGE, huge=True)
    if not in_huge_pages(room) or File(next(tmp_path.glob("*.safetensors")), os.O_RDONLY).direct is None:
        pytest.skip("no huge pages or no direct I/O here")
    copied = watch_buffers(monkeypatch)
    prompts = prompts_of(300)[:2]
    policy = Policy(2, 1, weights=(0.0, 0.0, 1.0))
    with Engine(tmp_path, device="cpu", policy=policy) as engine:
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.generate(rows, SamplingParams(max_tokens=8, ignore_eos=True))
        read = engine.summary.to_json()["bytes"]["disk_read"]
    layers = sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name)
    assert read > 7 * layers  # each sweep reads all of them
    assert sum(copied) < 0.15 * read
    assert [list(result.token_ids) for result in results] == reference(model.float(), prompts, 8)
