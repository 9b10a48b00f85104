"""Matrix products of a model that are not in an nn.Linear: experts, transposed projections, routers.

All go through the model's Product, for speed and because its result for a row does not depend on the other rows, which
torch's own product does not promise.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from flexengine.model.linear import Product

EXPERTS = "flexengine"


def is_experts(module: nn.Module) -> bool:
    """Whether it is a mixture of experts whose implementation transformers lets one choose."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """One expert after another over the tokens that chose it, added up in that order.

    hidden: [tokens, hidden]; chosen: expert numbers [tokens, top_k]; weights: their shares.
    """
    if hidden.is_meta:
        return torch.empty_like(hidden)
    out = torch.zeros_like(hidden)
    experts, order = chosen.reshape(-1).sort(stable=True)
    shares, at = weights.reshape(-1), 0
    for expert, count in zip(*(x.tolist() for x in experts.unique_consecutive(return_counts=True)), strict=True):
        picked = order[at : at + count]
        tokens = picked // chosen.shape[-1]
        result = _expert(module, hidden[tokens], expert) * shares[picked, None]
        out.index_add_(0, tokens, result.to(out.dtype))
        at += count
    return out


def _expert(module: Any, x: Tensor, expert: int) -> Tensor:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    biases = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None
    x = _one(module, x, up, biases, expert)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _one(module, x, module.down_proj, module.down_proj_bias if module.has_bias else None, expert)
    return cast(Tensor, module.post_expert_norm(x)) if getattr(module, "has_post_expert_norm", False) else x


def _one(module: Any, x: Tensor, weights: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    weight = weights[expert].t() if module.is_transposed else weights[expert]
    product: Product = module.product
    return product(x, weight, None if biases is None else biases[expert])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


class FastConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [in, out], computed by a Product."""

    product: Product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight.t(), self.bias)


class Loose(TorchFunctionMode):
    """While it is active, products written out as functional.linear (routers) go through a Product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs and self._ours(*args):
            return self.product(*args)
        return func(*args, **(kwargs or {}))

    def _ours(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        return x.dtype == self.product.dtype == weight.dtype and weight.dim() == 2


def use_product(model: nn.Module, product: Product) -> Loose | None:
    """Gives `product` to the model's experts and transposed layers. Returns what must be active during a pass for the
    products that no module of a known kind makes; None if the model has none."""
    known: set[int] = set()
    for module in model.modules():
        if type(module) is Conv1D:
            module.__class__ = FastConv1D
            module.product = product
        elif is_experts(module):
            module.product = product  # type: ignore[assignment]
            module.config._experts_implementation_internal = EXPERTS  # type: ignore[union-attr]
        elif not isinstance(module, nn.Linear | nn.Embedding):
            continue
        known.update(id(p) for p in module.parameters(recurse=False))
    loose = any(p.dim() > 1 and id(p) not in known for p in model.parameters())
    return Loose(product) if loose else None
