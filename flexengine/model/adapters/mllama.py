"""Adapter for Mllama (Llama 3.2 Vision), whose layers of cross-attention pass texts without images on unchanged."""

from typing import Any

from torch import nn


def adapt(config: Any, model: Any) -> None:
    """Leave the layers out that texts skip, and number the others anew: `model.kept_layers` has their old numbers."""
    for module in model.modules():
        if type(module).__name__ != "MllamaTextModel":
            continue
        kept = [j for j in range(len(module.layers)) if j not in module.cross_attention_layers]
        module.layers = nn.ModuleList([module.layers[j] for j in kept])
        for number, layer in enumerate(module.layers):
            layer.layer_idx = layer.self_attn.layer_idx = number
        module.cross_attention_layers, config.get_text_config().num_hidden_layers = [], len(kept)
        model.kept_layers = kept
