"""Kernels that read the bytes of a format of weights themselves. For other formats, rows are decoded in torch first."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.codec.packed import Packed


class FormatKernels(NamedTuple):
    """Kernels of one format on one kind of device. Arguments are checked, and the columns of x and ids contiguous.

    Attributes:
        product: product(kernels, x [M, columns], weight, form, bias, compute) returns what `Kernels.product` does, or
            None for an x whose dtype or number of rows it does not support; rows are then decoded in torch.
        rows: rows(kernels, weight, form, ids) returns what `Kernels.encoded_rows` does; None decodes in torch.
    """

    product: Callable[..., Tensor | None]
    rows: Callable[..., Tensor] | None = None


# "module:object" of FormatKernels by "module:class" of the format and device; imported when they are first needed.
KERNELS = {
    ("flexengine.codec.packed:Packed", "cpu"): "flexengine.kernels.packed_cpu:KERNELS",
    ("flexengine.codec.packed:Packed", "cuda"): "flexengine.kernels.triton_codes:KERNELS",
}


def kernels_of(form: Form, device: str) -> FormatKernels | None:
    """Return the kernels of a format on a device, cpu or cuda; None if there are none."""
    return _kernels_of(type(form), device)


def in_steps(form: Form | None) -> bool:
    """Return whether `Steps.product` multiplies by weights of a format; None stands for plain weights."""
    return form is None or isinstance(form, Packed)


@cache
def _kernels_of(kind: type[Any], device: str) -> FormatKernels | None:
    path = KERNELS.get((f"{kind.__module__}:{kind.__qualname__}", device))
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    kernels: FormatKernels = getattr(import_module(module), attribute)
    return kernels
