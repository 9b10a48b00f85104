"""Which fp32 matrix product this CPU runs faster: MKL's (torch's default) or oneDNN's, measured once per process.

Measured on two machines (2048 x 8192 at 16 / 512 rows): AMD Zen 5: MKL 91 / 208, oneDNN 218 / 467 GFLOP/s. MKL takes
slower paths on other vendors' CPUs, so the choice cannot be a constant.
"""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias through oneDNN; x `[..., in]`, weight `[out, in]`."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return nn.functional.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class OneDnnLinear(nn.Linear):
    """nn.Linear whose product oneDNN computes."""

    def forward(self, input: Tensor) -> Tensor:
        return onednn_linear(input, self.weight, self.bias)


@functools.cache
def fast_linear() -> Linear:
    """The faster of the two on a middling shape."""
    x, weight = torch.randn(64, 1024), torch.randn(1024, 1024)
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


def use_fast_linear(model: nn.Module) -> None:
    """Gives the model's linear layers the faster product; their parameters and names stay."""
    if fast_linear() is not onednn_linear:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear
