"""Kernels on a GPU: Triton's where it can be had, else batched torch; no host synchronisation in either."""

import functools
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheForm
from flexengine.codec.packed import Packed
from flexengine.kernels import base
from flexengine.kernels.pages import read, write
from flexengine.kernels.reference import ReferenceKernels, capped, denominator

# Bytes that a kernel holds at once beside its arguments, its result and 8-bit codes of x; more only where one row, or
# one sequence, needs more. plan.gpu books as much.
BUFFER = 2**26
GATHERED = 32  # of them, per element of K and V that is gathered and decoded: six fp32 copies and 8 bytes of codes
ENCODED = 48  # per element that is encoded: the copies that a fit makes
MULTIPLIED = 32  # per element of x that is rounded to 8 bits, in fp32


class CudaKernels(ReferenceKernels):
    """See base.Kernels. Page tables are trusted: checking them would make the GPU wait for the host at every layer.

    fused: use Triton's kernels for what they do, on a GPU and, with TRITON_INTERPRET=1, on a CPU.
    """

    name = "cuda"
    narrow = True

    def __init__(self, fused: bool = True) -> None:
        self._fused = fused

    def numerics(self) -> str:
        """What decides the last bits of results."""
        found = self._triton("cuda")
        return "cuda, torch alone" if found is None else f"cuda, triton {found.attention.version()}"

    def _triton(self, kind: str) -> "Fused | None":
        return fused_kernels(kind) if self._fused else None

    def fuses_groups(self, q: Tensor) -> bool:
        return not q.is_cuda or (q.dtype != torch.float32 and is_ampere(q))

    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheForm | None = None
    ) -> None:
        room = base.check_append(k, v, pool, pages, offsets, form)
        step = len(k) if form is None else max(1, BUFFER // (ENCODED * room.kv_heads * room.dim))
        for some in _slices(len(k), step):
            write(k[some], v[some], pool, pages[some], offsets[some], form)

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
        form: CacheForm | None = None,
        topk: float | None = None,
        with_lse: bool = False,
    ) -> Any:
        room = base.check_decode(q, pool, tables, lengths, form)
        base.check_options(window, softcap, sinks, q.shape[1])
        base.check_topk(topk, with_lse)
        if topk is None and len(q) and (fused := self._triton(q.device.type)):
            tile = fused.attention.tiles(room, q.shape[1], form, q.dtype, pool.dtype)
            if tile is not None:
                out, lse = fused.attention.decode(q, pool, tables, lengths, scale, window, softcap, sinks, tile)
                return (out, lse) if with_lse else out
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in _parts(tables, room):
            pages = read(pool, tables[part].long(), form).float()
            scores, v, seen = _scores(q[part], pages, lengths[part], scale, window)
            out[part], lse[part] = _weighed(capped(scores, softcap), v, seen, sinks, topk)
        return (out, lse) if with_lse else out

    def choose(
        self,
        q: Tensor,
        pool: Tensor,
        tables: Tensor,
        lengths: Tensor,
        scale: float,
        topk: float,
        window: int | None = None,
        softcap: float | None = None,
        form: CacheForm | None = None,
    ) -> Tensor:
        room = base.check_decode(q, pool, tables, lengths, form)
        base.check_options(window, softcap, None, q.shape[1])
        base.check_topk(topk)
        chosen = torch.empty((len(q), room.kv_heads, tables.shape[1] * room.page_tokens), dtype=torch.bool,
                             device=q.device)  # fmt: skip
        for part in _parts(tables, room):  # those of decode: products of one shape round alike
            pages = read(pool, tables[part].long(), form, values=False).float()
            scores, _, seen = _scores(q[part], pages, lengths[part], scale, window)
            chosen[part] = _largest(_masked(capped(scores, softcap), seen), seen, topk).any(2)
        return chosen

    def product(
        self, x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None = None, compute: base.Compute | None = None
    ) -> Tensor:
        base.check_product(x, weight, form, bias, narrow=True)
        # Before Ampere Triton multiplies without tensor cores, and cannot multiply 8-bit codes.
        fused = self._triton(x.device.type) if not x.is_cuda or is_ampere(x) else None
        rows = x.reshape(-1, form.columns)
        out = x.new_empty((len(rows), form.rows))
        if fused is not None and x.numel() and weight.data_ptr() % 2 == 0:
            if compute == "bf16" and x.dtype == torch.float32:
                rows = rows.bfloat16().float()
            fused.codes.product(rows, weight, form, bias, compute == "int8", out)
        else:
            step = max(1, BUFFER // 2 // (4 * form.rows + MULTIPLIED * form.columns))
            for some in _slices(len(rows), step):
                out[some] = super().product(rows[some].float(), weight, form, bias, compute)
        return out.view(*x.shape[:-1], form.rows)


def is_ampere(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU of compute capability 8.0 or higher."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def has_grouped_product(x: Tensor) -> bool:
    """Return whether torch multiplies groups of rows like `x` by a matrix each in one call that waits for nothing: bf16
    on GPUs of compute capability 9 and 10. Elsewhere torch's own fallback reads the groups' sizes on the host."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def sum_in_fp32() -> None:
    """Let torch multiply fp32 as it is on a GPU and sum 16-bit products in fp32, for the whole process.

    cuDNN's attention is switched off: it makes a plan for every length of prompts, which takes tens of milliseconds,
    and keeps it for one thread, while every job has lanes of its own.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # type: ignore[no-untyped-call]


class Fused(NamedTuple):
    """The modules with Triton's kernels."""

    attention: ModuleType
    codes: ModuleType


@functools.cache
def fused_kernels(kind: str) -> Fused | None:
    """Triton's kernels, if they run on tensors of devices of that kind; a GPU that must do without is told of once."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kind != "cuda" and not (kind == "cpu" and interpreted):
        return None
    try:
        from flexengine.kernels import triton_attention, triton_codes

        triton_attention.probe(torch.device(kind))
    except Exception as error:  # no triton; no compiler for its launchers; a GPU it knows nothing of
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"kernels run in plain torch, several times slower: {reason}", RuntimeWarning, stacklevel=2)
        return None
    return Fused(triton_attention, triton_codes)


def _parts(tables: Tensor, room: base.Room) -> Iterator[slice]:
    """Sequences that are gathered together."""
    one = tables.shape[1] * room.page_tokens * 2 * room.kv_heads * room.dim * GATHERED
    return _slices(len(tables), max(1, BUFFER // max(1, one)))


def _slices(count: int, step: int) -> Iterator[slice]:
    """`count` things, `step` at a time."""
    return (slice(at, min(count, at + step)) for at in range(0, count, max(1, step)))


def _scores(
    q: Tensor, pages: Tensor, lengths: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [n, kv_heads, group, tokens], V [n, kv_heads, tokens, dim], and which tokens a sequence sees, [n, tokens].

    pages: [n, pages, 2, kv_heads, page_tokens, dim] of each sequence side by side, padded to the longest; of K alone
    the 2 is 1, and what is returned as V means nothing.
    """
    n, heads, dim = q.shape
    both = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    k, v = both[0], both[-1]
    scores = q.float().reshape(n, k.shape[1], heads // k.shape[1], dim) @ k.transpose(2, 3) * scale
    at, end = torch.arange(k.shape[2], device=q.device), lengths[:, None]
    return scores, v, at < end if window is None else (at < end) & (at >= end - window)


def _weighed(
    scores: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, topk: float | None
) -> tuple[Tensor, Tensor]:
    """The attention's result [n, heads, dim] in fp32 and the log of its denominator [n, heads]."""
    n, kv_heads, _, dim = (*scores.shape[:3], v.shape[-1])
    scores = _masked(scores, seen)
    lse = denominator(scores, sinks)
    weights = torch.exp(scores - lse.view(n, kv_heads, -1, 1))
    wanted = seen[:, None, None] if topk is None else _largest(scores, seen, topk)
    # What lies beyond a sequence's end may be anything, NaN too, and 0 * NaN is NaN.
    v = v.masked_fill(~wanted.any(2)[..., None], 0.0)
    return (weights.masked_fill(~wanted, 0.0) @ v).reshape(n, -1, dim), lse


def _masked(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen[:, None, None], float("-inf"))


def _largest(scores: Tensor, seen: Tensor, topk: float) -> Tensor:
    """reference.largest for sequences side by side: bool like scores."""
    ends = seen.shape[1] - 1 - seen.flip(1).int().argmax(1)  # the query's own position
    own = torch.arange(seen.shape[1], device=seen.device) == ends[:, None]
    past = scores.masked_fill(own[:, None, None], float("-inf"))
    rank = past.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    count = (topk * (seen.sum(1) - 1).double()).floor()
    wanted: Tensor = (rank < count[:, None, None, None]) & seen[:, None, None] | own[:, None, None]
    return wanted
