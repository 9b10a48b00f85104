"""Adapter for Inkling, whose attention adds a number to each score, which depends on the query and on the distance.

A query's numbers are its states times profiles by distance. They are computed where keys are read, for a part of the
queries at a time: they take heads * `rel_extent` elements of a token, and its states heads * `d_rel`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexengine.model.adapters import become, positions
from flexengine.model.forward import Attend, attend, pause
from flexengine.model.linear import Product


@dataclass(frozen=True, slots=True)
class ByDistance:
    """Numbers that attention adds to the scores of a pass's tokens: states @ profiles, by distance; 0 beyond."""

    states: Tensor  # [tokens, heads, d_rel]
    profiles: Tensor  # [d_rel, extent]

    attends: ClassVar[str] = "flexengine.worker.cache.distances:attend"  # computes attention over pages
    why: ClassVar[str] = "its scores depend on the distance of keys"  # layers are not computed by calls of kernels

    @property
    def elements(self) -> int:
        """Elements of the numbers of a token."""
        return self.states.shape[1] * self.profiles.shape[1]

    def attended(self, event: Attend) -> Tensor:
        """Pause for attention. Return its output, [1, tokens, heads, value_dim]."""
        out: Tensor = pause(event)
        return out


def adapt(config: Any, model: Any) -> None:
    """Replace attention and shared experts of a model, or of a layer. config: of the model."""
    mixins = {"InklingAttention": DistanceScores, "InklingSharedExperts": SharedChosen}
    for module in model.modules():
        if mixin := mixins.get(type(module).__name__):
            become(module, mixin)


class DistanceScores:
    """Attention of Inkling. Layers without a window scale queries and added numbers by the pass's positions."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_sconv(self.k_proj(hidden_states)).view(shape)).transpose(1, 2)
        v = self.v_sconv(self.v_proj(hidden_states)).view(shape).transpose(1, 2)
        states = self.r_proj(hidden_states).view(*shape[:2], self.num_heads, -1)[0]
        if not self.is_sliding and (floor := self.config.log_scaling_n_floor) is not None:
            grown = torch.log(((positions()[0] + 1).float() / floor).clamp(min=1.0))
            factor = (1.0 + self.config.log_scaling_alpha * grown)[:, None]
            q = (q.float() * factor).to(q.dtype)
            states = states.float() * factor[..., None]
        added = ByDistance(states, self.rel_logits_proj.proj)
        window, scale = self.sliding_window, self.scaling
        out, _none = attend(self, q, k, v, attention_mask, scale, window, position_bias=added)
        return self.o_proj(out.flatten(2)), None


class SharedChosen:
    """Shared experts of Inkling, one product for each matrix."""

    uses_product = True
    product = Product(torch.float32)  # `use_product` sets the model's

    def forward(self: Any, hidden_states: Tensor, gammas: Tensor) -> Tensor:
        flat, outs = hidden_states.flatten(0, -2), list[Tensor]()
        for expert in range(self.n_shared_experts):
            gate, up = (self.product(flat, x[expert]) for x in (self.gate_proj, self.up_proj))
            inner = self.act_fn(gate) * up * gammas.reshape(-1, self.n_shared_experts)[:, expert, None]
            outs.append(self.product(inner, self.down_proj[expert]).float())
        return torch.stack(outs).sum(0).to(hidden_states.dtype).view(hidden_states.shape)
