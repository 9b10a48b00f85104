"""Products with matrices whose rows have several formats (codec/mixed.py): one product for each of them."""

import torch
from torch import Tensor

from flexengine.codec.mixed import Mixed
from flexengine.kernels import base


def _product(
    kernels: base.Kernels, x: Tensor, weight: Tensor, form: Mixed, bias: Tensor | None, compute: base.Compute | None
) -> Tensor:
    products = [
        kernels.product(x, data, part, None if bias is None else bias[row : row + part.rows], compute)
        for row, part, data in form.apart(weight)
    ]
    return torch.cat(products, dim=-1)


KERNELS = base.FormatKernels(_product)
