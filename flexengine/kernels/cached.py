"""Argument structs of the native kernels that write to, or read, a paged KV cache. Arguments are not checked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels import structs
from flexengine.kernels.base import PromptCall
from flexengine.kernels.operands import int32
from flexengine.kernels.paged import PagedAttention, PromptPieces, Room
from flexengine.kernels.structs import CODES


def append_call(
    k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None, room: Room
) -> structs.AppendArgs:
    """Return the arguments of base.Kernels.append. k, v: with a stride of 1 along a row."""
    return structs.AppendArgs(
        *(x.data_ptr() for x in (k, v, pool, pages, offsets)),
        *(k.shape[0], *room, 0 if form is None else form.group),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(CODES[k.dtype], stored(pool, form), torch.get_num_threads()),
    )


class DecodeOptions(NamedTuple):
    """Numbers of base.Kernels.decode_attention; see there."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    topk: float | None = None


def decode_call(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, form: CacheFormat | None, room: Room,
    options: DecodeOptions, **tensors: Tensor | None,
) -> structs.DecodeArgs:  # fmt: skip
    """Return the arguments of base.Kernels.decode_attention.

    Args:
        q: with a stride of 1 along a row.
        pool, tables, lengths, form: as there.
        room: sizes of the pool.
        options: numbers.
        tensors: out, sinks, lse, chosen and memory of struct Decode.
    """
    given = {"q": q, "pool": pool, "tables": tables, "lengths": lengths, **tensors}
    addresses = {name: None if x is None else x.data_ptr() for name, x in given.items()}
    return structs.DecodeArgs(
        n=q.shape[0], heads=q.shape[1], pages=room.pages, kv_heads=room.kv_heads, page_tokens=room.page_tokens,
        dim=room.dim, group=0 if form is None else form.group, max_pages=tables.shape[1], q_row=q.stride(0),
        q_head=q.stride(1), window=options.window or 0, topk=1.0 if options.topk is None else options.topk,
        scale=options.scale, softcap=options.softcap or 0.0, q_dtype=CODES[q.dtype], pool_dtype=stored(pool, form),
        threads=torch.get_num_threads(), **addresses,
    )  # fmt: skip


def prompt_call(
    prompt: PromptCall, room: Room | None, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> structs.PromptArgs:  # fmt: skip
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
    return structs.PromptArgs(
        *(None if x is None else x.data_ptr() for x in (q, k, v, sinks, out)),
        *addresses,
        *(batch, queries, keys, heads, kv_heads, dim, window or 0, *cached),
        *(x.stride(i) for x in (q, k, v) for i in range(3)),
        *(scale, softcap or 0.0, code, torch.get_num_threads()),
    )


def batch_call(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, to: PagedAttention, scale: float, softcap: float | None,
    memory: Tensor | None,
) -> structs.BatchArgs:  # fmt: skip
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
    return structs.BatchArgs(
        *addresses, len(to.pieces), q.shape[1], to.room.kv_heads, to.room.dim, to.window or 0,
        *(to.room.pages, to.room.page_tokens, 0 if to.form is None else to.form.group),
        *(x.stride(i) for x in (q, k, v) for i in range(2)),
        *(scale, softcap or 0.0, stored(to.pool, to.form), torch.get_num_threads()),
    )  # fmt: skip


def pieces_of(prompts: Sequence[PromptPieces]) -> tuple[Tensor | None, Tensor]:
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
