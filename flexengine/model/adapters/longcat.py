"""Adapter for LongCat-Flash, whose layers have two attentions: each layer becomes two, with one attention each.

The first ends after the first attention. The second begins with the mixture of experts, whose output skips the second
attention. Some experts return their input.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashDecoderLayer

from flexengine.model.adapters import become
from flexengine.model.experts import EXPERTS
from flexengine.model.linear import Product

_PART = re.compile(r"(.*\blayers)\.(\d+)\.(\w+)\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r".*\.experts\.(\d+)\.")
BLOCK = 128  # tokens whose chosen experts are computed at once, so that few copies of tokens exist


def adapt(config: Any, model: Any) -> None:
    """Divide the layers of a model in two, and replace the experts of a model or of a layer. config: of the model."""
    for module in [*model.modules()]:
        kind = type(module).__name__
        if kind == "LongcatFlashModel":
            halves = [LongcatHalf(config, j, module.layers[j // 2]) for j in range(2 * len(module.layers))]
            module.layers = _Halves(halves)
            model.stored_name = partial(stored_name, experts=config.n_routed_experts)
        elif kind == "LongcatFlashExperts":
            become(module, ChosenExperts)
            module.config, whole = config, module.gate_up_proj
            module.gate_up_proj = nn.Parameter(whole[: len(module.down_proj)], requires_grad=False)
        elif kind == "LongcatFlashTopkRouter":
            become(module.classifier, _Plain)


def stored_name(name: str, experts: int) -> str | None:
    """Return the name of a stored tensor in the divided layers; None for experts that return their input, as
    transformers saves matrices for some of these. experts: number of the others."""
    if (match := _EXPERT.match(name)) and int(match[1]) >= experts:
        return None
    if not (match := _PART.fullmatch(name)):
        return name
    layers, layer, part, number, rest = match.groups()
    if part in ("self_attn", "input_layernorm"):
        return f"{layers}.{2 * int(layer) + int(number or 0)}.{part}.{rest}"
    return f"{layers}.{2 * int(layer) + 1}.{part}.{f'{number}.' if number else ''}{rest}"


class _Halves(nn.ModuleList):
    """The divided layers. The decoder takes the first `num_layers` of its list: all."""

    def __getitem__(self, index: Any) -> Any:
        return [*self] if isinstance(index, slice) else super().__getitem__(index)


class _Plain:
    """A linear layer whose weight the router multiplies itself, in fp32."""


class LongcatHalf(nn.Module):
    """A half of a layer: up to and with its first attention, or the rest. `whole` is taken apart."""

    def __init__(self, config: Any, layer_idx: int, whole: Any = None) -> None:
        super().__init__()
        whole = LongcatFlashDecoderLayer(config, layer_idx // 2) if whole is None else whole
        self.layer_idx, half = layer_idx, layer_idx % 2
        if half:
            self.post_attention_layernorm, self.mlp, self.mlps = whole.post_attention_layernorm, whole.mlp, whole.mlps
        self.input_layernorm, self.self_attn = whole.input_layernorm[half], whole.self_attn[half]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        skips = None
        if self.layer_idx % 2:
            normed = self.post_attention_layernorm[0](hidden_states)
            skips = self.mlp(normed)
            hidden_states = hidden_states + self.mlps[0](normed)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        if skips is None:
            return hidden_states
        normed = self.post_attention_layernorm[1](hidden_states)
        out: Tensor = hidden_states + self.mlps[1](normed) + skips
        return out


class ChosenExperts:
    """Experts that compute, as those of transformers' other models, and those that return their input."""

    is_transposed, has_gate, has_bias = False, True, False
    product = Product(torch.float32)  # `use_product` sets the model's

    def _apply_gate(self: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated

    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if hidden.is_meta:
            return torch.zeros_like(hidden)
        parts = zip(*(torch.split(x, BLOCK) for x in (hidden, chosen, weights)), strict=True)
        return torch.cat([self._sums(*each) for each in parts])

    def _sums(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return weighted sums of some tokens, each added in the order of the experts: a token's parts get places of
        their own first, as sums of one call may be added in any order on a GPU."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        order, shares = chosen.sort(stable=True, dim=-1).indices, weights.reshape(-1, 1)
        parts = hidden.new_empty(chosen.numel(), hidden.shape[-1])
        real = chosen.reshape(-1) < len(self.down_proj)
        for computes in (True, False):
            picked = (real == computes).nonzero()[:, 0]
            x = hidden[picked // chosen.shape[-1]]
            if computes:
                x = ALL_EXPERTS_FUNCTIONS[EXPERTS](self, x, chosen.reshape(-1, 1)[picked], shares[picked])
            parts[picked] = x if computes else (x * shares[picked]).to(hidden.dtype)
        out, parts = torch.zeros_like(hidden), parts.view(*chosen.shape, -1)
        for number in order.unbind(-1):
            out += parts[torch.arange(len(out), device=out.device), number]
        return out
