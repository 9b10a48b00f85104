"""Native products with encoded weights, and their rows, as kernels of formats."""

from typing import Any

import torch
from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.kernels.base import Compute, FormatKernels


def _encoded_product(
    kernels: Any, x: Tensor, weight: Tensor, form: Form, bias: Tensor | None, compute: Compute | None
) -> Tensor | None:
    if not form.in_steps:
        return None
    steps = kernels.steps()
    out: Tensor = steps.product(x, weight, form, bias, compute)
    steps.run()
    return out


def _encoded_rows(kernels: Any, weight: Tensor, form: Form, ids: Tensor) -> Tensor:
    if not form.in_steps or form.layout is not None:
        decoded: Tensor = kernels.plain.encoded_rows(weight, form, ids)
        return decoded
    out = torch.empty(len(ids), form.columns, dtype=torch.float32, device="cpu")
    sizes = (form.columns, form.group, form.native, out.data_ptr(), torch.get_num_threads())
    kernels.decode_rows(weight.data_ptr(), ids.data_ptr(), len(ids), *sizes)
    return out


ENCODED = FormatKernels(_encoded_product, _encoded_rows)
