"""Decode attention over a paged cache in Triton: what base.Kernels.decode does without topk.

A sequence's tokens are cut at multiples of SPAN. One program weighs one span's V for the query heads of one kv head, so
that a page is read once for all of them; a second kernel merges a sequence's spans in order. So a sequence's result
depends on nothing but itself, and one long sequence still keeps all of a GPU busy.

Encoded K and V are decoded in registers: as a byte holds `each` codes, whose elements lie apart (codec.cache), a row's
columns stand in the order (byte, code of the byte), and so do those of q and of the result until it is stored.
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.codec.cache import CacheForm
from flexengine.kernels.base import Room

SPAN = 512  # tokens; at 4 bits a span's partial result, fp32, is 1/80 of the KV it stands for
WIDEST = 256  # elements of a head, for want of registers
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HEADS = 64  # query heads of a program at most
BUFFER = 2**26  # bytes held at once beside arguments and results, as kernels.cuda says
EVERYTHING = 2**31 - 1  # a window that hides nothing


@dataclass(frozen=True)
class Tiles:
    """What a kernel is compiled for: the fields are its constants of these names.

    BITS: 0, or of a code. CODED: columns of a group of codes, else all. COLUMNS: of a row, a power of two. ROWS: query
    heads, TOKENS: tokens of a tile. DOT: multiplied by tensor cores, else by sums along a row. NARROW: in 16 bits.
    """

    KV_HEADS: int
    GROUP: int
    PAGE: int
    DIM: int
    BITS: int
    CODED: int
    COLUMNS: int
    ROWS: int
    TOKENS: int
    DOT: bool
    NARROW: bool

    @property
    def warps(self) -> int:
        """Of a program. In 4 warps Triton 3.6 spills hundreds of bytes of fp32 tiles, in 8 none."""
        return 8 if self.DOT and not self.NARROW else 4


def tiles(room: Room, heads: int, form: CacheForm | None, q: torch.dtype, pool: torch.dtype) -> Tiles | None:
    """How to compute attention of `heads` query heads, or None for what the kernel does not do.

    One query head to a kv head is summed in fp32. More go through tensor cores: in 16 bits if q has them and the pool
    the same ones or codes, which then are decoded to q's dtype; else in fp32 (without TF32, so by ordinary units).
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
        TOKENS=max(16, min(128, (8192 if dot and narrow else 4096) // columns)),
        DOT=dot, NARROW=narrow,
    )  # fmt: skip


def decode(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None, tile: Tiles,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result and the logs of the denominators, of what was checked. tile: what `tiles` gave."""
    n, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((n, heads), dtype=torch.float32, device=q.device)
    spans = max(1, triton.cdiv(tables.shape[1] * tile.PAGE, SPAN))
    q, tables, lengths = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, tables, lengths))
    step = max(1, BUFFER // (heads * spans * (dim + 1) * 4))
    for at in range(0, n, step):
        some = slice(at, at + step)
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
        del partial, partial_lse, common  # before the next are made
    return out, lse


def probe(device: torch.device) -> None:
    """Runs a kernel once; raises whatever hinders it."""
    pool, one = torch.zeros(1, 2, 1, 16, 16, device=device), torch.ones(1, dtype=torch.int32, device=device)
    tile = tiles(Room(1, 1, 16, 16), 1, None, pool.dtype, pool.dtype)
    assert tile is not None
    out, _ = decode(pool[0, 0, :, 0, None], pool, one[None] - 1, one, 1.0, None, None, None, tile)
    if out.cpu().any():
        raise RuntimeError(f"Triton {version()} computes {out.tolist()} of zeros")


def version() -> str:
    return str(triton.__version__)


@triton.jit(do_not_specialize=["table", "spans", "window"])  # they change as sequences grow
def span_kernel(
    q_at, pool_at, halves_at, tables_at, lengths_at, partial_at, lse_at, q_token, q_head, table, spans, scale, window,
    softcap, CAPPED: tl.constexpr, SPAN: tl.constexpr, WIDEN: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, CODED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Program (sequence and kv head, span, block of query heads): attention over what the sequence sees of the span.

    partial_at: fp32 [n, heads, spans, dim]; lse_at: fp32 [n, heads, spans]. Spans it sees none of stay unwritten.
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
        elif NARROW:  # a weight as the sum of two numbers in 16 bits, so that it is not rounded to one
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
    """Rows [TOKENS, COLUMNS] of K or V in dtype, zeros where nothing is seen: there a pool may hold anything, NaN too.

    panel: int64 [TOKENS], counted from the pool's start. offset: of a token in its page.
    """
    if BITS == 0:
        column = tl.arange(0, COLUMNS)
        start = panel * (PAGE * DIM) + offset * DIM
        found = tl.load(
            pool_at + start[:, None] + column[None, :], mask=seen[:, None] & (column < DIM)[None, :], other=0.0
        )
        rows = found.to(dtype)
    else:
        ROW: tl.constexpr = DIM * BITS // 8
        GROUPS: tl.constexpr = DIM // CODED
        start = panel * (PAGE * (ROW + 4 * GROUPS))
        byte, group = tl.arange(0, COLUMNS * BITS // 8), tl.arange(0, COLUMNS // CODED)
        row = start + offset * ROW
        codes = tl.load(pool_at + row[:, None] + byte[None, :], mask=seen[:, None] & (byte < ROW)[None, :], other=0)
        half = (start + PAGE * ROW) // 2 + offset
        there = seen[:, None] & (group < GROUPS)[None, :]
        scale = tl.load(halves_at + half[:, None] + group[None, :] * PAGE, mask=there, other=0.0)
        minimum = tl.load(halves_at + half[:, None] + (group + GROUPS)[None, :] * PAGE, mask=there, other=0.0)
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
    """Sums in fp32. WIDEN: Triton's interpreter cannot multiply bf16; products of 16-bit numbers are exact in fp32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["spans", "window"])
def merge_kernel(
    lengths_at, partial_at, partial_lse_at, sinks_at, out_at, lse_at, spans, window, heads, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, SINKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head): its spans' results, and its sink, as one."""
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


INTERPRETED = not isinstance(span_kernel, triton.runtime.JITFunction)  # TRITON_INTERPRET=1: on a CPU, for tests
