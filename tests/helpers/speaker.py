"""Tiny models with a token per byte."""

from pathlib import Path
from typing import Any

import torch
import transformers

from flexengine import Engine, Policy, SamplingParams
from tests.helpers.tokenizers import byte_tokenizer

TEMPLATE = ("{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }};"
            "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}")  # fmt: skip
TEXTS = ["One two", "Three"]
SHORT, LONG = SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=80, ignore_eos=True)


def make_speaker(directory: Path, template: str | None = TEMPLATE) -> Any:
    """Write the checkpoint of a random Llama with a chat template, and return the model of transformers."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return make_byte_llama(directory, len(tokenizer), seed=1, width=32, context=96, spread=0.3)


def make_byte_llama(directory: Path, vocabulary: int, seed: int, width: int, context: int, spread: float) -> Any:
    """Write the checkpoint of a random Llama without a tokenizer, and return the model of transformers.

    Args:
        vocabulary: number of tokens.
        seed: seed of the weights.
        width: size of the hidden states; the feed-forward layers are twice as wide.
        context: most tokens of a sequence.
        spread: standard deviation of the weights.
    """
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=context, initializer_range=spread,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def opened(directory: Path, **options: Any) -> Engine:
    """Return an engine for a tiny model, with a given policy."""
    policy = Policy(gpu_batch_size=4, num_gpu_batches=1)
    return Engine(directory, device="cpu", device_mem="1G", policy=policy, **options)


def tokens(results: Any) -> list[list[int]]:
    """Return the tokens of results without errors."""
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]
