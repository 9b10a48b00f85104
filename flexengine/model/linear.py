"""Matrix products with weights in fp32 or in the 16 bits they are stored in, which take half the memory; activations.

On a CPU a row's result is bitwise independent of the other rows in its batch: otherwise a resumed job, with other
batches, could generate other tokens. torch's own products and activation functions do not guarantee this. So the dtypes
alone select the kernel, never a measurement or the number of rows. The native kernel widens 16-bit weights to fp32,
which is exact.
"""

import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from flexengine import kernels
from flexengine.codec.forms import Form
from flexengine.kernels.base import Compute
from flexengine.kernels.build import version
from flexengine.kernels.cpu import NativeKernels

# While active, no function calls `Invariance`: a dozen calls take longer than all other work before a kernel starts.
unwatched = torch._C.DisableTorchFunction


def numerics(device: torch.device | None = None) -> str:
    """Return a text that names the kernels, for a job's manifest: they determine the last bits of results. An example
    is "native 512 bits and bf16", followed by the version of the native kernels. device: None means a CPU."""
    kernel: Any = kernels.load_for(device or torch.device("cpu"))
    if device is not None and device.type == "cuda":
        return str(kernel.numerics())
    if not isinstance(kernel, NativeKernels):
        return f"onednn {torch.backends.cpu.get_cpu_capability()}, {kernel.name}"
    return f"{kernel.name} {kernel.simd} bits{' and bf16' if kernel.bf16 else ''}, {version()}"


class Product:
    """Function that computes x @ weight.T + bias for one model, with weights of any supported dtype.

    Attributes:
        dtype: dtype of activations. fp32 activations can be multiplied by 16-bit weights.
        compute: dtype that fp32 activations are rounded to before products with encoded weights or, if compute is
            "bf16", with bf16 weights; None for no rounding.
    """

    def __init__(self, dtype: torch.dtype, compute: Compute | None = None) -> None:
        self.dtype, self.compute = dtype, compute

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, form: Form | None = None, packed: bool = False
    ) -> Tensor:
        """Return x @ weight.T + bias in x's dtype.

        Args:
            form: format of an encoded weight.
            packed: whether a plain weight is reordered, see base.Kernels.pack.
        """
        if x.dtype != self.dtype:
            raise NotImplementedError(f"it computes a projection in {x.dtype}, although its dtype is {self.dtype}")
        with unwatched():
            if form is not None and not x.is_meta:  # in a trial pass, weights have the shapes of plain ones
                bias, kernel = None if bias is None else bias.float(), kernels.load_for(x.device)
                return kernel.product(x if kernel.narrow else x.float(), weight, form, bias, self.compute).to(x.dtype)
            if x.is_meta or (weight.dtype == x.dtype and (x.dtype != torch.float32 or x.device.type != "cpu")):
                return nn.functional.linear(x, weight.to(x.dtype), bias)
            return kernels.load().linear(x, weight, bias, self.rounding(weight), packed)

    def rounding(self, weight: Tensor) -> Literal["bf16"] | None:
        """Return the dtype that activations are rounded to before a product with this plain weight."""
        return "bf16" if weight.dtype == torch.bfloat16 and self.compute == "bf16" else None


class FastLinear(nn.Linear):
    """nn.Linear computed by a Product."""

    product: Product  # of the model
    forms: Mapping[str, Form] = {}  # of each encoded parameter, by name
    packed = False  # whether the kernels have reordered the weight, see base.Kernels.pack

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias, self.forms.get("weight"), self.packed)


class FastConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [in, out], computed by a Product."""

    product: Product
    forms: Mapping[str, Form] = {}
    packed = False

    def forward(self, x: Tensor) -> Tensor:
        form = self.forms.get("weight")
        return self.product(x, self.weight.t() if form is None else self.weight, self.bias, form)


READS = {"by_rows", "block"}  # attributes of experts that are read when they are chosen


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` is a mixture of experts whose implementation can be chosen in transformers."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def use_product(model: nn.Module, product: Product) -> None:
    """Make the model's linear layers and experts compute by `product`. Parameters and their names stay."""
    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):
            module.__class__ = FastLinear if type(module) is nn.Linear else FastConv1D
            module.product = product  # type: ignore[assignment]
        elif getattr(module, "uses_product", False):  # of an adapter
            module.product = product  # type: ignore[assignment]
        elif is_experts(module):  # the code is imported for models with mixtures of experts
            module.product = product  # type: ignore[assignment]
            cast(Any, module.config)._experts_implementation_internal = resolve_name("flexengine.model.experts:EXPERTS")


_VECTOR = 32  # elements of torch's unrolled vector loop
# torch uses one thread per _GRAIN elements, but all threads for gelu of _GELU elements or more.
_GRAIN, _GELU = 32768, 16384
_F = nn.functional
_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_UNSTEADY = {_F.silu, _F.gelu, _F.sigmoid, _F.mish, _F.softplus, _F.elu, torch.sigmoid, Tensor.sigmoid}


def steady(function: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return function(x), elementwise, such that a value's result is independent of its position in the tensor.

    torch computes elements that do not fill a vector by other code, which rounds differently. So the tensor is padded
    to fill all vectors, and so that every thread gets whole vectors.
    """
    count = size = x.numel()
    if x.device.type == "cpu" and count:
        threads = torch.get_num_threads()
        while True:
            unit = _VECTOR * math.lcm(min(threads, -(-size // _GRAIN)), threads if size >= _GELU else 1)
            if size % unit == 0:
                break
            size = -(-size // unit) * unit
    if size == count and (x.is_contiguous() or x.device.type != "cpu"):
        return cast(Tensor, function(x, *args, **kwargs))
    whole = x.new_zeros(size)
    whole[:count].view(x.shape).copy_(x)
    return cast(Tensor, function(whole, *args, **kwargs)[:count].view(x.shape))


class Invariance(TorchFunctionMode):
    """Torch function mode that makes a token's results independent of the other tokens in its batch.

    functional.linear (routers) goes through a Product, activations through `steady`, batched products by `batched`.
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
        if func in _MATMUL and not kwargs:
            a, b = args
            if math.prod(a.shape[:-2] + b.shape[:-2]) != 1 or a.dim() < b.dim():
                return resolve_name("flexengine.model.batched:batched")(self.product, a, b)
        return func(*args, **(kwargs or {}))
