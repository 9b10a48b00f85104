"""Matrix products with weights held in fp32 or, half as large, in the 16 bits they were stored in.

On a CPU a row's result does not depend on the rows it shares a batch with, to the last bit: else a job that is resumed
with other batches could end in other words. So what computes is decided by the dtypes alone, never by a measurement or
by the number of rows. The native kernel widens 16-bit weights to fp32 on the way, which is exact.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.codec.packed import Packed
from flexengine.kernels.base import Compute
from flexengine.kernels.build import version
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.reference import linear_fp32

# While active, functions of torch do not ask `products.Invariance`: a dozen questions take longer than all else that
# comes before a kernel computes.
unwatched = torch._C.DisableTorchFunction


def numerics(device: torch.device | None = None) -> str:
    """What decides the last bits of a device's results here, for a job's manifest: "onednn AVX512, native 512 bits" and
    which version of them. None: of a CPU's."""
    found = kernels.load_for(device or torch.device("cpu"))
    if isinstance(found, kernels.CudaKernels):
        return found.numerics()
    library = f"onednn {torch.backends.cpu.get_cpu_capability()}"
    if not isinstance(found, NativeKernels):
        return f"{library}, {found.name}"
    return f"{library}, {found.name} {found.simd} bits{' and bf16' if found.bf16 else ''}, {version()}"


class Product:
    """x @ weight.T + bias for one model, whatever dtype its weights are held in.

    dtype: that of activations. 16-bit weights may also meet fp32 activations. compute: what fp32 activations are
    rounded to where they meet encoded weights or, for bf16, those kept in bf16.
    """

    def __init__(self, dtype: torch.dtype, compute: Compute | None = None) -> None:
        self.dtype, self.compute = dtype, compute

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, form: Packed | None = None) -> Tensor:
        """form: how the weight lies in its bytes, if it is encoded."""
        if x.dtype != self.dtype:
            raise NotImplementedError(f"it computes a projection in {x.dtype}, not in {self.dtype} as it was told to")
        with unwatched():
            if form is not None:
                bias, found = None if bias is None else bias.float(), kernels.load_for(x.device)
                return found.product(x if found.narrow else x.float(), weight, form, bias, self.compute).to(x.dtype)
            if x.is_meta or weight.dtype == x.dtype != torch.float32:
                return nn.functional.linear(x, weight.to(x.dtype), bias)
            if weight.dtype == x.dtype:
                return linear_fp32(x, weight, bias)
            rounds = weight.dtype == torch.bfloat16 and self.compute == "bf16"
            return kernels.load().linear(x, weight, bias, "bf16" if rounds else None)


class FastLinear(nn.Linear):
    """nn.Linear computed by a Product. forms: by parameter, how it is encoded."""

    product: Product
    forms: Mapping[str, Packed] = {}

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias, self.forms.get("weight"))


def use_fast_linear(model: nn.Module, product: Product) -> None:
    """Gives the model's linear layers `product`; their parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            fast = cast(FastLinear, module)
            fast.__class__ = FastLinear
            fast.product = product
