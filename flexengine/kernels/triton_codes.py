"""Products with encoded weights in Triton: what base.Kernels.product does, from the bytes of codec.packed.

Few rows are multiplied in one kernel that decodes tiles of weights in registers: codes are all that is read. Of many
rows, weights are decoded, a run of outputs at a time that stays in a GPU's cache, and multiplied by cuBLAS. torch's
_weight_int4pack_mm would want the codes in another order, which is neither what a CPU reads nor what is on disk.
Activations of 8 bits are multiplied with codes as integers, whatever their number; fp32 ones by cuBLAS, as without TF32
tensor cores have nothing for them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from flexengine.codec.packed import ROWS, Packed
from flexengine.kernels.reference import rounded_codes
from flexengine.kernels.triton_attention import INTERPRETED

FEW = 64  # rows up to which reading weights takes longer than multiplying; a program's tile of them
DECODED = 2**26  # bytes of decoded weights at once: about what a large GPU's cache holds, and enough to keep it busy
PROGRAMS = 1024  # as many as keep a GPU busy; columns are divided among programs until there are
BLOCKS = 4  # of ROWS outputs, of a program


class Sizes(NamedTuple):
    """How much a program of product_kernel does: rows of x; runs of groups that the columns are cut into, and of how
    many groups each is."""

    rows: int
    runs: int
    groups: int


def sizes(rows: int, form: Packed) -> Sizes:
    """Few rows: columns are cut so that there are programs enough, but each still has four groups to go through."""
    down, right = form.blocks
    tile = min(FEW, max(16, triton.next_power_of_2(rows)))
    others = triton.cdiv(down, BLOCKS) * triton.cdiv(rows, tile)
    runs = max(1, min(PROGRAMS // others, right // 4, 4 * FEW // tile))
    groups = triton.cdiv(right, runs)
    return Sizes(tile, triton.cdiv(right, groups), groups)


def product(x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None, int8: bool) -> Tensor:
    """[M, rows] in x's dtype of x [M, columns], of what was checked. weight: at an even address."""
    if int8:
        return _finished(_summed(x.float(), weight, form, True), bias, x.dtype)
    if len(x) <= FEW and x.dtype != torch.float32:
        return _finished(_summed(x if x.stride(-1) == 1 else x.contiguous(), weight, form, False), bias, x.dtype)
    out = x.new_empty((len(x), form.rows))
    step = max(1, DECODED // (form.columns * x.itemsize) // ROWS) * ROWS
    for low in range(0, form.rows, step):
        run = slice(low, min(form.rows, low + step))
        out[:, run] = linear(x, decode(weight, form, run, x.dtype), None if bias is None else bias[run].to(x.dtype))
    return out


def decode(weight: Tensor, form: Packed, run: slice, dtype: torch.dtype) -> Tensor:
    """Some rows, [run, columns], as form.decode gives them, rounded to dtype. run: begins with a multiple of ROWS."""
    count, right = run.stop - run.start, form.blocks[1]
    out = torch.empty((count, form.columns), dtype=dtype, device=weight.device)
    part = weight[run.start // ROWS * right * form.block_bytes :]
    decode_kernel[triton.cdiv(count, BLOCKS * ROWS), right](
        part, part.view(torch.float16), out, count, form.columns, right, BITS=form.codec.bits, GROUP=form.codec.group,
        BLOCKS=BLOCKS, num_warps=4,
    )  # fmt: skip
    return out


def _summed(x: Tensor, weight: Tensor, form: Packed, int8: bool) -> Tensor:
    """fp32 [M, rows]."""
    group, (down, right) = form.codec.group, form.blocks
    worth = sums = x  # unused
    if int8:
        codes, scale = rounded_codes(pad(x, (0, -form.columns % group)), group)
        x, worth = codes.nan_to_num(0.0).to(torch.int8).flatten(-2), scale[..., 0].contiguous()
        sums = codes.sum(-1)
    size = sizes(len(x), form)
    out = torch.empty((size.runs, len(x), form.rows), dtype=torch.float32, device=x.device)
    product_kernel[triton.cdiv(down, BLOCKS), triton.cdiv(len(x), size.rows), size.runs](
        x, worth, sums, weight, weight.view(torch.float16), out, len(x), form.rows, x.shape[1], right, x.stride(0),
        size.groups, BITS=form.codec.bits, GROUP=group, BLOCKS=BLOCKS, TILE=size.rows, INT8=int8, WIDEN=INTERPRETED,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out.sum(0) if size.runs > 1 else out[0]


def _finished(summed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (summed if bias is None else summed.add_(bias)).to(dtype)


@triton.jit(do_not_specialize=["rows"])  # the last run of them is shorter
def decode_kernel(
    data_at, halves_at, out_at, rows, columns, right, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):
    """Program (BLOCKS blocks of rows, group of columns): out_at [rows, columns]."""
    first, group = tl.program_id(0) * BLOCKS, tl.program_id(1)
    codes, scale, minimum = _codes(data_at, halves_at, first, group, rows, right, BITS, GROUP, BLOCKS)
    row, column = first * 16 + tl.arange(0, BLOCKS * 16), group * GROUP + tl.arange(0, GROUP)
    found = minimum[:, None] + codes.to(tl.float32) * scale[:, None]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_at + place, found.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "groups"])  # they change with the batch
def product_kernel(
    x_at, worth_at, sums_at, data_at, halves_at, out_at, count, rows, columns, right, stride, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (BLOCKS blocks of outputs, TILE rows of x, run of groups): out_at fp32 [runs, count, rows].

    x_at: [count, columns]. INT8: of int8 codes, whose scales and sums are worth_at and sums_at, fp32 [count, right].
    """
    first, run = tl.program_id(0) * BLOCKS, tl.program_id(2)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    start = x_at + row.to(tl.int64)[:, None] * stride
    total = tl.zeros((TILE, BLOCKS * 16), tl.float32)
    for group in range(run * groups, tl.minimum((run + 1) * groups, right)):
        codes, scale, minimum = _codes(data_at, halves_at, first, group, rows, right, BITS, GROUP, BLOCKS)
        column = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(start + column[None, :], mask=(row < count)[:, None] & (column < columns)[None, :], other=0)
        if INT8:
            if BITS == 8:  # codes of 0..255 have no int8
                minimum += 128 * scale
                codes ^= 128
            dot = tl.dot(x, tl.trans(codes.to(tl.int8, bitcast=True)), out_dtype=tl.int32).to(tl.float32)
            worth = tl.load(worth_at + row * right + group, mask=row < count, other=0.0)
            sums = tl.load(sums_at + row * right + group, mask=row < count, other=0.0)
            total += worth[:, None] * (scale[None, :] * dot + minimum[None, :] * sums[:, None])
        else:
            decoded = (minimum[:, None] + codes.to(tl.float32) * scale[:, None]).to(x.dtype)
            if WIDEN:  # see triton_attention._dot
                x, decoded = x.to(tl.float32), decoded.to(tl.float32)
            total += tl.dot(x, tl.trans(decoded), input_precision="ieee")
    output = first * 16 + tl.arange(0, BLOCKS * 16)
    place = (run * count + row).to(tl.int64)[:, None] * rows + output[None, :]
    tl.store(out_at + place, total, mask=(row < count)[:, None] & (output < rows)[None, :])


@triton.jit
def _codes(
    data_at, halves_at, first, group, rows, right, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):
    """Codes uint8 [BLOCKS * 16, GROUP] of a group of columns, scale and minimum fp32 [BLOCKS * 16], of the blocks from
    `first` on; zeros beyond the last.

    Bytes are read in the order in which they lie: (vector, row of the block, column of a quad). Those of a vector hold
    `each` quads, which follow one another: so a row's codes come in the order (vector, quad of it, column of the quad).
    """
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    EACH: tl.constexpr = 8 // LOW
    VECTORS: tl.constexpr = GROUP // 4 // EACH
    block = first + tl.arange(0, BLOCKS)
    there = (block < (rows + 15) // 16)[:, None]
    start = (block.to(tl.int64) * right + group) * (64 + 2 * GROUP * BITS)
    half = (start // 2)[:, None] + tl.arange(0, 16)[None, :]
    scale = tl.load(halves_at + half, mask=there, other=0.0).to(tl.float32)
    minimum = tl.load(halves_at + half + 16, mask=there, other=0.0).to(tl.float32)
    byte = tl.arange(0, VECTORS * 64)
    codes = tl.load(data_at + (start + 64)[:, None] + byte[None, :], mask=there, other=0)
    if BITS == 4:
        codes = tl.join(codes & 15, codes >> 4)
    elif LOW == 2:
        quads = tl.join(tl.join(codes & 3, codes >> 4 & 3), tl.join(codes >> 2 & 3, codes >> 6))
        if BITS == 3:  # the third bits: 8 quads a byte, so one byte for two of the vectors above
            place = (start + 64 + VECTORS * 64)[:, None] + (byte // 128 * 64 + byte % 64)[None, :]
            high = tl.load(data_at + place, mask=there, other=0) >> (byte // 64 % 2 * 4).to(tl.uint8)[None, :]
            bits = tl.join(tl.join(high & 1, high >> 2 & 1), tl.join(high >> 1 & 1, high >> 3 & 1))
            quads |= bits << 2
        codes = quads
    apart = tl.reshape(codes, (BLOCKS, VECTORS, 16, 4, EACH))
    codes = tl.reshape(tl.permute(apart, (0, 2, 1, 4, 3)), (BLOCKS * 16, GROUP))
    return codes, tl.reshape(scale, (BLOCKS * 16,)), tl.reshape(minimum, (BLOCKS * 16,))
