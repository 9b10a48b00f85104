"""Random models of the pipeline benches."""

from pathlib import Path

VOCABULARY = 1000


def make_model(
    directory: Path, layers: int, hidden: int, vocabulary: int = VOCABULARY, positions: int = 256,
    dtype: str = "float32",
) -> int:  # fmt: skip
    """Write a random Llama. Return the bytes of one layer."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=positions, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return sum(p.numel() * p.itemsize for p in model.model.layers[0].parameters())
