"""Adapter for DiffLlama, which computes two attentions of the same queries and keys in a layer."""

from typing import Any

import torch
from torch import Tensor
from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

from flexengine.model.adapters import become
from flexengine.model.forward import attend


def adapt(config: Any, model: Any) -> None:
    """Replace the attention of a model, or of a layer, of a family in `build.ADAPTERS`. config: of the model."""
    for module in model.modules():
        if type(module).__name__ == "DiffLlamaAttention":
            become(module, BothValues)


class BothValues:
    """Attention over both halves of the values at once: those of a head lie side by side."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        both = torch.cat([half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)], -1)
        out, _none = attend(self, q, k, both, attention_mask, scaling=self.scaling)
        one, two = out.chunk(2, dim=2)
        pairs = (self.lambda_q1 * self.lambda_k1, self.lambda_q2 * self.lambda_k2)
        plus, minus = (torch.exp(pair.sum(-1, dtype=torch.float32)).to(q.dtype) for pair in pairs)
        out = (1 - self.lambda_init) * self.groupnorm(one - (plus - minus + self.lambda_init) * two)
        return self.o_proj(out.flatten(2)), None
