"""Adapter for Mllama (Llama 3.2 Vision), whose layers of cross-attention pass texts without images on unchanged."""

import re
from functools import partial
from typing import Any

from torch import nn


def adapt(config: Any, model: Any) -> None:
    """Leave the layers out that texts skip, and number the others anew, also in the names of stored tensors."""
    for module in model.modules():
        if type(module).__name__ != "MllamaTextModel":
            continue
        kept = [j for j in range(len(module.layers)) if j not in module.cross_attention_layers]
        module.layers = nn.ModuleList([module.layers[j] for j in kept])
        for number, layer in enumerate(module.layers):
            layer.layer_idx = layer.self_attn.layer_idx = number
        module.cross_attention_layers, config.get_text_config().num_hidden_layers = [], len(kept)
        model.stored_name = partial(stored_name, kept)


def stored_name(kept: list[int], name: str) -> str | None:
    """Return the new name of a stored tensor; None in a layer that is left out. kept: old numbers of the layers."""
    match = re.match(r"(.*language_model\.(?:.*\.)?layers)\.(\d+)\.(.+)", name)
    if match is None:
        return name
    return f"{match[1]}.{kept.index(int(match[2]))}.{match[3]}" if int(match[2]) in kept else None
