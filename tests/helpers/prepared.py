"""Tensors of prepared weights."""

import json
from pathlib import Path

import torch
from safetensors import safe_open


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a prepared directory, by its index."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, "pt") as shard:
            assert set(shard.keys()) == {name for name, place in weight_map.items() if place == file}
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors
