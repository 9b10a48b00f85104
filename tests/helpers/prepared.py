"""Tensors of prepared weights."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.encoding import decoded_size, read_part


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a prepared directory, by its index."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, "pt") as shard:
            assert set(shard.keys()) == {name for name, place in weight_map.items() if place == file}
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors


def gguf_tensors_of(directory: Path, file: Path) -> dict[str, torch.Tensor]:
    """All parameters of a GGUF file, as the engine decodes them: those that stay in the file, and those that are in
    its prepared directory."""
    found = read_checkpoint(directory, [file])
    assert tensors_of(directory).keys() < found.keys()
    tensors = {}
    for name, stored in found.items():
        flat, (*first, rows, columns) = read_part(stored, 0, decoded_size(stored)), (1, 1, *stored.shape)
        turned = stored.form is not None and stored.form.transposed
        tensors[name] = (flat.view(*first, columns, rows).mT if turned else flat).reshape(stored.shape)
    return tensors
