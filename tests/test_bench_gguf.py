"""GGUF files made for peers hold what the checkpoints hold: read by the engine, they give the same tokens."""

from pathlib import Path
from typing import Any

import pytest
from conftest import prompts_of, reference

from bench import gguf_files
from bench.models import SHAPES, make
from flexengine import Engine, SamplingParams

ROWS = prompts_of(512, (5, 17, 1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SHAPES["llama-tiny"], tmp_path_factory.mktemp("shapes") / "llama")


def tokens_of(model: Path) -> list[list[int]]:
    with Engine(model, device="cpu") as engine:
        rows: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in ROWS]
        return [r.token_ids for r in engine.generate(rows, SamplingParams(max_tokens=9, ignore_eos=True))]


def test_a_llama_checkpoint_as_gguf_and_widened(checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    expected = reference(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), ROWS, 9)
    assert len({tuple(row) for row in expected}) == len(ROWS)
    made = gguf_files.of_llama(checkpoint)
    assert made == checkpoint.with_name("llama.gguf")
    assert tokens_of(made) == expected
    wide = gguf_files.widened(checkpoint.parent / "wide", made)
    assert wide.stat().st_size > 1.7 * made.stat().st_size
    assert tokens_of(wide) == expected
    before = wide.stat().st_mtime_ns
    assert gguf_files.widened(checkpoint.parent / "wide", made).stat().st_mtime_ns == before  # made once
