"""Attention as a dense softmax in float64."""

import torch
from torch import Tensor


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window=None, softcap=None, sinks=None) -> Tensor:
    """q [T, heads, d] at the last T positions of k, v [S, kv_heads, d], one score at a time in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        last = k.shape[0] - q.shape[0] + t
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(q.shape[1]):
            keys, values = k[first : last + 1, h // group].double(), v[first : last + 1, h // group].double()
            scores = (keys * q[t, h].double()).sum(1) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            total = weights.sum() + (0 if sinks is None else torch.exp(sinks[h].double() - scores.max()))
            out[t, h] = (weights[:, None] * values).sum(0) / total
    return out
