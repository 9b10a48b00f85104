"""Configs: the context that they state, and why transformers refuses one, in a sentence."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from flexengine.errors import UnsupportedModel
from flexengine.model.build import build
from flexengine.model.config import context_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("stated", "rope", "expected"),
    [
        (64, YARN, 256),  # Qwen's instruction: rope_scaling alone is added
        (256, YARN, 256),  # max_position_embeddings is edited, too
        (512, YARN, 512),
        (64, {"rope_type": "yarn", "factor": 4.0}, 256),
        (64, {"rope_type": "linear", "factor": 2.5}, 160),
        (64, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 64),
        (64, {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 16}, 16),
        (64, {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 16}}, 16),
        (64, {"rope_type": "default"}, 64),
        (64, {"full_attention": {"rope_type": "linear", "factor": 8.0}}, 64),
        (64, {"rope_type": "yarn", "factor": "x"}, 64),
        (64, None, 64),
        (None, YARN, None),
    ],
)
def test_context(stated: int | None, rope: Any, expected: int | None) -> None:
    text = SimpleNamespace(max_position_embeddings=stated, rope_parameters=rope)
    assert context_of(SimpleNamespace(get_text_config=lambda: text)) == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "config.json sets rope_type to 'mrope'"),
        ({"hidden_act": "gelu_weird"}, "config.json sets hidden_act to 'gelu_weird', which transformers does not know"),
        ({"dtype": "fp16"}, "config.json sets dtype to 'fp16', which transformers does not know; correct it"),
    ],
)
def test_a_name_that_transformers_does_not_know_is_a_sentence(tmp_path: Any, values: Any, reason: str) -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=32).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"], **values}))
    with pytest.raises(UnsupportedModel, match=reason):
        build(tmp_path, torch.float32)
