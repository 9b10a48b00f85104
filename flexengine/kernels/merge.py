"""Merge of attention results over disjoint parts of a KV cache, which lie on different devices."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Return attention over the union of disjoint sets of keys and values, from the results over each set.

    Args:
        outs: [n, heads, head_dim] per set.
        lses: fp32 [n, heads] per set, logs of the denominators, see `with_lse` of Kernels.decode_attention; -inf for
            a set without keys, whose `outs` is ignored. Sinks may be part of one set's denominator only.

    Returns:
        [n, heads, head_dim] in the dtype of `outs`, summed in fp32. The log of the merged denominator is
        torch.logsumexp of `lses`.
    """
    logs = torch.stack(list(lses)).float()
    shares = torch.exp(logs - torch.logsumexp(logs, 0))[..., None]
    parts = torch.stack([out.float() for out in outs])
    return (parts.masked_fill(shares == 0, 0.0) * shares).sum(0).to(outs[0].dtype)
