"""Adapters for families with a method `_attn`, which computes attention of queries, keys and values: GPT-J, CodeGen,
GPT-Neo, GPT-NeoX-Japanese and the first GPT."""

import math
from typing import Any

from torch import Tensor

from flexengine.model.adapters import become
from flexengine.model.forward import attend


def adapt(config: Any, model: Any) -> None:
    """Replace the attention of a model, or of a layer, of a family in `build.ADAPTERS`. config: of the model."""
    found = [m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "_attn")]
    for number, module in enumerate(found):
        if getattr(module, "layer_idx", None) is None:
            module.layer_idx = getattr(module, "layer_id", number)
        become(module, FirstScores if config.model_type == "openai-gpt" else OwnScores)


class OwnScores:
    """Attention with q, k and v [1, heads, tokens, head_dim]."""

    def _attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        kind = getattr(self, "attention_type", "")  # of GPT-Neo, which does not scale scores
        window = self.config.window_size if kind == "local" else None
        scale = 1.0 if kind else 1 / float(math.sqrt(query.shape[-1]))
        out, _none = attend(self, query, key, value, None, scaling=scale, sliding_window=window)
        return out.transpose(1, 2), None


class FirstScores:
    """Attention of the first GPT, with k [1, heads, head_dim, tokens]."""

    def _attn(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
        scale = v.shape[-1] ** -0.5 if self.scale else 1.0
        out, _none = attend(self, q, k.transpose(2, 3), v, None, scaling=scale)
        return [out.transpose(1, 2)]
