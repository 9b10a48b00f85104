"""Decode attention over a paged cache in Triton: base.Kernels.decode_attention without topk.

A sequence's tokens are cut into spans at multiples of SPAN. One program computes attention over one span for the query
heads of one kv head, so that a page is read once for all of them. A second kernel merges the spans of a sequence in
order. So a sequence's result is independent of the batch, and one long sequence still uses the whole GPU.

Encoded K and V are dequantized in registers. A byte holds several codes, whose elements are not neighbours (see
codec.cache). So the kernel orders the columns of a row by (byte, code in the byte), those of q too, and those of the
result until it is stored.
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.paged import Room

SPAN = 512  # tokens; at 4 bits a span's partial result, fp32, has 1/80 of the bytes of the span's KV
WIDEST = 256  # maximum elements of a head, limited by registers
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HEADS = 64  # maximum query heads of a program
BUFFER = 2**26  # bytes of scratch memory, see BUFFER in kernels.cuda
EVERYTHING = 2**31 - 1  # tokens; a window that includes all tokens


@dataclass(frozen=True)
class Tiles:
    """Compile-time constants of span_kernel, which has parameters of the same names."""

    KV_HEADS: int  # key/value heads
    GROUP: int  # query heads per kv head
    PAGE: int  # tokens of a page
    DIM: int  # elements of a head
    BITS: int  # bits of a code; 0 for a plain pool
    CODED: int  # columns of a group of codes; all columns for a plain pool
    COLUMNS: int  # columns of a row, a power of two
    ROWS: int  # query heads of a tile
    TOKENS: int  # tokens of a tile
    DOT: bool  # multiply by tensor cores, else by sums along a row
    NARROW: bool  # multiply in 16 bits

    @property
    def warps(self) -> int:
        """Warps of a program. For fp32 tiles, Triton 3.6 spills hundreds of bytes with 4 warps, and none with 8.

        On an H200 one warp reads 4-bit codes 1.1 to 2.9 times as fast as four: no thread waits while codes are
        reordered between threads. 256 columns take two: with one, Triton 3.9 spills 216 to 416 bytes. So do 128 columns
        of 8 bits, which no thread reorders: with one, Triton 3.6 spills 328 bytes.
        """
        if self.BITS and (self.NARROW or not self.DOT):
            most = 64 if self.BITS == 8 else 128  # columns of one warp
            return 2 if self.DOT and most < self.COLUMNS else 1
        return 8 if self.DOT and not self.NARROW else 4


def tiles(room: Room, heads: int, form: CacheFormat | None, q: torch.dtype, pool: torch.dtype) -> Tiles | None:
    """Return the constants for attention of `heads` query heads; None if the kernel does not support the case.

    A single query head per kv head is summed in fp32. Several are multiplied by tl.dot: in 16 bits if q has 16 bits and
    the pool the same dtype or codes, which are then dequantized to q's dtype; else in fp32, without TF32 and so without
    tensor cores. form: format of an encoded pool; None for a plain one.
    """
    known = q in FLOATS and (form is not None or pool in FLOATS)
    if not known or room.dim > WIDEST:
        return None
    coded = 0 if form is None else form.group
    columns = triton.next_power_of_2(-(-room.dim // coded)) * coded if form else triton.next_power_of_2(room.dim)
    columns = max(16, columns)
    group = heads // room.kv_heads
    dot, narrow = group > 1, q != torch.float32 and (form is not None or pool == q)
    return Tiles(
        room.kv_heads, group, room.page_tokens, room.dim, form.bits if form else 0, coded or columns, columns,
        ROWS=min(HEADS if narrow else 16, max(16, triton.next_power_of_2(group))) if dot else 1,
        TOKENS=max(16, min(128, (8192 if dot and narrow and form is None else 4096) // columns)),
        DOT=dot, NARROW=narrow,
    )  # fmt: skip


def decode_attention(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions, tile: Tiles,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the result, [n, heads, head_dim].

    Args:
        q, pool, tables, lengths, options, lse: as in `Kernels.decode_attention`, already checked.
        tile: the constants that `tiles` returned.
    """
    n, heads, dim = q.shape
    scale, window, softcap, sinks, *_ = options
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((n, heads), dtype=torch.float32, device=q.device) if lse is None else lse
    spans = max(1, triton.cdiv(tables.shape[1] * tile.PAGE, SPAN))
    q, tables, lengths = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, tables, lengths))
    step = max(1, BUFFER // (heads * spans * (dim + 1) * 4))
    for low in range(0, n, step):
        some = slice(low, low + step)
        part = q[some]
        partial = torch.empty((len(part), heads, spans, dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((len(part), heads, spans), dtype=torch.float32, device=q.device)
        common = (lengths[some], partial, partial_lse)
        seen = EVERYTHING if window is None else min(window, EVERYTHING)
        span_kernel[len(part) * tile.KV_HEADS, spans, triton.cdiv(tile.GROUP, tile.ROWS)](
            part, pool, pool if tile.BITS == 0 else pool.view(torch.float16), tables[some], *common,
            q.stride(0), q.stride(1), tables.stride(0), spans, scale, seen, softcap or 0.0, CAPPED=softcap is not None,
            SPAN=SPAN, WIDEN=INTERPRETED, **asdict(tile), num_warps=tile.warps,
        )  # fmt: skip
        merge_kernel[len(part) * heads,](
            *common, partial if sinks is None else sinks, out[some], lse[some], spans, seen, heads, DIM=dim,
            COLUMNS=triton.next_power_of_2(dim), SINKS=sinks is not None, SPAN=SPAN, num_warps=1,
        )  # fmt: skip
        del partial, partial_lse, common  # free them before the next ones are allocated
    return out


def probe(device: torch.device) -> None:
    """Run a kernel once, and raise the error that prevents it on this device."""
    pool, one = torch.zeros(1, 2, 1, 16, 16, device=device), torch.ones(1, dtype=torch.int32, device=device)
    tile = tiles(Room(1, 1, 16, 16), 1, None, pool.dtype, pool.dtype)
    assert tile is not None
    out = decode_attention(pool[0, 0, :, 0, None], pool, one[None] - 1, one, AttentionOptions(1.0), tile)
    if out.cpu().any():
        raise RuntimeError(f"Triton {version()} computes {out.tolist()} of zeros")


def version() -> str:
    """Return the version of Triton."""
    return str(triton.__version__)


@triton.jit(do_not_specialize=["table", "spans", "window"])  # these change as sequences grow
def span_kernel(
    q_at, pool_at, halves_at, tables_at, lengths_at, partial_at, lse_at, q_token, q_head, table, spans, scale, window,
    softcap, CAPPED: tl.constexpr, SPAN: tl.constexpr, WIDEN: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, CODED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute attention over the tokens of one span. Program: (sequence and kv head, span, block of query heads).

    Writes partial_at, fp32 [n, heads, spans, dim], and lse_at, fp32 [n, heads, spans]. Spans without a token that the
    sequence sees are not written.
    """
    sequence, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    span = tl.program_id(1)
    length = tl.load(lengths_at + sequence)
    first = tl.maximum(length - window, 0)
    begin = tl.maximum(span * SPAN, first // TOKENS * TOKENS)
    end = tl.minimum((span + 1) * SPAN, length)
    if begin >= end:
        return
    EACH: tl.constexpr = 1 if BITS == 0 else 8 // BITS
    column = tl.arange(0, COLUMNS)
    element = column // CODED * CODED + column % EACH * (CODED // EACH) + column % CODED // EACH
    member = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = (member < GROUP)[:, None] & (element < DIM)[None, :]
    head = kv_head * GROUP + member
    q = tl.load(q_at + sequence * q_token + head[:, None] * q_head + element[None, :], mask=inside, other=0.0)
    q = q if NARROW and DOT else q.to(tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(begin, end, TOKENS):
        token = at + tl.arange(0, TOKENS)
        seen = (token >= first) & (token < length)
        page = tl.load(tables_at + sequence * table + token // PAGE, mask=seen, other=0).to(tl.int64)
        panel = page * (2 * KV_HEADS) + kv_head
        k = _read(pool_at, halves_at, panel, token % PAGE, seen, q.dtype, PAGE, DIM, BITS, CODED, COLUMNS, TOKENS)
        v = _read(
            pool_at, halves_at, panel + KV_HEADS, token % PAGE, seen, q.dtype, PAGE, DIM, BITS, CODED, COLUMNS, TOKENS
        )
        if DOT:
            scores = _dot(q, tl.trans(k), WIDEN) * scale
        else:
            scores = tl.sum(k * tl.reshape(q, (COLUMNS,))[None, :], 1)[None, :] * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # tanh; 1 beyond what exp can hold
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        weights, fade = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        total = total * fade + tl.sum(weights, 1)
        if not DOT:
            fresh = tl.sum(v * tl.reshape(weights, (TOKENS,))[:, None], 0)[None, :]
        elif NARROW:  # each weight as a sum of two 16-bit numbers, so that no precision is lost
            upper = weights.to(v.dtype)
            fresh = _dot(upper, v, WIDEN) + _dot((weights - upper.to(tl.float32)).to(v.dtype), v, WIDEN)
        else:
            fresh = _dot(weights, v, WIDEN)
        summed = summed * fade[:, None] + fresh
        largest = higher
    place = (sequence * KV_HEADS * GROUP + head) * spans + span
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse_at + place, base + tl.log(total), mask=member < GROUP)
    out = summed / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(partial_at + place.to(tl.int64)[:, None] * DIM + element[None, :], out, mask=inside)


@triton.jit
def _read(
    pool_at, halves_at, panel, offset, seen, dtype: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, CODED: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return rows [TOKENS, COLUMNS] of K or V in dtype; zeros for tokens not seen, where the pool may hold NaN.

    panel: int64 [TOKENS], number of the panel from the start of the pool. offset: of each token in its page.
    """
    if BITS == 0:
        column = tl.arange(0, COLUMNS)
        start = panel * (PAGE * DIM) + offset * DIM
        stored = tl.load(
            pool_at + start[:, None] + column[None, :], mask=seen[:, None] & (column < DIM)[None, :], other=0.0
        )
        rows = stored.to(dtype)
    else:
        ROW: tl.constexpr = DIM * BITS // 8
        GROUPS: tl.constexpr = DIM // CODED
        start = panel * (PAGE * (ROW + 4 * GROUPS))
        byte, group = tl.arange(0, COLUMNS * BITS // 8), tl.arange(0, COLUMNS // CODED)
        row = start + offset * ROW
        codes = tl.load(pool_at + row[:, None] + byte[None, :], mask=seen[:, None] & (byte < ROW)[None, :], other=0)
        half = (start + PAGE * ROW) // 2 + offset
        valid = seen[:, None] & (group < GROUPS)[None, :]
        scale = tl.load(halves_at + half[:, None] + group[None, :] * PAGE, mask=valid, other=0.0)
        minimum = tl.load(halves_at + half[:, None] + (group + GROUPS)[None, :] * PAGE, mask=valid, other=0.0)
        if BITS == 4:
            codes = tl.join(codes & 15, codes >> 4)
        elif BITS == 2:
            codes = tl.join(tl.join(codes & 3, codes >> 4 & 3), tl.join(codes >> 2 & 3, codes >> 6))
        apart = tl.reshape(codes, (TOKENS, COLUMNS // CODED, CODED)).to(tl.float32)
        decoded = minimum.to(tl.float32)[:, :, None] + apart * scale.to(tl.float32)[:, :, None]
        rows = tl.reshape(decoded, (TOKENS, COLUMNS)).to(dtype)
    return rows


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    """Return a @ b with fp32 sums. WIDEN is for Triton's interpreter, which cannot multiply bf16."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["spans", "window"])
def merge_kernel(
    lengths_at, partial_at, partial_lse_at, sinks_at, out_at, lse_at, spans, window, heads, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, SINKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Merge the results of a sequence's spans, and its sink, into one result. Program: (sequence and head)."""
    row = tl.program_id(0)
    length = tl.load(lengths_at + row // heads)
    column = tl.arange(0, COLUMNS)
    if SINKS:
        largest, total = tl.load(sinks_at + row % heads).to(tl.float32), 1.0
    else:
        largest, total = float("-inf"), 0.0
    summed = tl.zeros((COLUMNS,), tl.float32)
    for span in range(tl.maximum(length - window, 0) // SPAN, tl.cdiv(length, SPAN)):
        place = row.to(tl.int64) * spans + span
        lse = tl.load(partial_lse_at + place)
        part = tl.load(partial_at + place * DIM + column, mask=column < DIM, other=0.0)
        higher = tl.maximum(largest, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp(largest - base), tl.exp(lse - base)
        summed = summed * fade + part * weight
        total = total * fade + weight
        largest = higher
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse_at + row, base + tl.log(total))
    tl.store(out_at + row * DIM + column, (summed / total).to(out_at.dtype.element_ty), mask=column < DIM)


INTERPRETED = not isinstance(span_kernel, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 runs on a CPU, for tests
