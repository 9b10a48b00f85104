"""Attention over the last tokens, and over entries that stand for many (model/adapters/deepseek_v4.py), in pages.

What each token sees is gathered to pages of its own, and decode attention reads these.
"""

import torch
from torch import Tensor

from flexengine.kernels.base import AttentionOptions, Kernels
from flexengine.model.adapters.deepseek_v4 import Compressed
from flexengine.worker.cache.chosen import pieces_of, tokens_at_once
from flexengine.worker.cache.tables import Tables


def attend(
    kernels: Kernels,
    options: AttentionOptions,
    qkv: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    tables: Tables,
    choice: Compressed,
) -> Tensor:
    """Append new keys and entries to pages, and return attention [1, tokens, heads, head_dim]. Arguments as in
    `chosen.attend`; keys are values, and `v` has the entries."""
    (q, k, v), (_, _, _, size, dim) = qkv, pool.shape
    kernels.append(k, v, pool, tables.pages, tables.offsets)
    written, offset = tables.pages.long() * size + tables.offsets, torch.arange(size, device=pool.device)
    out, first = torch.empty_like(q), 0
    most = choice.positions.shape[1]
    step = tokens_at_once(pool, most)
    for piece in pieces_of(tables):
        before = written[:0]
        if piece.table is not None:
            before = (piece.table.long()[:, None] * size + offset).flatten()[: piece.past]
        places = torch.cat([before, written[first : first + piece.tokens]])
        for low in range(first, first + piece.tokens, step):
            tokens = slice(low, min(low + step, first + piece.tokens))
            rows = choice.positions[tokens].long()
            rows = torch.cat([rows, rows[:, -1:].expand(-1, -most % size)], 1)
            at, half = places[rows // 2], rows % 2
            numbers = ((2 * (at // size) + half) * size + at % size).view(-1, 1, size).expand(-1, 2, -1)
            own = pool.view(-1, dim).index_select(0, numbers.flatten()).view(-1, 2, 1, size, dim)
            table = torch.arange(len(own), dtype=torch.int32, device=pool.device).view(len(rows), -1)
            out[tokens] = kernels.decode_attention(q[tokens], own, table, choice.counts[tokens], options)
        first += piece.tokens
    return out[None]
