"""Attention over a cache that lies in several places: each computes its part, and the parts are joined here."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """The attention over the union of disjoint sets of keys and values, from that over each.

    outs: [n, heads, head_dim] each; lses: fp32 [n, heads] each, the logs of the softmaxes' denominators, as
        Kernels.decode returns them with_lse. -inf: no keys at all; such a part's result is not looked at. Sinks may
        join one of the parts only. The merged log is torch.logsumexp of them.
    Returns [n, heads, head_dim] in the parts' dtype, summed in fp32.
    """
    logs = torch.stack(list(lses)).float()
    shares = torch.exp(logs - torch.logsumexp(logs, 0))[..., None]
    parts = torch.stack([out.float() for out in outs])
    return (parts.masked_fill(shares == 0, 0.0) * shares).sum(0).to(outs[0].dtype)
