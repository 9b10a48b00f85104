"""Layers that calls of native kernels compute, with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.model.build import build
from flexengine.model.forward import Attend, Inputs, Pass, PausingLayer, pausing_layers
from flexengine.model.skeleton import Skeleton

# Families whose layers compute so, but for those that get other arguments than `called` gives.
NATIVE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt", "gemma2", "phi3", "gpt2", "gpt-neox", "olmo2", "cohere",
                   "glm4", "granite", "mixtral", "minicpm3", "olmo", "gptj", "codegen", "bitnet",
                   "nanochat")  # fmt: skip
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
    native = pausing_layers(skeleton.model)[0].native
    hidden, width = torch.randn(1, tokens, skeleton.config.get_text_config().hidden_size), native.width
    return hidden, (torch.randn(1, tokens, width), torch.randn(1, tokens, width)) if width else None


def called(layer: PausingLayer, hidden: Tensor, positions: Any) -> Any:
    """Return a layer's output, without what else its tuple has."""
    if type(layer.layer).__name__ == "BloomBlock":
        return layer(hidden, alibi=None, attention_mask=None)[0]
    if type(layer.layer).__name__ == "MptBlock":
        return layer(hidden, position_bias=None, attention_mask=None)[0]
    return layer(hidden) if positions is None else layer(hidden, position_embeddings=positions)


def ran(
    layer: PausingLayer, hidden: Tensor, positions: Any, native: bool = True, keep: Tensor | None = None,
    recycles: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return q times the scale of attention, k, v and the output of a layer.

    Args:
        native: whether it may be computed as two calls.
        keep: tokens with logits; None for all.
        recycles: of the pass.
    """
    kept, layer.native = layer.native, layer.native if native else None
    events, answer = list[Any](), hidden
    try:
        current = Pass(lambda: called(layer, hidden, positions))
        current.recycles = recycles
        ids = torch.arange(hidden.shape[1])[None]
        current.inputs = Inputs(ids, ids, ids[0] if keep is None else keep)
        event: Any = current.switch()
        while not current.dead:
            if isinstance(event, Attend):
                events.append(event)
                shape = 1, event.q.shape[2], event.q.shape[1], event.v.shape[-1]
                answer = torch.sin(torch.arange(torch.Size(shape).numel())).view(shape)
            event = current.switch(answer)
    finally:
        layer.native = kept
    (attend,) = events
    return [attend.q * attend.scale, attend.k, attend.v, event]
