"""Tiny models with states beside keys and values, one for each kind of state, and the tokens of `transformers`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers.architectures import config_classes, continuation, reload
from tests.helpers.tiny_models import make_model, tiny_config

# By model type, what it shows.
KINDS = {
    "qwen3_next": "gated delta rule; attention in other layers",
    "kimi_linear": "Kimi delta attention; latent attention in other layers",
    "granitemoehybrid": "Mamba 2, and experts",
    "falcon_h1": "Mamba 2 and attention side by side in each layer",
    "zamba2": "Mamba 2 after attention in a layer; decode steps compute another function than prompts",
    "mamba2": "Mamba 2 alone, without attention and pages",
    "jamba": "Mamba 1, whose own scan begins from zeros",
    "mamba": "Mamba 1 alone",
    "zamba": "Mamba 1 whose heads have weights of their own",
    "minimax": "lightning attention; attention in other layers",
    "lfm2": "a short convolution",
    "recurrent_gemma": "a gated linear recurrence and a convolution, states that transformers keeps on modules",
    "rwkv": "states of a whole layer, which two blocks share; rescaled layers",
    "xlstm": "matrix memory",
    "inkling_text": "four short convolutions in a layer; numbers by distance that attention adds to scores",
}
# Those whose states kernels change.
KERNELS = {"qwen3_next", "kimi_linear", "granitemoehybrid", "falcon_h1", "zamba2", "mamba2", "jamba", "mamba", "lfm2"}
KERNELS |= {"inkling_text"}
# Multiples of the grain (64), one and two more, a single token, and ragged ones.
LENGTHS, NEW = (65, 150, 1, 64, 129, 40, 2, 130), 5
LEAST_GAP = 3e-4  # of the two best logits, in standard deviations of all
SEEDS = 8


class Hybrid(NamedTuple):
    """A checkpoint, prompts, and the tokens that follow."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": prompt} for prompt in self.prompts]


@torch.no_grad()
def make_hybrid(kind: str, directory: Path, prompts: list[list[int]], **given: Any) -> Hybrid:
    """Save a random model whose answers are decisive. given: fields of its config."""
    config = tiny_config(config_classes()[kind], **given)
    for seed in range(SEEDS):
        make_model(config, seed).save_pretrained(directory)
        model = reload(directory)
        found = [continuation(model, prompt, new=NEW) for prompt in prompts]
        if min(gap for _, gap in found) >= LEAST_GAP:
            return Hybrid(directory, prompts, [tokens for tokens, _ in found])
    raise AssertionError(f"no seed of {kind} gives decisive answers")
