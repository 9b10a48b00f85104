"""Matrix products of a model outside nn.Linear (transposed projections, routers), and activation functions.

All products go through the model's Product, for speed, and because its result for a row is independent of the other
rows. torch's own products and activation functions do not guarantee this.
"""

import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from flexengine.codec.forms import Form
from flexengine.model.linear import Product

MIXTURE = "flexengine.model.experts:use_product"  # imported for models with mixtures of experts


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` is a mixture of experts whose implementation can be chosen in transformers."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


class FastConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [in, out], computed by a Product. Attributes are as in FastLinear."""

    product: Product
    forms: Mapping[str, Form] = {}

    def forward(self, x: Tensor) -> Tensor:
        form = self.forms.get("weight")
        return self.product(x, self.weight.t() if form is None else self.weight, self.bias, form)


_VECTOR = 32  # elements of torch's unrolled vector loop
# torch uses one thread per _GRAIN elements, but all threads for gelu of _GELU elements or more.
_GRAIN, _GELU = 32768, 16384
_F = nn.functional
_UNSTEADY = {_F.silu, _F.gelu, _F.sigmoid, _F.mish, _F.softplus, _F.elu, torch.sigmoid, Tensor.sigmoid}


def padded_size(count: int, threads: int) -> int:
    """Return the smallest size, at least `count`, that gives every thread a multiple of _VECTOR elements."""
    while True:
        unit = _VECTOR * math.lcm(min(threads, -(-count // _GRAIN)), threads if count >= _GELU else 1)
        if count % unit == 0:
            return count
        count = -(-count // unit) * unit


def steady(function: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return function(x), elementwise, such that a value's result is independent of its position in the tensor.

    torch computes elements that do not fill a vector by other code, which rounds differently. So the tensor is padded
    to fill all vectors.
    """
    count = x.numel()
    if x.device.type != "cpu" or not count:
        return cast(Tensor, function(x, *args, **kwargs))
    size = padded_size(count, torch.get_num_threads())
    if size == count and x.is_contiguous():
        return cast(Tensor, function(x, *args, **kwargs))
    whole = x.new_zeros(size)
    whole[:count].view(x.shape).copy_(x)
    return cast(Tensor, function(whole, *args, **kwargs)[:count].view(x.shape))


class Invariance(TorchFunctionMode):
    """Torch function mode that makes a token's results independent of the other tokens in its batch.

    Calls of functional.linear (routers) go through a Product, and activation functions through `steady`.
    """

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSTEADY and not (kwargs and kwargs.get("inplace")):
            return steady(func, *args, **(kwargs or {}))
        if func is _F.linear and not kwargs:
            x, weight = args[:2]
            if x.dtype == self.product.dtype == weight.dtype and weight.dim() == 2:
                return self.product(*args)
        return func(*args, **(kwargs or {}))


def use_product(model: nn.Module, product: Product) -> None:
    """Make the model's experts and transposed layers compute by `product`."""
    for module in model.modules():
        if type(module) is Conv1D:
            module.__class__ = FastConv1D
            module.product = product  # type: ignore[assignment]
        elif is_experts(module):
            resolve_name(MIXTURE)(module, product)
