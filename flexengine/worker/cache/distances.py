"""Attention whose scores get a number for each distance (model/adapters/inkling.py), over the pages of a KV cache.

It is plain torch, for each sequence alone, so its results do not depend on the other sequences of a gpu_batch.
"""

import torch
from torch import Tensor

from flexengine.kernels.base import AttentionOptions, Kernels
from flexengine.model.adapters.inkling import ByDistance
from flexengine.plan.records import ADDED, ADDED_COPIES
from flexengine.worker.cache.chosen import pieces_of
from flexengine.worker.cache.tables import Tables


def attend(
    kernels: Kernels,
    options: AttentionOptions,
    qkv: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    tables: Tables,
    added: ByDistance,
) -> Tensor:
    """Append new K and V to pages, and return attention [1, tokens, heads, head_dim].

    Args:
        qkv: of the packed tokens, [tokens, heads or kv_heads, head_dim].
        pool: pages of the layer, not encoded.
        added: of all tokens.
    """
    (q, k, v), n, first = qkv, len(tables.lengths), 0
    out, window = q.new_empty(q.shape), options.window
    for count, past, _, table in pieces_of(tables):
        new, low = slice(first, first + count), 0 if window is None else max(0, past - window + 1)
        before = (k[:0], v[:0]) if table is None else _cached(pool, table, low, past)
        keys, values = (torch.cat([x, y[new]]).to(q.dtype) for x, y in zip(before, (k, v), strict=True))
        step = max(1, ADDED // (ADDED_COPIES * 4 * (q.shape[1] * len(keys) + added.elements)))
        for low_query in range(first, first + count, step):
            some = slice(low_query, min(low_query + step, first + count))
            at = past + torch.arange(some.start - first, some.stop - first, device=q.device)
            distance = at[:, None] - torch.arange(low, low + len(keys), device=q.device)
            out[some] = _scored(q[some], keys, values, distance, added.states[some], added.profiles, options)
        first += count
    if n:
        kernels.append(k[:n], v[:n], pool, tables.pages[:n], tables.offsets[:n])
    if n < len(k):  # they may overwrite pages that queries see
        k, v = (x[n:] if tables.kept is None else x[tables.kept] for x in (k, v))
        kernels.append(k, v, pool, tables.pages[n:], tables.offsets[n:])
    return out[None]


def _cached(pool: Tensor, table: Tensor, low: int, past: int) -> tuple[Tensor, Tensor]:
    """Return K and V of the tokens `low` to `past` - 1 of a sequence, [tokens, kv_heads, head_dim]."""
    size = pool.shape[3]
    pages = pool[table[low // size : -(-past // size)].long()]  # [pages, 2, kv_heads, size, head_dim]
    k, v = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, low % size :][:, : past - low]
    return k, v


def _scored(
    q: Tensor, k: Tensor, v: Tensor, distance: Tensor, states: Tensor, profiles: Tensor, options: AttentionOptions
) -> Tensor:
    """Return attention [queries, heads, head_dim] of some queries. distance: int64 [queries, keys], of their positions.
    Other arguments: of these queries, as in `attend`."""
    count, heads, dim = q.shape
    kv_heads, extent = k.shape[1], profiles.shape[1]
    numbers = torch.nn.functional.pad((states.to(profiles.dtype) @ profiles).float(), (0, 1))  # 0 beyond the extent
    place = torch.where(distance < 0, extent, distance.clamp(max=extent))
    grouped = q.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).view(heads, count, -1).float() * options.scale
    scores += numbers.gather(-1, place[:, None].expand(-1, heads, -1)).transpose(0, 1)
    hidden = distance < 0 if options.window is None else (distance < 0) | (distance >= options.window)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.bmm(weights.view(kv_heads, -1, weights.shape[-1]), v.transpose(0, 1))
    return out.view(heads, count, dim).transpose(0, 1)
