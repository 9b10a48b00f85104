"""Tensors that the native kernels read."""

import torch
from torch import Tensor

from flexengine.errors import InvalidInput
from flexengine.kernels.structs import CODES


def is_native(*tensors: Tensor) -> bool:
    """Return whether all tensors are on the CPU, and floats have a dtype that the library supports."""
    return all(x.device.type == "cpu" and (x.dtype in CODES or not x.dtype.is_floating_point) for x in tensors)


def is_fp32(*tensors: Tensor) -> bool:
    """Return whether all tensors are on the CPU, in fp32."""
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)


def in_rows(x: Tensor) -> Tensor:
    """Return x, copied unless its rows have a stride of 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous(bias: Tensor | None) -> Tensor | None:
    """Return a contiguous bias; None for none."""
    return None if bias is None else bias.contiguous()


def int32(x: Tensor) -> Tensor:
    """Return x, contiguous. Raise InvalidInput unless it is int32."""
    if x.dtype != torch.int32:
        raise InvalidInput(f"page tables, offsets and lengths are int32, not {x.dtype}")
    return x.contiguous()
