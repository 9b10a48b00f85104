"""Tiny checkpoints as pytorch_model.bin."""

import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
)


def bin_model(path: Path, shards: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=50, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                       word_embed_proj_dim=16, max_position_embeddings=32)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    path.mkdir()
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    state = model.state_dict()
    if shards == 1:
        torch.save(state, path / "pytorch_model.bin")
        return model
    names, weight_map = list(state), {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        torch.save({name: state[name] for name in names[number::shards]}, path / file)
        weight_map.update(dict.fromkeys(names[number::shards], file))
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model
