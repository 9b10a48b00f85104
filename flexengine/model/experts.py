"""Mixtures of experts: their products, one expert after the other, as the experts function of transformers."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flexengine.kernels.cuda import has_grouped_product
from flexengine.model.forward import Rows, pause
from flexengine.model.linear import Product

EXPERTS, GROUPED = "flexengine", "grouped_mm"


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs, [tokens, hidden], added in the order of the experts.

    The pass pauses before that if the module's experts are loaded by rows: `by_rows` has the number of the decoder
    layer, and the names of the parameters whose first dimension is the expert. If the module has a block
    (guests/flash/expert_blocks.py), which reads the chosen experts, the block computes the sum.

    On a GPU this synchronises once, to read the router's choice, unless transformers' grouped product computes the
    experts: if the weights are plain bf16, the GPU supports it, and no recorder is active.

    Args:
        module: the experts.
        hidden: [tokens, hidden].
        chosen: expert numbers, [tokens, top_k].
        weights: shares of the experts, [tokens, top_k].
    """
    if hidden.is_meta:
        return torch.empty_like(hidden)
    if (block := module.__dict__.get("block")) is not None:
        return cast(Tensor, block(hidden, chosen, weights))
    if (by_rows := module.__dict__.get("by_rows")) is not None:
        layer, names = by_rows
        pause(Rows(layer, names, chosen))
    plain = not getattr(module, "forms", {}) and "watch" not in module.__dict__
    if plain and module.down_proj.dtype == hidden.dtype and has_grouped_product(hidden):
        return cast(Tensor, ALL_EXPERTS_FUNCTIONS[GROUPED](module, hidden, chosen, weights))
    out = torch.zeros_like(hidden)
    for expert, picked in by_expert(chosen, len(module.down_proj)):
        add_expert(module, hidden, weights, picked, out, expert, expert)
    return out


def by_expert(chosen: Tensor, number: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each chosen expert, rising, with its indices in the flattened `chosen`. number: of experts."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    counts = torch.zeros(number, dtype=torch.int64, device=experts.device)
    start = 0
    for expert, count in enumerate(counts.scatter_add_(0, experts, torch.ones_like(experts)).tolist()):
        if count:
            yield expert, order[start : start + count]
        start += count


def add_expert(
    module: Any, hidden: Tensor, weights: Tensor, picked: Tensor, out: Tensor, expert: int, row: int
) -> None:
    """Add the weighted output of one expert to `out`, [tokens, hidden].

    Args:
        module: the experts.
        hidden: [tokens, hidden].
        weights: shares of the experts, [tokens, top_k].
        picked: int64, indices in the flattened `weights` of the tokens that use the expert.
        out: changed in place.
        expert: its number.
        row: its row in the stacked matrices.
    """
    tokens = picked // weights.shape[-1]
    x = _one(module, hidden[tokens], "gate_up_proj" if module.has_gate else "up_proj", expert, row)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _one(module, x, "down_proj", expert, row)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    x = x * weights.reshape(-1)[picked, None]
    out.index_add_(0, tokens, x.to(out.dtype))


def _one(module: Any, x: Tensor, name: str, expert: int, row: int) -> Tensor:
    weight, form = getattr(module, name)[row], getattr(module, "forms", {}).get(name)
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if watch := module.__dict__.get("watch"):  # see encoding.ImportanceRecorder
        watch[name](expert, x)
    product: Product = module.product
    return product(x, weight.t() if module.is_transposed and form is None else weight, bias, form)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
