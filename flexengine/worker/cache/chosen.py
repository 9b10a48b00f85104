"""Attention of tokens that see chosen keys only (model/adapters/sparse.py), over the pages of a KV cache.

The chosen K and V of each token are gathered to pages of its own, in the order of their positions, and decode attention
reads these. Tokens that see all keys are computed as always.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexengine.kernels.base import AttentionOptions, Kernels, Past, PromptCall
from flexengine.model.adapters.sparse import ChosenKeys, IndexPages, IndexPiece
from flexengine.worker.cache.tables import Tables

MOST_BYTES = 64 << 20  # of gathered K and V, unless those of a single token take more


def index_pages(pool: Tensor, tables: Tables, prompts: Sequence[int]) -> IndexPages:
    """Return where the sequences of a gpu_batch have keys of an indexer.

    Args:
        pool: pages of a layer, not encoded.
        prompts: `IndexPiece.prompt` of each piece.
    """
    each = zip(pieces_of(tables), prompts, strict=True)
    return IndexPages(pool, tuple(piece._replace(prompt=prompt) for piece, prompt in each))


def pieces_of(tables: Tables) -> Iterator[IndexPiece]:
    """Yield the pieces of a gpu_batch in packed order, without `prompt`."""
    for length, table in zip(tables.lengths.tolist(), tables.tables, strict=True):
        yield IndexPiece(1, length - 1, 0, table if length > 1 else None)
    for p in tables.prompts:
        yield from [IndexPiece(p.length, p.past, 0, p.table)] * p.rows


def tokens_at_once(pool: Tensor, keys: int) -> int:
    """Return the tokens of a layer whose K and V, of `keys` keys each, are gathered together. pool: pages of it."""
    return max(1, MOST_BYTES // (2 * keys * pool[0, 0, :, 0].nbytes))


def attend(
    kernels: Kernels,
    options: AttentionOptions,
    qkv: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    tables: Tables,
    choice: ChosenKeys,
) -> Tensor:
    """Append new K and V to pages, and return attention [1, tokens, heads, head_dim].

    Args:
        options: without a window.
        qkv: of the packed tokens, [tokens, heads or kv_heads, head_dim].
        pool: pages of the layer, not encoded.
        tables: of a group whose queries see all keys, so that all tokens are written.
        choice: of some of the tokens; the others see all keys.
    """
    (q, k, v), n = qkv, len(tables.lengths)
    kernels.append(k, v, pool, tables.pages, tables.offsets)
    out, top = q.new_empty(q.shape), choice.positions.shape[1]
    if n and len(few := (tables.lengths <= top).nonzero()[:, 0]):
        out[few] = kernels.decode_attention(q[few], pool, tables.tables[few], tables.lengths[few], options)
    calls = list[PromptCall]()
    for p in tables.prompts:
        past = None if p.table is None else Past(pool, p.table, p.past)
        for first in range(p.first, p.first + p.rows * p.length, p.length):
            if (count := min(p.length, top - p.past)) > 0:
                some = [x[first : first + count][None] for x in (q, k, v, out)]
                calls.append(PromptCall(some[0], some[1], some[2], some[3], past))
    if calls:
        kernels.attend_prompts(calls, options)
    places, counts = _places(pool, tables, choice), choice.counts
    most = tokens_at_once(pool, top)
    for tokens, chosen in zip(torch.split(choice.tokens, most), torch.split(places, most), strict=True):
        own = _gathered(pool, chosen.long())
        numbers = torch.arange(len(own), dtype=torch.int32, device=pool.device).view(len(tokens), -1)
        if counts is None:
            lengths = torch.full((len(tokens),), top, dtype=torch.int32, device=pool.device)
        else:
            lengths, counts = counts[: len(tokens)], counts[len(tokens) :]
        out[tokens] = kernels.decode_attention(q[tokens], own, numbers, lengths, options)
    return out[None]


def _places(pool: Tensor, tables: Tables, choice: ChosenKeys) -> Tensor:
    """Return where the keys that tokens chose are in the pool, as page * page_tokens + offset: int32 [n, top]."""
    size, first, at, pieces = pool.shape[3], 0, 0, [*pieces_of(tables)]
    written, offset = (tables.pages * size + tables.offsets).int(), torch.arange(size, device=pool.device).int()
    places, ends = torch.empty_like(choice.positions), [0]
    for piece in pieces:
        ends.append(ends[-1] + piece.tokens)
    counts = torch.searchsorted(choice.tokens.cpu(), torch.tensor(ends)).diff().tolist()
    for piece, count in zip(pieces, counts, strict=True):
        if count:
            before = written[:0]
            if piece.table is not None:
                before = (piece.table[:, None] * size + offset).flatten()[: piece.past]
            own = torch.cat([before, written[first : first + piece.tokens]])
            some = slice(at, at + count)
            torch.index_select(own, 0, choice.positions[some].flatten(), out=places[some].view(-1))
        at, first = at + count, first + piece.tokens
    return places


def _gathered(pool: Tensor, places: Tensor) -> Tensor:
    """Return K and V of tokens as pages of a pool of its own, in their order. places: int64 [n, top], as of `_places`;
    each row begins a page."""
    _, two, heads, size, dim = pool.shape
    places = torch.cat([places, places[:, -1:].expand(-1, -places.shape[1] % size)], 1).view(-1, 1, size)
    panels = torch.arange(two * heads, device=pool.device).view(1, -1, 1)
    rows = (places // size * (two * heads) + panels) * size + places % size
    return pool.view(-1, dim).index_select(0, rows.flatten()).view(-1, two, heads, size, dim)
