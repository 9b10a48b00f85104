"""Tiny models with states beside keys and values, one for each kind of state, and the tokens of `transformers`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flexengine import Engine, SamplingParams
from tests.helpers.architectures import config_classes, continuation, reload
from tests.helpers.families import prompts_of
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


def hybrid_maker(folders: pytest.TempPathFactory, lengths: Sequence[int]) -> Callable[..., Hybrid]:
    """Return a function that makes the model of a kind, with these fields of its config, at its first call. lengths:
    tokens of its prompts."""
    made: dict[str, Hybrid] = {}

    def get(kind: str, **given: Any) -> Hybrid:
        name = f"{kind} {given}"
        if name not in made:
            made[name] = make_hybrid(kind, folders.mktemp(kind), prompts_of(601, lengths), **given)
        return made[name]

    return get


def tokens_after_a_stop(known: Hybrid, folder: Path, opened: Callable[..., Engine]) -> list[list[int]]:
    """Return the tokens of a job that is stopped in its second block and run again by another engine, which computes
    some of the rows. opened: makes an engine whose first block takes NEW sweeps, with more options."""
    source, output, params = folder / "in.jsonl", folder / "out.jsonl", SamplingParams(max_tokens=NEW, ignore_eos=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in known.rows))

    class StopError(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.sweeps == NEW + 2:  # the first block has ended, the second is under way
            raise StopError

    with opened(on_sweep=stop) as engine, pytest.raises(StopError):
        engine.run_job(str(source), str(output), params)
    with opened() as engine:
        engine.run_job(str(source), str(output), params)
        assert 0 < engine.summary.rows < len(known.rows)
    return [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]
