"""Adapter for Falcon, whose modules compute attention themselves."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from flexengine.model.adapters import become, positions
from flexengine.model.adapters.alibi import biased, slopes_on
from flexengine.model.forward import attend


def adapt(config: Any, model: Any) -> None:
    """Replace the attention of a model, or of a layer, of a family in `build.ADAPTERS`. config: of the model."""
    for module in model.modules():
        if type(module).__name__ == "FalconAttention":
            become(module, FalconScores)
        elif type(module).__name__ == "FalconLinear" and (module.bias is None or module.weight.dtype == torch.float32):
            module.__class__ = nn.Linear  # the same, but for biases in 16 bits, which it adds apart


class FalconScores:
    """Attention of Falcon, with rotary positions or with ALiBi whose biases are rounded to bf16."""

    def forward(
        self: Any,
        hidden: Tensor,
        alibi: Any = None,
        attention_mask: Any = None,
        *_: Any,
        position_embeddings: Any = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        fused, dim = self.query_key_value(hidden), self.head_dim
        if self.new_decoder_architecture:  # heads of a group, then its key and value
            groups = fused.unflatten(2, (self.num_kv_heads, self.num_heads // self.num_kv_heads + 2, dim))
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            q, k, v = self._split_heads(fused)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if alibi is None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        else:
            slope = slopes_on(k.device, self.num_heads).bfloat16()
            k, v = (x.repeat_interleave(self.num_heads // x.shape[1], 1) for x in (k, v))
            q, k = biased(q, k, [(slope[:, None] * positions()).to(k.dtype)], 1.0)
        mask = attention_mask if alibi is None else None
        out, _none = attend(self, q, k, v, mask, scaling=dim**-0.5)
        return self.dense(out.flatten(2)), None
