"""Matrix products with weights held in fp32 or, half as large, in the 16 bits they were stored in.

Which fp32 product a CPU runs faster, MKL's (torch's default) or oneDNN's, is measured once per process: MKL takes
slower paths on other vendors' CPUs. On AMD Zen 5 (2048 x 8192, 16 / 512 rows) MKL does 91 / 208, oneDNN 218 / 467
GFLOP/s.

A 16-bit weight is widened to fp32 on the way, which is exact. For few rows the native kernel does so in registers: it
reads half the bytes, so it beats oneDNN on fp32 weights (290 against 240 GFLOP/s at 32 rows, 37 against 18 at one). For
many rows the weight is widened into a buffer first, which costs little beside the product.
"""

import functools
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from flexengine import kernels

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
FEW = 160  # rows up to which the native kernel is faster than widening first (at 128: 256-330 against 160-360 GFLOP/s)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias through oneDNN; x `[..., in]`, weight `[out, in]`."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return nn.functional.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@functools.cache
def fast_linear() -> Linear:
    """The faster of the two on a middling shape."""
    x, weight = torch.randn(64, 1024, dtype=torch.float32), torch.randn(1024, 1024, dtype=torch.float32)
    try:
        times = {f: _seconds(f, x, weight) for f in (nn.functional.linear, onednn_linear)}
    except (RuntimeError, AttributeError):  # a torch built without oneDNN
        return nn.functional.linear
    return min(times, key=lambda f: times[f])


def _seconds(function: Linear, x: Tensor, weight: Tensor) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        function(x, weight, None)
        best = min(best, time.perf_counter() - began)
    return best


class Product:
    """x @ weight.T + bias for one model, whatever dtype its weights are held in.

    dtype: that of activations. wide: uint8 buffer that weights are widened in, at least a row of the widest; whoever
    binds 16-bit weights sets it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != self.dtype:
            raise NotImplementedError(f"it computes a projection in {x.dtype}, not in {self.dtype} as it was told to")
        if weight.dtype == x.dtype:
            return fast_linear()(x, weight, bias)
        if x.is_meta:
            return nn.functional.linear(x, weight.to(x.dtype), bias)
        if x.numel() <= FEW * x.shape[-1] and kernels.load().fuses(x.shape[-1]):
            return kernels.load().linear(x, weight, bias)
        return self._widened(x, weight, bias)

    def _widened(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, columns = weight.shape
        assert self.wide is not None
        step = min(rows, max(1, self.wide.numel() // (columns * 4)))
        buffer = self.wide[: step * columns * 4].view(torch.float32)
        out: Tensor | None = None
        for low in range(0, rows, step):
            part = weight[low : low + step]
            widened = buffer[: part.numel()]
            kernels.load().convert(part.view(-1), widened, torch.get_num_threads())
            product = fast_linear()(x, widened.view(part.shape), None if bias is None else bias[low : low + step])
            if step == rows:
                return product
            out = x.new_empty((*x.shape[:-1], rows)) if out is None else out
            out[..., low : low + step] = product
        assert out is not None
        return out


class FastLinear(nn.Linear):
    """nn.Linear computed by a Product."""

    product: Product

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)


def use_fast_linear(model: nn.Module, product: Product) -> None:
    """Gives the model's linear layers `product`; their parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            fast = cast(FastLinear, module)
            fast.__class__ = FastLinear
            fast.product = product
