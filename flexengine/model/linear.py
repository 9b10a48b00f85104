"""Matrix products with weights in fp32 or in the 16 bits they are stored in, which take half the memory.

On a CPU a row's result is bitwise independent of the other rows in its batch: otherwise a resumed job, with other
batches, could generate other tokens. So the dtypes alone select the kernel, never a measurement or the number of rows.
The native kernel widens 16-bit weights to fp32, which is exact.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.codec.forms import Form
from flexengine.kernels.base import Compute
from flexengine.kernels.build import version
from flexengine.kernels.cpu import NativeKernels

# While active, torch functions do not call `products.Invariance`: a dozen calls take longer than all other work before
# a kernel starts.
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
            if form is not None:
                bias, kernel = None if bias is None else bias.float(), kernels.load_for(x.device)
                return kernel.product(x if kernel.narrow else x.float(), weight, form, bias, self.compute).to(x.dtype)
            if x.is_meta or (weight.dtype == x.dtype and (x.dtype != torch.float32 or x.device.type != "cpu")):
                return nn.functional.linear(x, weight.to(x.dtype), bias)
            return kernels.load().linear(x, weight, bias, self.rounding(weight), packed)

    def rounding(self, weight: Tensor) -> Literal["bf16"] | None:
        """Return the dtype that activations are rounded to before a product with this plain weight."""
        return "bf16" if weight.dtype == torch.bfloat16 and self.compute == "bf16" else None


class FastLinear(nn.Linear):
    """nn.Linear computed by a Product.

    Attributes:
        product: matrix product of the model.
        forms: format of each encoded parameter, by name.
        packed: whether the kernels have reordered the weight, see base.Kernels.pack.
    """

    product: Product
    forms: Mapping[str, Form] = {}
    packed = False

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias, self.forms.get("weight"), self.packed)


def use_fast_linear(model: nn.Module, product: Product) -> None:
    """Make the model's linear layers compute by `product`. Parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            fast = cast(FastLinear, module)
            fast.__class__ = FastLinear
            fast.product = product
