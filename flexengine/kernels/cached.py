"""Argument structs of the native kernels that write to, or read, a paged KV cache. Arguments are not checked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels import structs
from flexengine.kernels.base import PromptCall
from flexengine.kernels.operands import int32
from flexengine.kernels.paged import PagedAttention, Prompts, Room
from flexengine.kernels.structs import CODES


def append_call(
    k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None, room: Room
) -> structs.Append:
    """Return the arguments of base.Kernels.append. k, v: with a stride of 1 along a row."""
    return structs.Append(
        *(x.data_ptr() for x in (k, v, pool, pages, offsets)),
        *(k.shape[0], *room, 0 if form is None else form.group),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(CODES[k.dtype], stored(pool, form), torch.get_num_threads()),
    )


def decode_call(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, form: CacheFormat | None, room: Room,
    options: tuple[int, float, float, float], others: tuple[Tensor | None, ...],
) -> structs.Decode:  # fmt: skip
    """Return the arguments of base.Kernels.decode_attention.

    Args:
        q: with a stride of 1 along a row.
        pool, tables, lengths, form: as there.
        room: sizes of the pool.
        options: (window, topk, scale, softcap).
        others: (out, sinks, lse, chosen, memory).
    """
    out, *rest = (None if x is None else x.data_ptr() for x in others)
    return structs.Decode(
        *(q.data_ptr(), out, *(x.data_ptr() for x in (pool, tables, lengths)), *rest),
        *(*q.shape[:2], *room, 0 if form is None else form.group, tables.shape[1]),
        *(q.stride(0), q.stride(1), *options),
        *(CODES[q.dtype], stored(pool, form), torch.get_num_threads()),
    )


def prompt_call(
    prompt: PromptCall, room: Room | None, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> structs.Prompt:  # fmt: skip
    """Return the arguments of base.Kernels.attend_prompt. q, k, v: fp32, with a stride of 1 along a row. room: sizes of
    the pool of cached tokens; None if there are none."""
    q, k, v, out, past = prompt
    cached: tuple[int, ...] = (0, 0, 1, 0)
    addresses: tuple[int | None, int | None] = (None, None)
    code = 0
    if past is not None and room is not None:
        cached = (past.length, room.pages, room.page_tokens, 0 if past.form is None else past.form.group)
        addresses, code = (past.pool.data_ptr(), past.table.data_ptr()), stored(past.pool, past.form)
    (batch, queries, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
    return structs.Prompt(
        *(None if x is None else x.data_ptr() for x in (q, k, v, sinks, out)), *addresses,
        *(batch, queries, keys, heads, kv_heads, dim, window or 0, *cached),
        *(x.stride(i) for x in (q, k, v) for i in range(3)),
        *(scale, softcap or 0.0, code, torch.get_num_threads()),
    )  # fmt: skip


def batch_call(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, to: PagedAttention, scale: float, softcap: float | None,
    memory: Tensor | None,
) -> structs.Batch:  # fmt: skip
    """Return the arguments of the attention of prompts.

    Args:
        q, k, v: of all tokens, [tokens, heads, head_dim], with a stride of 1 along a row.
        out: receives the result, [tokens, heads, head_dim], contiguous; None to ask for the size of the memory.
        to: what else the call reads.
        scale, softcap: as in base.Kernels.decode_attention.
        memory: scratch memory; None to ask for its size.
    """
    assert to.pieces is not None
    addresses = (None if x is None else x.data_ptr() for x in (q, k, v, out, to.pool, to.pieces, to.entries, memory))
    return structs.Batch(
        *addresses, len(to.pieces), q.shape[1], to.room.kv_heads, to.room.dim, to.window or 0,
        *(to.room.pages, to.room.page_tokens, 0 if to.form is None else to.form.group),
        *(x.stride(i) for x in (q, k, v) for i in range(2)),
        *(scale, softcap or 0.0, stored(to.pool, to.form), torch.get_num_threads()),
    )  # fmt: skip


def pieces_of(prompts: Sequence[Prompts]) -> tuple[Tensor | None, Tensor]:
    """Return `PagedAttention.pieces` and `PagedAttention.entries`."""
    tables = [int32(p.table) for p in prompts if p.table is not None]
    # At least one entry, as a recorded call needs the address, also if its first prompts have no cached tokens.
    entries = torch.cat(tables) if tables else torch.zeros(1, dtype=torch.int32)
    if not prompts:
        return None, entries
    rows, at = list[list[int]](), 0
    for p in prompts:
        rows.append([p.first, p.rows, p.length, p.past, at])
        at += 0 if p.table is None else len(p.table)
    return torch.tensor(rows), entries


def stored(pool: Tensor, form: CacheFormat | None) -> int:
    """Return the code of a pool's format: enum Dtype of simd.h for floats, enum Codes of codes.h if encoded."""
    return CODES[pool.dtype] if form is None else form.bits * 16
