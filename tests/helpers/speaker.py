"""A tiny model with a token per byte and a chat template."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.tokenizers import byte_tokenizer

TEMPLATE = ("{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }};"
            "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}")  # fmt: skip


def make_speaker(directory: Path, template: str | None = TEMPLATE) -> Any:
    """Write the checkpoint of a random Llama, and return the model of transformers."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model
