"""Adapter for Doge, whose attention adds a number to the scores of each key, which follows from its token's values.

It is one more element of the key, and 1 / the scale of scores is that of queries. In rows of more than
`keep_window_size` tokens a token sees the keys with the largest numbers only, so rows are limited to these.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flexengine.activity import message
from flexengine.errors import UnsupportedModel
from flexengine.model.adapters import become
from flexengine.model.forward import attend


def adapt(config: Any, model: Any) -> None:
    """Replace the attention of a model, or of a layer. config: of the model."""
    if config.is_moe:  # the router's view takes the logits of one token for those of another
        raise UnsupportedModel("its mixture of experts depends on the other tokens of a batch")
    for module in model.modules():
        if type(module).__name__ == "DogeAttention":
            become(module, BiasedKeys)
    if hasattr(model, "get_decoder"):
        model.most_tokens = most = config.keep_window_size
        message(f"{most:,} tokens are the most of a row: a token of longer ones sees {most:,} tokens only")


class BiasedKeys:
    """Attention of Doge."""

    as_module = "its keys have a bias"  # why layers are not computed by calls of kernels

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

        shape, values = (*hidden_states.shape[:-1], -1, self.head_dim), self.v_proj(hidden_states)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        biases = torch.exp(self.A * nn.functional.softplus(self.dt_proj(values))).transpose(1, 2)  # [1, heads, tokens]
        q = torch.cat([q, q.new_full((*q.shape[:3], 1), 1 / self.scaling)], -1)
        k, v = torch.cat([k, biases[..., None].to(k.dtype)], -1), values.view(shape).transpose(1, 2)
        out, _none = attend(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(out.flatten(2)), None
