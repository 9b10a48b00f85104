"""Kernels that read the bytes of a format of weights themselves. For other formats, rows are decoded in torch first."""

from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import NamedTuple

from torch import Tensor

from flexengine.codec.forms import Form


class FormatKernels(NamedTuple):
    """Kernels of one format on one kind of device. Arguments are checked, and the columns of x and ids contiguous."""

    # product(kernels, x [M, columns], weight, form, bias, compute) returns what `Kernels.product` does, or None for an
    # x whose dtype or number of rows it does not support; rows are then decoded in torch.
    product: Callable[..., Tensor | None]
    # rows(kernels, weight, form, ids) returns what `Kernels.encoded_rows` does; None decodes in torch.
    rows: Callable[..., Tensor] | None = None


# "module:object" of FormatKernels by "module:class" of the format and device; imported when they are first needed.
KERNELS = {
    ("flexengine.codec.packed:Packed", "cpu"): "flexengine.kernels.steps:PACKED",
    ("flexengine.codec.packed:Packed", "cuda"): "flexengine.kernels.triton_codes:KERNELS",
}


@cache
def kernels_of(kind: type[Form], device: str) -> FormatKernels | None:
    """Return the kernels of a kind of format on a device, cpu or cuda; None if there are none."""
    path = KERNELS.get((f"{kind.__module__}:{kind.__qualname__}", device))
    kernels: FormatKernels | None = None if path is None else resolve_name(path)
    return kernels
