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
from torch.nn.functional import pad

from flexengine.codec.packed import ROWS, Packed
from flexengine.kernels.reference import rounded_codes
from flexengine.kernels.triton_attention import BUFFER, INTERPRETED

FEW = 64  # rows up to which reading weights takes longer than multiplying; a program's tile of them
DECODED = BUFFER  # bytes of decoded weights at once: about what a large GPU's cache holds, and enough to keep it busy
ROUNDED = 32  # bytes held per element of x while it is rounded to 8 bits
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


def product(x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None, int8: bool, out: Tensor) -> None:
    """x [M, columns] @ weight.T + bias into `out` [M, rows], of x's dtype, of what was checked. weight: at an even
    address."""
    if int8 or (len(x) <= FEW and x.dtype != torch.float32):
        _multiplied(_rounded(x, form) if int8 else _Rows(x if x.stride(-1) == 1 else x.contiguous()), weight, form,
                    bias, out)  # fmt: skip
        return
    step = max(1, DECODED // (form.columns * x.itemsize) // ROWS) * ROWS
    for low in range(0, form.rows, step):
        run = slice(low, min(form.rows, low + step))
        columns, decoded = out[:, run], decode(weight, form, run, x.dtype).t()
        if bias is None:
            torch.mm(x, decoded, out=columns)
        else:
            torch.addmm(bias[run].to(x.dtype), x, decoded, out=columns)
        del decoded  # before the next ones are made


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


class _Rows(NamedTuple):
    """What product_kernel multiplies: x itself or, int8 [M, columns padded to groups], its codes with their scales and
    sums, fp32 [M, groups]."""

    x: Tensor
    worth: Tensor | None = None
    sums: Tensor | None = None


def _rounded(x: Tensor, form: Packed) -> _Rows:
    """The codes of x, some of its rows at a time."""
    group, right = form.codec.group, form.blocks[1]
    found = _Rows(
        torch.empty((len(x), right * group), dtype=torch.int8, device=x.device),
        *(torch.empty((len(x), right), dtype=torch.float32, device=x.device) for _ in range(2)),
    )
    step = max(1, BUFFER // (ROUNDED * right * group))
    for low in range(0, len(x), step):
        some = slice(low, min(len(x), low + step))
        codes, scale = rounded_codes(pad(x[some].float(), (0, -form.columns % group)), group)
        found.x[some] = codes.nan_to_num(0.0).flatten(-2)
        found.worth[some], found.sums[some] = scale[..., 0], codes.sum(-1)  # type: ignore[index]
        del codes, scale
    return found


def _multiplied(rows: _Rows, weight: Tensor, form: Packed, bias: Tensor | None, out: Tensor) -> None:
    """As many rows at a time as BUFFER holds results of in fp32, but at least a tile."""
    step = max(16, BUFFER // (4 * form.rows) // 16 * 16)
    for low in range(0, len(out), step):
        some = slice(low, min(len(out), low + step))
        part = _Rows(*(None if x is None else x[some] for x in rows))  # type: ignore[arg-type]
        summed = _summed(part, weight, form)
        out[some] = summed if bias is None else summed.add_(bias)
        del summed


def _summed(part: _Rows, weight: Tensor, form: Packed) -> Tensor:
    """fp32 [M, rows]."""
    x, int8, (down, right) = part.x, part.worth is not None, form.blocks
    size = sizes(len(x), form)
    out = torch.empty((size.runs, len(x), form.rows), dtype=torch.float32, device=x.device)
    product_kernel[triton.cdiv(down, BLOCKS), triton.cdiv(len(x), size.rows), size.runs](
        x, part.worth if int8 else x, part.sums if int8 else x, weight, weight.view(torch.float16), out, len(x),
        form.rows, x.shape[1], right, x.stride(0), size.groups, BITS=form.codec.bits, GROUP=form.codec.group,
        BLOCKS=BLOCKS, TILE=size.rows, INT8=int8, WIDEN=INTERPRETED, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out.sum(0) if size.runs > 1 else out[0]


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
