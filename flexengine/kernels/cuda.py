"""Attention on a GPU: batched torch, no host synchronisation. A fused Triton kernel is to take `decode`'s place."""

import torch
from torch import Tensor

from flexengine.kernels import base
from flexengine.kernels.reference import ReferenceKernels

GATHERED = 2**26  # bytes of gathered K and V held at once


class CudaKernels(ReferenceKernels):
    """See base.Kernels. Page tables are trusted: checking them would make the GPU wait for the host at every layer."""

    name = "cuda"

    def append(self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor) -> None:
        base.check_append(k, v, pool, pages, offsets)
        page, offset = pages.long()[:, None], offsets.long()[:, None]
        head = torch.arange(pool.shape[2], device=pool.device)[None]
        pool[page, 0, head, offset] = k.to(pool.dtype)
        pool[page, 1, head, offset] = v.to(pool.dtype)

    def decode(
        self,
        q: Tensor,
        pool: Tensor,
        tables: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        base.check_decode(q, pool, tables, lengths)
        base.check_options(window, softcap, sinks, q.shape[1])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        one = tables.shape[1] * pool[0].numel() * max(pool.element_size(), 4)
        step = max(1, GATHERED // max(1, one))
        for at in range(0, q.shape[0], step):
            part = slice(at, at + step)
            out[part] = _decode(q[part], pool, tables[part], lengths[part], scale, window, softcap, sinks)
        return out


def _decode(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Gathers each sequence's pages side by side, padded to the longest, and masks what it must not see."""
    n, heads, dim = q.shape
    kv_heads = pool.shape[2]
    pages = pool[tables.long()].float()  # [n, pages, 2, kv_heads, page_tokens, dim]
    k, v = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [n, kv_heads, tokens, dim] each
    scores = q.float().reshape(n, kv_heads, heads // kv_heads, dim) @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at, end = torch.arange(k.shape[2], device=q.device), lengths[:, None]
    seen = at < end if window is None else (at < end) & (at >= end - window)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, -1, 1).expand(n, -1, -1, 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    # What lies beyond a sequence's end may be anything, NaN too, and 0 * NaN is NaN.
    out: Tensor = (weights @ v.masked_fill(~seen[:, None, :, None], 0.0)).reshape(n, heads, dim).to(q.dtype)
    return out
