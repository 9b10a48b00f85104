"""Tiny ReLU models with a token per byte, whose share of active neurons is set by the bias of fc1."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.tokenizers import byte_tokenizer

WIDTH, NEURONS, LAYERS, CONTEXT = 32, 48, 2, 33


def make_relu(directory: Path, shift: float = -1.5) -> Any:
    """Write the checkpoint of a random OPT, and return the model of transformers. shift: added to every bias of fc1."""
    torch.manual_seed(3)
    config = transformers.OPTConfig(
        vocab_size=len(byte_tokenizer(directory)), hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=NEURONS,
        num_attention_heads=2, max_position_embeddings=CONTEXT, word_embed_proj_dim=WIDTH, init_std=0.2,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc1.bias += shift
    model.save_pretrained(directory)
    return model
