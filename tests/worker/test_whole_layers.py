"""Prompts whose layers one call of kernels computes: the tokens of transformers, with cached tokens of every kind."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flexengine import Engine, Policy, SamplingParams
from flexengine.kernels.steps import RecordedSteps

LAYERS = 6
NEW = 4
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def deep(families: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint with so many layers that a parallel region computes several, and its model."""
    target = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(families("llama").directory, target)
    config = AutoConfig.from_pretrained(target, num_hidden_layers=LAYERS, initializer_range=0.15)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for file in target.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(target)
    return target, model


def expected(model: Any, rows: list[list[int]]) -> list[list[int]]:
    outputs = [model.generate(torch.tensor([row]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
               for row in rows]  # fmt: skip
    return [out[0, len(row) :].tolist() for out, row in zip(outputs, rows, strict=True)]


# Common prefixes of whole pages and others; prompts in chunks; several gpu_batches.
@pytest.mark.parametrize("common", [0, 16, 48, 53])
@pytest.mark.parametrize(
    "fields",
    [dict(gpu_batch_size=3, num_gpu_batches=1), dict(gpu_batch_size=2, num_gpu_batches=2, prefill_tokens=16),
     dict(gpu_batch_size=3, num_gpu_batches=1, weights=(0, 1, 0), slots=2),
     dict(gpu_batch_size=3, num_gpu_batches=1, cache=(0.5, 0.5, 0), activations=(0, 1, 0))],
)  # fmt: skip
def test_tokens_are_those_of_transformers(
    deep: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, common: int, fields: dict[str, Any]
) -> None:
    """Sequences that enter later read a prefix that an earlier sweep has computed."""
    directory, model = deep
    generator = torch.Generator().manual_seed(common)
    ids = torch.randint(3, 600, (9, 40), generator=generator).tolist()
    first = torch.randint(3, 600, (common,), generator=generator).tolist()
    rows = [first + row[: 5 + 4 * number] for number, row in enumerate(ids)]
    together, run = list[int](), RecordedSteps.run

    def counted(self: RecordedSteps, *addresses: Any) -> None:
        together.append(len(addresses))
        run(self, *addresses)

    monkeypatch.setattr(RecordedSteps, "run", counted)
    offloaded = fields.keys() & {"weights", "cache", "activations"}
    with Engine(directory, policy=Policy(**fields), device="sim" if offloaded else "cpu") as engine:
        results = engine.generate([{"prompt_token_ids": row} for row in rows], GREEDY)
    assert [r.error for r in results] == [None] * len(rows)
    assert [r.token_ids for r in results] == expected(model, rows)
    assert max(together) == (1 if offloaded else LAYERS)  # decoding sequences use all layers at once
