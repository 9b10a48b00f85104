"""Native kernels of the format of codec.packed."""

import torch
from torch import Tensor

from flexengine.codec.packed import Packed
from flexengine.kernels.base import Compute
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.formats import FormatKernels


def product(
    kernels: NativeKernels, x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None, compute: Compute | None
) -> Tensor:
    """Return x @ weight.T + bias; see `Kernels.product`."""
    steps = kernels.steps()
    out = steps.product(x, weight, form, bias, compute)
    steps.run()
    return out


def rows(kernels: NativeKernels, weight: Tensor, form: Packed, ids: Tensor) -> Tensor:
    """Return dequantized rows; see `Kernels.encoded_rows`."""
    out = torch.empty(len(ids), form.columns, dtype=torch.float32, device="cpu")
    sizes = (form.columns, form.codec.group, form.codec.bits, out.data_ptr(), torch.get_num_threads())
    kernels.decode_rows(weight.data_ptr(), ids.data_ptr(), len(ids), *sizes)
    return out


KERNELS = FormatKernels(product, rows)
