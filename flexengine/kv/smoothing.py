"""Keys and values made easier to keep in few bits, at no cost in exactness.

Groups of a few bits suffer from the few elements of a head that stand far off. Two changes that attention cannot see
take these away:

* the mean of a sequence's keys, taken over its first piece, is subtracted from all of them: every score of a query
  shrinks by the same amount, which the softmax does not feel (SageAttention, arXiv 2410.02367, section 4.2). It
  would where scores pass a soft cap or compete with sinks; there the mean stays.
* queries and keys are multiplied by one orthogonal matrix, which leaves their products alone and spreads what stands
  off over all elements; so are values, and the output is turned back (QuaRot, arXiv 2404.00456, section 4).

With them each token is encoded by itself, when it comes. Groups along the tokens (KIVI) need as many bits for the
same loss, and the newest tokens of every sequence kept in full until a group of them is complete.
"""

import torch
from torch import Tensor

from flexengine import kernels


def rotation(dim: int) -> Tensor:
    """A symmetric orthogonal matrix [dim, dim], fp32: Hadamard's, as many times as the powers of two in dim allow."""
    size = dim & -dim
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    whole: Tensor = torch.block_diag(*[block / size**0.5] * (dim // size))  # type: ignore[no-untyped-call]
    return whole


def turned(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., dim] times the matrix, in x's dtype. Turned twice, it is what it was, up to rounding."""
    return kernels.load_for(x.device).linear(x.to(matrix.dtype), matrix).to(x.dtype)


def mean_key(keys: Tensor) -> Tensor:
    """keys: [tokens, kv_heads, dim] of one sequence. Returns fp32 [kv_heads, dim]."""
    return keys.float().mean(0)
