"""Products of batches of matrices whose results do not depend on the other matrices of a batch."""

import torch
from torch import Tensor, nn

from flexengine.model.linear import Product


def batched(product: Product, a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, such that a sequence's result is independent of the others, and a token's of the tokens beside it
    if a is a weight [out, in], as in Mamba 1, and b is [sequences, in, tokens]."""
    if isinstance(a, nn.Parameter) and (a.dim(), b.dim()) == (2, 3) and a.dtype == b.dtype == product.dtype:
        return product(b.transpose(1, 2).contiguous(), a).transpose(1, 2)
    return one_by_one(a, b)


def one_by_one(a: Tensor, b: Tensor, dim: int = 0) -> Tensor:
    """Return a @ b, [sequences, ..., rows, columns], such that a sequence's result is independent of the others. They
    are also cut where only one of both has several, as with weights.

    torch computes a batch of one matrix by other code than a batch of several, which rounds differently.
    """
    if a.dim() != b.dim() or dim == a.dim() - 2 or a.device.type != "cpu":
        return torch.matmul(a, b)
    sizes = a.shape[dim], b.shape[dim]
    if sizes[0] == sizes[1] and (dim > 0 or sizes[0] <= 1):
        return one_by_one(a, b, dim + 1)
    parts = (torch.split(x, 1, dim) if size > 1 else [x] * max(sizes) for x, size in zip((a, b), sizes, strict=True))
    return torch.cat([one_by_one(x, y, dim + 1) for x, y in zip(*parts, strict=True)], dim)
