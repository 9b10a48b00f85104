"""Kernels for a GPU, in Triton if it works there, else in batched torch. Neither synchronises with the host."""

import functools
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn

from flexengine.activity import message
from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import Form
from flexengine.codec.records import RecordForm
from flexengine.kernels import base, checks
from flexengine.kernels.base import AttentionOptions, kernels_of
from flexengine.kernels.onednn import linear_fp32
from flexengine.kernels.paged import Room
from flexengine.kernels.reference import ReferenceKernels, capped, decoded_parts, denominator, read, to_multiply, write

# Limit in bytes of a kernel's scratch memory, without arguments, result and 8-bit codes of x. A kernel takes more only
# if one row, or one sequence, needs more. plan.sizes reserves the same amount.
BUFFER = 2**26
GATHERED = 32  # bytes of scratch per element of K and V that is gathered: six fp32 copies and 8 bytes of codes
ENCODED = 48  # bytes of scratch per element that is encoded: the copies that a fit makes
# Bytes of scratch per element of x that is multiplied in fp32: of one that is rounded before, and of any other.
MULTIPLIED, WIDENED_ROW = 32, 4


class CudaKernels(ReferenceKernels):
    """Kernels for a GPU, see base.Kernels. Page tables are not checked, as a check would stall the GPU in every layer.
    fused: use the Triton kernels where they apply, on a GPU or, with TRITON_INTERPRET=1, on a CPU."""

    name = "cuda"
    narrow = True

    def __init__(self, fused: bool = True) -> None:
        self._fused = fused

    def numerics(self) -> str:
        """Return a text that names the implementation, which determines the last bits of results."""
        fused = self._triton("cuda")
        return "cuda, torch alone" if fused is None else f"cuda, triton {fused.version()}"

    def _triton(self, kind: str) -> ModuleType | None:
        return triton_module(kind) if self._fused else None

    def fuses_groups(self, q: Tensor) -> bool:
        return not q.is_cuda or (q.dtype != torch.float32 and is_ampere(q))

    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None = None
    ) -> None:
        room = checks.check_append(k, v, pool, pages, offsets, form)
        step = len(k) if form is None else max(1, BUFFER // (ENCODED * room.kv_heads * room.dim))
        for some in _slices(len(k), step):
            write(k[some], v[some], pool, pages[some], offsets[some], form)

    def decode_attention(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        room = checks.check_decode(q, pool, tables, lengths, options, form, lse)
        if options.topk is None and len(q) and (fused := self._triton(q.device.type)):
            tile = fused.tiles(room, q.shape[1], form, q.dtype, pool.dtype)
            if tile is not None:
                attended: Tensor = fused.decode_attention(q, pool, tables, lengths, options, tile, lse)
                return attended
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in _parts(tables, room):
            pages = read(pool, tables[part].long(), form).float()
            scores, v, seen = _scores(q[part], pages, lengths[part], options)
            out[part], logs = _weighed(scores, v, seen, options)
            if lse is not None:
                lse[part] = logs
        return out

    def choose(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None,
    ) -> Tensor:  # fmt: skip
        room = checks.check_decode(q, pool, tables, lengths, options, form)
        assert options.topk is not None
        chosen = torch.empty(
            (len(q), room.kv_heads, tables.shape[1] * room.page_tokens), dtype=torch.bool, device=q.device
        )
        for part in _parts(tables, room):  # as in `decode_attention`, since products of one shape round equally
            pages = read(pool, tables[part].long(), form, values=False).float()
            scores, _, seen = _scores(q[part], pages, lengths[part], options)
            chosen[part] = _largest(scores, seen, options.topk).any(2)
        return chosen

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: Literal["bf16"] | None = None,
        packed: bool = False,
    ) -> Tensor:  # fmt: skip
        if x.dtype == torch.float32:
            return super().linear(x, weight, bias, compute)
        checks.check_linear(x, weight, bias, narrow=True)
        x, dtype = x if compute is None else x.bfloat16().to(x.dtype), x.dtype
        return nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        if a.dtype == torch.float32:
            return super().add_weighted(out, a, rows)
        checks.check_add_weighted(out, a, rows, narrow=True)
        out += a @ rows.to(a.dtype)

    def product(
        self, x: Tensor, weight: Tensor, form: Form, bias: Tensor | None = None, compute: base.Compute | None = None
    ) -> Tensor:
        checks.check_product(x, weight, form, bias, narrow=True)
        rows = x.reshape(-1, form.columns)
        # Before Ampere Triton multiplies without tensor cores, and cannot multiply 8-bit codes: there weights are
        # dequantized in torch and multiplied in fp32. policies/hardware/t4-16gb_208gb_ssd.json has its price.
        fused = x.numel() and (not x.is_cuda or is_ampere(x)) and self._triton(x.device.type)
        kernels = kernels_of(type(form), "cuda") if fused else None
        out = None if kernels is None else kernels.product(self, rows, weight, form, bias, compute)
        if out is None:
            out = x.new_empty((len(rows), form.rows))
            each = (MULTIPLIED if compute else WIDENED_ROW) * form.columns
            for run, decoded in decoded_parts(weight, form) if len(rows) else ():  # decoded once for all rows of x
                for some in _slices(len(rows), BUFFER // 4 // (each + 4 * len(decoded))):
                    x32 = to_multiply(rows[some].float(), form, compute)
                    out[some, run] = linear_fp32(x32, decoded, None if bias is None else bias[run])
        return out.view(*x.shape[:-1], form.rows)

    def record_products(
        self, x: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, bias: Tensor | None = None
    ) -> Tensor:
        checks.check_record_products(x, records, places, form, index, bias)
        out = x.new_empty((len(x), len(places)))
        for some in _slices(len(places), BUFFER // (GATHERED * form.width)):
            v = _vectors(records, places[some], form, index, x.dtype)
            out[:, some] = x.to(v.dtype) @ v.T if bias is None else x.to(v.dtype) @ v.T + bias[some]
        return out

    def record_sum(
        self, a: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, start: Tensor | None = None
    ) -> Tensor:
        checks.check_record_sum(a, records, places, form, index, start)
        out = a.new_zeros((len(a), form.width), dtype=torch.float32) if start is None else start.clone()
        for some in _slices(len(places), BUFFER // (GATHERED * form.width)):
            v = _vectors(records, places[some], form, index, a.dtype)
            out += a[:, some].to(v.dtype) @ v
        return out


def is_ampere(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU of compute capability 8.0 or higher."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def has_grouped_product(x: Tensor) -> bool:
    """Return whether torch multiplies groups of rows of `x` by one matrix per group without synchronisation.

    This holds for bf16 on GPUs of compute capability 9 and 10. Elsewhere torch reads the groups' sizes on the host.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def sum_in_fp32() -> None:
    """Set torch to multiply fp32 on a GPU without TF32 and to sum 16-bit products in fp32, for the whole process.

    cuDNN's attention is disabled: it builds a plan for every prompt length, which takes tens of milliseconds, and
    caches the plan per thread, while every job has its own lane threads.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # type: ignore[no-untyped-call]


@functools.cache
def triton_module(kind: str) -> ModuleType | None:
    """Return Triton's attention if its kernels run on devices of this kind; else None, with one message for a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kind != "cuda" and not (kind == "cpu" and interpreted):
        return None
    try:
        from flexengine.kernels import triton_attention

        triton_attention.probe(torch.device(kind))
    except Exception as error:  # Triton is not installed, has no compiler for its launchers, or lacks this GPU
        reason = f"{type(error).__name__}: {error}"
        message(f"kernels run in plain torch, several times slower, as Triton fails: {reason}", logging.WARNING)
        return None
    return triton_attention


def _vectors(records: Tensor, places: Tensor, form: RecordForm, index: int, dtype: torch.dtype) -> Tensor:
    """Return one vector of the records at `places`, [n, width]: as it is stored if it has this dtype, else in fp32."""
    at = slice(index * form.vector_bytes, (index + 1) * form.vector_bytes)
    if form.coded is None and form.dtype == dtype:
        return records[:, at][places].view(dtype)
    return form.decode(records[places], index)


def _parts(tables: Tensor, room: Room) -> Iterator[slice]:
    """Return slices of the sequences, each of which needs at most BUFFER bytes of gathered K and V."""
    one = tables.shape[1] * room.page_tokens * 2 * room.kv_heads * room.dim * GATHERED
    return _slices(len(tables), max(1, BUFFER // max(1, one)))


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(low, min(count, low + step)) for low in range(0, count, max(1, step)))


def _scores(q: Tensor, pages: Tensor, lengths: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return capped scores [n, kv_heads, group, tokens], -inf for tokens that are not seen, V [n, kv_heads, tokens,
    dim] and the mask of seen tokens [n, tokens].

    Args:
        q, lengths, options: as in `Kernels.decode_attention`.
        pages: gathered pages [n, pages, 2, kv_heads, page_tokens, dim], padded to the longest sequence. If they hold K
            only, the third dimension is 1, and the V returned must not be used.
    """
    n, heads, dim = q.shape
    both = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    k, v = both[0], both[-1]
    scores = q.float().reshape(n, k.shape[1], heads // k.shape[1], dim) @ k.transpose(2, 3) * options.scale
    token, end = torch.arange(k.shape[2], device=q.device), lengths[:, None]
    seen = token < end if options.window is None else (token < end) & (token >= end - options.window)
    return capped(scores, options.softcap).masked_fill(~seen[:, None, None], float("-inf")), v, seen


def _weighed(scores: Tensor, v: Tensor, seen: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the result of attention, fp32 [n, heads, dim], and the log of its denominator, fp32 [n, heads]."""
    n, kv_heads = scores.shape[:2]
    lse = denominator(scores, options.sinks)
    weights = torch.exp(scores - lse.view(n, kv_heads, -1, 1))
    used = seen[:, None, None] if options.topk is None else _largest(scores, seen, options.topk)
    # V after a sequence's end may be NaN, and 0 * NaN is NaN.
    v = v.masked_fill(~used.any(2)[..., None], 0.0)
    return (weights.masked_fill(~used, 0.0) @ v).reshape(n, -1, v.shape[-1]), lse


def _largest(scores: Tensor, seen: Tensor, topk: float) -> Tensor:
    """Return the mask of `reference._largest` for a batch of sequences, bool of the shape of `scores`."""
    ends = seen.shape[1] - 1 - seen.flip(1).int().argmax(1)  # the query's own position
    own = torch.arange(seen.shape[1], device=seen.device) == ends[:, None]
    past = scores.masked_fill(own[:, None, None], float("-inf"))
    rank = past.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    count = (topk * (seen.sum(1) - 1).double()).floor()
    mask: Tensor = (rank < count[:, None, None, None]) & seen[:, None, None] | own[:, None, None]
    return mask
