"""Products with encoded weights in Triton: base.Kernels.product on the format of codec.packed.

For few rows, one kernel dequantizes tiles of weights in registers, so only codes are read. For many rows, weights are
dequantized for as many outputs at a time as the GPU's cache holds, and multiplied by cuBLAS. torch's
_weight_int4pack_mm needs another order of codes than CPU kernels and files use. 8-bit activations are multiplied by
codes as integers for any number of rows. fp32 activations are multiplied by cuBLAS, as tensor cores support fp32 only
as TF32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from flexengine.codec.forms import Form
from flexengine.codec.packed import ROWS, Packed
from flexengine.kernels.base import Compute, FormatKernels, Kernels
from flexengine.kernels.reference import rounded_codes
from flexengine.kernels.triton_attention import BUFFER, INTERPRETED

MAX_FUSED_ROWS = 64  # up to this many, reading weights takes longer than multiplying. Also the rows of a program's tile
DECODED = BUFFER  # bytes of dequantized weights at a time: about the cache of a large GPU, and enough to keep it busy
ROUNDED = 32  # bytes of scratch per element of x that is rounded to 8 bits
PROGRAMS = 1024  # programs that keep a GPU busy; columns are divided among programs to reach this number
BLOCKS = 4  # blocks of ROWS outputs per program
WARPS, STAGES = 4, 4  # of a program of product_kernel


class Sizes(NamedTuple):
    """Division of a product into programs of product_kernel."""

    rows: int  # rows of x per program
    runs: int  # runs of groups that the columns are cut into
    groups: int  # groups per run


def sizes(rows: int, form: Packed) -> Sizes:
    """Return the division of a product of `rows` rows.

    For few rows the columns are cut to get about PROGRAMS programs, but each program has at least four groups.
    """
    down, right = form.blocks
    tile = min(MAX_FUSED_ROWS, max(16, triton.next_power_of_2(rows)))
    others = triton.cdiv(down, BLOCKS) * triton.cdiv(rows, tile)
    runs = max(1, min(PROGRAMS // others, right // 4, 4 * MAX_FUSED_ROWS // tile))
    groups = triton.cdiv(right, runs)
    return Sizes(tile, triton.cdiv(right, groups), groups)


def product(
    kernels: Kernels, x: Tensor, weight: Tensor, form: Packed, bias: Tensor | None, compute: Compute | None
) -> Tensor | None:
    """Return x @ weight.T + bias as `Kernels.product` does, None if the weight lies at an odd address."""
    if weight.data_ptr() % 2:
        return None
    x = x.contiguous()  # BLAS rounds matrices with other strides differently
    out, int8 = x.new_empty((len(x), form.rows)), compute == "int8"
    if int8 or (len(x) <= MAX_FUSED_ROWS and x.dtype != torch.float32):
        _multiply(_rounded(x, form) if int8 else _Rows(x), weight, form, bias, out)
        return out
    if compute == "bf16" and x.dtype == torch.float32:
        x = x.bfloat16().float()
    return by_decoding(x, form, bias, out, lambda run: dequantize(weight, form, run, x.dtype))


def by_decoding(
    x: Tensor, form: Form, bias: Tensor | None, out: Tensor, dequantized: Callable[[slice], Tensor]
) -> Tensor:
    """Return `out` with x @ weight.T + bias. dequantized: returns some rows of the weight in the dtype of x; they begin
    at a multiple of ROWS."""
    step = max(1, DECODED // (form.columns * x.itemsize) // ROWS) * ROWS
    for low in range(0, form.rows, step):
        run = slice(low, min(form.rows, low + step))
        columns, decoded = out[:, run], dequantized(run).t()
        if bias is None:
            torch.mm(x, decoded, out=columns)
        else:
            torch.addmm(bias[run].to(x.dtype), x, decoded, out=columns)
        del decoded  # free it before the next one is allocated
    return out


def dequantize(weight: Tensor, form: Packed, run: slice, dtype: torch.dtype) -> Tensor:
    """Return the dequantized rows `run`, [n, columns], rounded to dtype; run starts at a multiple of ROWS."""
    count, right = run.stop - run.start, form.blocks[1]
    out = torch.empty((count, form.columns), dtype=dtype, device=weight.device)
    part = weight[run.start // ROWS * right * form.block_bytes :]
    decode_kernel[triton.cdiv(count, BLOCKS * ROWS), right](
        part, part.view(torch.float16), out, count, form.columns, right, BITS=form.codec.bits, GROUP=form.codec.group,
        BLOCKS=BLOCKS, num_warps=4,
    )  # fmt: skip
    return out


class _Rows(NamedTuple):
    """Left factor of product_kernel: x [M, columns], or its int8 codes with their scales and sums, fp32 [M, groups]."""

    x: Tensor
    worth: Tensor | None = None
    sums: Tensor | None = None


def _rounded(x: Tensor, form: Packed) -> _Rows:
    """Return x rounded to 8-bit codes, with scales and sums. Scratch memory is at most BUFFER bytes."""
    group, right = form.codec.group, form.blocks[1]
    encoded = _Rows(
        torch.empty((len(x), right * group), dtype=torch.int8, device=x.device),
        *(torch.empty((len(x), right), dtype=torch.float32, device=x.device) for _ in range(2)),
    )
    step = max(1, BUFFER // (ROUNDED * right * group))
    for low in range(0, len(x), step):
        some = slice(low, min(len(x), low + step))
        codes, scale = rounded_codes(pad(x[some].float(), (0, -form.columns % group)), group)
        encoded.x[some] = codes.nan_to_num(0.0).flatten(-2)
        encoded.worth[some], encoded.sums[some] = scale[..., 0], codes.sum(-1)  # type: ignore[index]
        del codes, scale
    return encoded


def _multiply(rows: _Rows, weight: Tensor, form: Packed, bias: Tensor | None, out: Tensor) -> None:
    """Write rows @ weight.T + bias to `out`, for as many rows at a time as BUFFER holds fp32 results, at least 16."""
    step = max(16, BUFFER // (4 * form.rows) // 16 * 16)
    for low in range(0, len(out), step):
        some = slice(low, min(len(out), low + step))
        part = _Rows(*(None if x is None else x[some] for x in rows))  # type: ignore[arg-type]
        summed = _summed(part, weight, form)
        out[some] = summed if bias is None else summed.add_(bias)
        del summed


def _summed(part: _Rows, weight: Tensor, form: Packed) -> Tensor:
    x, int8, (down, right) = part.x, part.worth is not None, form.blocks
    size = sizes(len(x), form)
    out = torch.empty((size.runs, len(x), form.rows), dtype=torch.float32, device=x.device)
    product_kernel[triton.cdiv(down, BLOCKS), triton.cdiv(len(x), size.rows), size.runs](
        x, part.worth if int8 else x, part.sums if int8 else x, weight, weight.view(torch.float16), out, len(x),
        form.rows, x.shape[1], right, x.stride(0), size.groups, BITS=form.codec.bits, GROUP=form.codec.group,
        BLOCKS=BLOCKS, TILE=size.rows, INT8=int8, WIDEN=INTERPRETED, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out.sum(0) if size.runs > 1 else out[0]


@triton.jit(do_not_specialize=["rows"])  # the last run has fewer rows
def decode_kernel(
    data_at, halves_at, out_at, rows, columns, right, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):
    """Dequantize a weight to out_at [rows, columns]. Program: (BLOCKS blocks of rows, group of columns)."""
    first, group = tl.program_id(0) * BLOCKS, tl.program_id(1)
    codes, scale, minimum = _codes(data_at, halves_at, first, group, rows, right, BITS, GROUP, BLOCKS)
    row, column = first * 16 + tl.arange(0, BLOCKS * 16), group * GROUP + tl.arange(0, GROUP)
    decoded = minimum[:, None] + codes.to(tl.float32) * scale[:, None]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_at + place, decoded.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "groups"])  # these change with the batch
def product_kernel(
    x_at, worth_at, sums_at, data_at, halves_at, out_at, count, rows, columns, right, stride, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, INT8: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute partial products into out_at, fp32 [runs, count, rows].

    Program: (BLOCKS blocks of outputs, TILE rows of x, run of groups). x_at: [count, columns]. With INT8 these are int8
    codes, with scales worth_at and sums sums_at, fp32 [count, right].
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
            if BITS == 8:  # codes from 0 to 255 do not fit int8
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
    """Return codes, uint8 [BLOCKS * 16, GROUP], scale and minimum, fp32 [BLOCKS * 16], of one group of columns.

    The blocks from `first` on are read; blocks after the last one give zeros. Bytes are read in their order in memory:
    (vector, row of the block, column of a quad). The bytes of a vector hold EACH successive quads. So a row's codes
    come in the order (vector, quad of the vector, column of the quad).
    """
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    EACH: tl.constexpr = 8 // LOW
    VECTORS: tl.constexpr = GROUP // 4 // EACH
    block = first + tl.arange(0, BLOCKS)
    valid = (block < (rows + 15) // 16)[:, None]
    start = (block.to(tl.int64) * right + group) * (64 + 2 * GROUP * BITS)
    half = (start // 2)[:, None] + tl.arange(0, 16)[None, :]
    scale = tl.load(halves_at + half, mask=valid, other=0.0).to(tl.float32)
    minimum = tl.load(halves_at + half + 16, mask=valid, other=0.0).to(tl.float32)
    byte = tl.arange(0, VECTORS * 64)
    codes = tl.load(data_at + (start + 64)[:, None] + byte[None, :], mask=valid, other=0)
    if BITS == 4:
        codes = tl.join(codes & 15, codes >> 4)
    elif LOW == 2:
        quads = tl.join(tl.join(codes & 3, codes >> 4 & 3), tl.join(codes >> 2 & 3, codes >> 6))
        if BITS == 3:  # third bits: 8 quads per byte, so one byte for two of the vectors above
            place = (start + 64 + VECTORS * 64)[:, None] + (byte // 128 * 64 + byte % 64)[None, :]
            high = tl.load(data_at + place, mask=valid, other=0) >> (byte // 64 % 2 * 4).to(tl.uint8)[None, :]
            bits = tl.join(tl.join(high & 1, high >> 2 & 1), tl.join(high >> 1 & 1, high >> 3 & 1))
            quads |= bits << 2
        codes = quads
    apart = tl.reshape(codes, (BLOCKS, VECTORS, 16, 4, EACH))
    codes = tl.reshape(tl.permute(apart, (0, 2, 1, 4, 3)), (BLOCKS * 16, GROUP))
    return codes, tl.reshape(scale, (BLOCKS * 16,)), tl.reshape(minimum, (BLOCKS * 16,))


KERNELS = FormatKernels(product)
