"""Adapters for mixtures of experts that read tensor values, or compute all experts for every token: DBRX, JetMoE and
Llama 4, whose attention also counts positions."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexengine.model.adapters import become, positions
from flexengine.model.experts import by_expert
from flexengine.model.forward import attend
from flexengine.model.linear import is_experts


def adapt(config: Any, model: Any) -> None:
    """Replace the experts of a model, or of a layer, of a family in `build.ADAPTERS`. config: of the model."""
    mixins: dict[str, type] = {"DbrxExperts": DbrxChosen, "Llama4TextMoe": Llama4Chosen}
    mixins |= {
        "JetMoeTopKGating": JetMoeChooser,
        "Llama4TextAttention": Llama4Temperature,
        "Llama4Router": Llama4Chooser,
    }
    for module in model.modules():
        if mixin := mixins.get(type(module).__name__):
            become(module, mixin)
        if hasattr(module, "floor_scale") and not isinstance(model, PreTrainedModel):
            module.floor_scale = 1  # so that the trial of a layer alone, with few positions, shows the scaling


def use_gates_first(model: Any) -> None:
    """Let the experts of a model whose gates and ups alternate take all gates, then all ups, as GGUF files have the
    rows of their first product."""
    for module in model.modules():
        if is_experts(module) and module.has_gate and not module.is_concatenated:
            become(module, GatesFirst)


class GatesFirst:
    """Experts that get gates and ups one after the other, though their class lets them alternate."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        alternating = gate_up.reshape(*gate_up.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        return super()._apply_gate(alternating)  # type: ignore[misc, no-any-return]


class DbrxChosen:
    """Experts of DBRX, each for the tokens that chose it. Its matrices are [experts * inner, hidden]."""

    uses_product = True  # `use_product` sets `product`
    product: Any = staticmethod(nn.functional.linear)

    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat, mlp, top = hidden.reshape(-1, self.hidden_size), self.mlp, chosen.shape[-1]
        out = torch.zeros_like(flat)
        for expert, picked in () if hidden.is_meta else by_expert(chosen, self.num_experts):
            tokens, rows = picked // top, slice(expert * self.ffn_hidden_size, (expert + 1) * self.ffn_hidden_size)
            x = flat[tokens]
            inner = mlp.activation_fn(self.product(x, mlp.w1[rows])) * self.product(x, mlp.v1[rows])
            shares = weights.reshape(-1)[picked, None]
            out.index_add_(0, tokens, self.product(inner, mlp.w2[rows].t()) * shares)
        return out.view(hidden.shape)


class JetMoeChooser:
    """Router of JetMoE, which reads how many tokens chose each expert."""

    def forward(self: Any, hidden: Tensor) -> Any:
        if not hidden.is_meta:
            return super().forward(hidden)  # type: ignore[misc]
        count = hidden.shape[0] * self.top_k
        order = torch.empty(count, dtype=torch.int64, device="meta")
        return order, order, hidden.new_empty(count), [count] + [0] * (self.num_experts - 1), self.layer(hidden)


class Llama4Chooser:
    """Router of Llama 4, a linear layer with a product of its own."""

    uses_product = True
    product: Any = staticmethod(nn.functional.linear)

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.product(hidden, self.weight)
        best, chosen = logits.topk(self.top_k, dim=1)
        return torch.sigmoid(best.float()).to(best.dtype), chosen


class Llama4Chosen:
    """Experts of Llama 4, each for the tokens that chose it. Shares scale the input. Matrices: [experts, in, out]."""

    uses_product = True
    product: Any = staticmethod(nn.functional.linear)

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        flat, experts = hidden.reshape(-1, self.hidden_dim), self.experts
        shares, chosen = self.router(flat)
        out = self.shared_expert(flat)
        for expert, picked in () if hidden.is_meta else by_expert(chosen, self.num_experts):
            tokens = picked // self.top_k
            x = flat[tokens] * shares.reshape(-1)[picked, None]
            gate, up = self.product(x, experts.gate_up_proj[expert].t()).chunk(2, dim=-1)
            inner = up * experts.act_fn(gate)
            out.index_add_(0, tokens, self.product(inner, experts.down_proj[expert].t()))
        return out, shares


class Llama4Temperature:
    """Attention of Llama 4. Layers without rotary positions scale queries by the pass's positions (Nakanishi, 2025)."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        if self.use_rope or not self.attn_temperature_tuning:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)  # type: ignore[misc]
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        steps = torch.floor((positions().float() + 1.0) / self.floor_scale)
        q = (q * (torch.log1p(steps) * self.attn_scale + 1.0)[..., None, None]).to(q.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _none = attend(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(out.flatten(2)), None
