"""Argument structs of the native kernels that write to, or read, a paged KV cache. Arguments are not checked."""

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels import structs
from flexengine.kernels.base import Room
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


def stored(pool: Tensor, form: CacheFormat | None) -> int:
    """Return the code of a pool's format: enum Dtype of simd.h for floats, enum Codes of codes.h if encoded."""
    return CODES[pool.dtype] if form is None else form.bits * 16
