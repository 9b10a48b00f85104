"""Group-wise codes, decoded by their formula, and the errors that it allows."""

import torch
from torch import Tensor

from flexengine.codec.packed import HALF, Groupwise


def decoded(groups: tuple[Tensor, Tensor, Tensor], columns: int) -> Tensor:
    """Return fp32 [rows, columns] of the codes, scales and minima of a matrix."""
    codes, scale, minimum = (x.float() for x in groups)
    values = minimum[..., None] + codes * scale[..., None]
    return values.flatten(1)[:, :columns]


def twice(codec: Groupwise, x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return a matrix after encoding and decoding."""
    return decoded(codec.encode(x, importance), x.shape[1])


def slack(codec: Groupwise, x: Tensor) -> Tensor:
    """Return the largest error of each element: half a step, plus what rounding scale and minimum to fp16 adds. Holds
    for codecs that do not fit the range."""
    bounds = []
    for group in x.float().split(codec.group, 1):
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        half = (low.abs() + 2 * (high - low)) * HALF.eps + 2 * HALF.smallest_normal
        bounds.append(((high - low) / codec.levels / 2 + half).expand(group.shape))
    return torch.cat(bounds, 1)
