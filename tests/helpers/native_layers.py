"""Layers that calls of native kernels compute, with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.model.build import build
from flexengine.model.forward import PausingLayer
from flexengine.model.skeleton import Skeleton

NATIVE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")  # families whose layers compute so
TOKENS = 5


def opened(directory: Path) -> tuple[Skeleton, list[PausingLayer]]:
    """Return a skeleton whose layers have random weights, and the layers."""
    skeleton = build(directory, torch.float32)
    for layer in skeleton.layers:
        for slot in layer.values():
            values = torch.randn(slot.shape) * (0.2 if len(slot.shape) > 1 else 1.0)
            slot.bind(nn.Parameter(values, requires_grad=False))
    return skeleton, [module for module in skeleton.model.modules() if isinstance(module, PausingLayer)]


def changed(directory: Path, target: Path, kind: str, **fields: Any) -> Path:
    """Copy a checkpoint, with another architecture in its config."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), **fields}
    (target / "config.json").write_text(json.dumps(config))
    return target


def arguments(skeleton: Skeleton, tokens: int = TOKENS) -> tuple[Tensor, Any]:
    """Return hidden states, and cosines and sines of a layer; None if its positions are not rotary."""
    config = skeleton.config.get_text_config()
    width, dim = config.hidden_size, getattr(config, "head_dim", None) or skeleton.head_dim
    if config.model_type == "opt":
        return torch.randn(1, tokens, width), None
    return torch.randn(1, tokens, width), (torch.randn(1, tokens, dim), torch.randn(1, tokens, dim))


def called(layer: PausingLayer, hidden: Tensor, positions: Any) -> Any:
    return layer(hidden) if positions is None else layer(hidden, position_embeddings=positions)
