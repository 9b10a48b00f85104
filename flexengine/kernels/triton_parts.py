"""Products with quantised safetensors weights in Triton: base.Kernels.product on formats of codec.scaled and by_inputs.

As for other codes (triton_codes.py), few rows in 16 bits are multiplied by one kernel that dequantizes tiles of weights
in registers, and for more rows, or fp32, weights are dequantized for as many outputs at a time as the GPU's cache holds
and multiplied by cuBLAS. Dequantized numbers are those of `Form.decode`, rounded once to the dtype of x.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.codec.by_inputs import ByInputs
from flexengine.codec.scaled import PER_127, ZERO, Scaled
from flexengine.kernels.base import Compute, FormatKernels, Kernels
from flexengine.kernels.triton_attention import INTERPRETED
from flexengine.kernels.triton_codes import MAX_FUSED_ROWS, PROGRAMS, STAGES, WARPS, by_decoding
from flexengine.kernels.triton_numbers import code_at, number_of, scale_of, spread, zero_at

OUTPUTS, COLUMNS = 64, 64  # of a program's tile of weights
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.int16, "e8m0": torch.uint8, "e4m3": torch.uint8}
_NUMBERS = {"fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1", "w4": "whole", "w8": "whole"}


@dataclass(frozen=True)
class PartPlaces:
    """Where a matrix has its numbers, as constants of the kernels. Codes lie by rows, or as GPTQ and AWQ have them."""

    ORDER: str  # of codes: "rows", "gptq" or "awq"
    BITS: int  # of a code
    NUMBERS: str  # that codes stand for: "e4m3", "e2m1", "whole" or "signed"
    LESS: int  # subtracted from whole codes
    SCALES: str  # key of codec.scaled.SCALES
    ZEROS: str  # order of zero points: "down" (words that hold several rows), "bytes", "gptq", "awq"; "" for none
    MORE: int  # added to zero points
    WHOLE: str  # what a number changes, see `Scaled.whole`
    ORDERED: bool  # whether each column has a group of its own
    WIDTH: int  # columns of a tile that share a scale


@dataclass(frozen=True)
class PartedMatrix:
    """A matrix as arguments of the kernels.

    Attributes:
        tensors: codes, scales, zero points, groups of columns, number that changes all; codes for missing ones.
        sizes: stride of codes (bytes of a row; words of an input), rows and columns that share a scale, strides of
            scales by rows of the grid and by its columns, columns of the grid, and rows.
    """

    places: PartPlaces
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    columns: int


def matrix_of(weight: Tensor, form: Scaled | ByInputs) -> PartedMatrix | None:
    """Return the arguments for an encoded weight; None if the kernels do not read it: scales of other widths than
    powers of two and multiples of COLUMNS, GPTQ in 3 bits, or tensors that begin at odd addresses."""
    parts = torch.split(weight.view(-1), [*form.sizes])
    places, own = _scaled_places(form, parts) if isinstance(form, Scaled) else _input_places(form, parts)
    named, sizes = own
    if places.WIDTH == 0 or places.BITS == 3:
        return None
    typed = {"codes": torch.uint8, "scales": _DTYPES[places.SCALES], "zeros": torch.uint8, "groups": torch.int32}
    typed["factor"] = torch.float32
    tensors = []
    for name, dtype in typed.items():
        part = named.get(name, named["codes"])
        if name in named and part.data_ptr() % dtype.itemsize:
            return None
        tensors.append(part.view(dtype) if name in named else part)
    return PartedMatrix(places, tuple(tensors), sizes, form.columns)


def _width(right: int, columns: int) -> int:
    """Return the columns of a tile that share a scale, 0 if that differs from tile to tile."""
    if right >= columns or right % COLUMNS == 0:
        return COLUMNS
    return right if COLUMNS % right == 0 else 0


Named = tuple[dict[str, Tensor], tuple[int, ...]]


def _scaled_places(form: Scaled, parts: tuple[Tensor, ...]) -> tuple[PartPlaces, Named]:
    down, right = form.block[0] or form.rows, form.block[1] or form.columns
    names = ["codes", "scales", *(["zeros"] if form.zeros else [])]
    names += ["factor"] if form.whole in ("divides", "multiplies") else []
    numbers = "signed" if form.signed else _NUMBERS[form.family]
    places = PartPlaces(
        "rows",
        8 // form.across,
        numbers,
        0 if form.zeros == "packed" else ZERO.get(form.family, 0),
        form.scale_kind,
        {"packed": "down"}.get(form.zeros, form.zeros),
        0,
        form.whole,
        False,
        _width(right, form.columns),
    )
    cells = form.grid[1]
    return places, (dict(zip(names, parts, strict=True)), (form.row_bytes, down, right, cells, 1, cells, form.rows))


def _input_places(form: ByInputs, parts: tuple[Tensor, ...]) -> tuple[PartPlaces, Named]:
    right = form.width if form.groups > 1 else form.columns
    width = 1 if form.ordered else _width(right, form.columns)
    places = PartPlaces(form.kind, form.bits, "whole", 0, form.scales, form.kind, form.less, "", form.ordered, width)
    stride = form.rows if form.kind == "gptq" else form.rows // 8
    named = dict(zip(("codes", "zeros", "scales", "groups"), parts, strict=False))
    return places, (named, (stride, 1, right, 1, form.rows, form.groups, form.rows))


def product(
    kernels: Kernels, x: Tensor, weight: Tensor, form: Scaled | ByInputs, bias: Tensor | None, compute: Compute | None
) -> Tensor | None:
    """Return x @ weight.T + bias as `Kernels.product` does; None for int8, and if `matrix_of` returns none."""
    if compute == "int8" or (matrix := matrix_of(weight, form)) is None:
        return None
    x = x.contiguous()
    out = x.new_empty((len(x), form.rows))
    if len(x) <= MAX_FUSED_ROWS and x.dtype != torch.float32:
        summed = _summed(x, matrix, form.rows)
        return out.copy_(summed if bias is None else summed.add_(bias))
    if compute == "bf16" and x.dtype == torch.float32:
        x = x.bfloat16().float()
    return by_decoding(x, form, bias, out, lambda run: dequantize(matrix, run, x.dtype))


def dequantize(matrix: PartedMatrix, run: slice, dtype: torch.dtype) -> Tensor:
    """Return the dequantized rows `run`, [n, columns], rounded to dtype."""
    count = run.stop - run.start
    out = torch.empty((count, matrix.columns), dtype=dtype, device=matrix.tensors[0].device)
    decode_parts[triton.cdiv(count, OUTPUTS), triton.cdiv(matrix.columns, COLUMNS)](
        *matrix.tensors, out, run.start, count, matrix.columns, *matrix.sizes, **_constants(matrix.places), num_warps=4
    )
    return out


def tiles_of(rows: int, outputs: int, columns: int) -> tuple[int, int, int]:
    """Return rows of x per program, runs of tiles that columns are cut into, and tiles per run, as
    `triton_codes.sizes`."""
    tile, every = max(16, triton.next_power_of_2(rows)), triton.cdiv(columns, COLUMNS)
    runs = max(1, min(PROGRAMS // triton.cdiv(outputs, OUTPUTS), every // 4, 4 * MAX_FUSED_ROWS // tile))
    each = triton.cdiv(every, runs)
    return tile, triton.cdiv(every, each), each


def _summed(x: Tensor, matrix: PartedMatrix, outputs: int) -> Tensor:
    """Return x @ weight.T, fp32. x: at most MAX_FUSED_ROWS rows."""
    tile, runs, each = tiles_of(len(x), outputs, matrix.columns)
    out = torch.empty((runs, len(x), outputs), dtype=torch.float32, device=x.device)
    product_parts[triton.cdiv(outputs, OUTPUTS), runs](
        *matrix.tensors,
        x,
        out,
        len(x),
        each,
        matrix.columns,
        *matrix.sizes,
        **_constants(matrix.places),
        TILE=tile,
        WIDEN=INTERPRETED,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out.sum(0) if runs > 1 else out[0]


def _constants(places: PartPlaces) -> dict[str, object]:
    return {**vars(places), "PER": PER_127, "R": OUTPUTS, "C": COLUMNS}


@triton.jit(do_not_specialize=["first", "count"])
def decode_parts(
    codes_at,
    scales_at,
    zeros_at,
    groups_at,
    factor_at,
    out_at,
    first,
    count,
    columns,
    stride,
    down,
    right,
    own_stride,
    cell_stride,
    cells,
    rows,
    ORDER: tl.constexpr,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    LESS: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    MORE: tl.constexpr,
    WHOLE: tl.constexpr,
    ORDERED: tl.constexpr,
    WIDTH: tl.constexpr,
    PER: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Dequantize rows first to first + count - 1 to out_at [count, columns]. Program: (R rows, C columns)."""
    own, begin = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C
    column = begin + tl.arange(0, C)
    decoded = _decoded(
        codes_at,
        scales_at,
        zeros_at,
        groups_at,
        factor_at,
        first + own,
        begin,
        columns,
        stride,
        down,
        right,
        own_stride,
        cell_stride,
        cells,
        rows,
        ORDER,
        BITS,
        NUMBERS,
        LESS,
        SCALES,
        ZEROS,
        MORE,
        WHOLE,
        ORDERED,
        WIDTH,
        PER,
        R,
        C,
    )
    place = own.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (own < count)[:, None] & (column < columns)[None, :]
    tl.store(out_at + place, decoded.to(out_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "tiles"])
def product_parts(
    codes_at,
    scales_at,
    zeros_at,
    groups_at,
    factor_at,
    x_at,
    out_at,
    count,
    tiles,
    columns,
    stride,
    down,
    right,
    own_stride,
    cell_stride,
    cells,
    rows,
    ORDER: tl.constexpr,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    LESS: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    MORE: tl.constexpr,
    WHOLE: tl.constexpr,
    ORDERED: tl.constexpr,
    WIDTH: tl.constexpr,
    PER: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute partial products into out_at, fp32 [runs, count, rows]. x_at: [count, columns], count at most TILE.
    Program: (R outputs, run of tiles of columns)."""
    output, run, row = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1), tl.arange(0, TILE)
    total = tl.zeros((TILE, R), tl.float32)
    for tile in range(run * tiles, tl.minimum((run + 1) * tiles, tl.cdiv(columns, C))):
        column = tile * C + tl.arange(0, C)
        decoded = _decoded(
            codes_at,
            scales_at,
            zeros_at,
            groups_at,
            factor_at,
            output,
            tile * C,
            columns,
            stride,
            down,
            right,
            own_stride,
            cell_stride,
            cells,
            rows,
            ORDER,
            BITS,
            NUMBERS,
            LESS,
            SCALES,
            ZEROS,
            MORE,
            WHOLE,
            ORDERED,
            WIDTH,
            PER,
            R,
            C,
        )
        inside = (row < count)[:, None] & (column < columns)[None, :]
        x = tl.load(x_at + row[:, None] * columns + column[None, :], mask=inside, other=0)
        decoded = tl.where((column < columns)[None, :], decoded, 0.0).to(x.dtype)
        if WIDEN:  # see triton_attention._dot
            x, decoded = x.to(tl.float32), decoded.to(tl.float32)
        total += tl.dot(x, tl.trans(decoded), input_precision="ieee")
    place = (run * count + row).to(tl.int64)[:, None] * rows + output[None, :]
    tl.store(out_at + place, total, mask=(row < count)[:, None] & (output < rows)[None, :])


@triton.jit
def _decoded(
    codes_at,
    scales_at,
    zeros_at,
    groups_at,
    factor_at,
    row,
    begin,
    columns,
    stride,
    down,
    right,
    own_stride,
    cell_stride,
    cells,
    rows,
    ORDER: tl.constexpr,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    LESS: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    MORE: tl.constexpr,
    WHOLE: tl.constexpr,
    ORDERED: tl.constexpr,
    WIDTH: tl.constexpr,
    PER: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Return the numbers of rows `row` and C columns from `begin` on, fp32 [R, C]. Rows and columns beyond the last
    ones are copies of it."""
    row = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    column = tl.minimum(begin + tl.arange(0, C), columns - 1)[None, :]
    x = number_of(code_at(codes_at, row, column, stride, ORDER, BITS), NUMBERS, LESS)
    if ORDERED:
        cell = tl.load(groups_at + column)
    else:
        cell = tl.minimum((begin + tl.arange(0, C // WIDTH) * WIDTH) // right, cells - 1)[None, :]
    own = row // down
    scale = scale_of(tl.load(scales_at + own * own_stride + cell * cell_stride), SCALES)
    if WHOLE == "divides":
        scale = tl.div_rn(scale, tl.broadcast_to(tl.load(factor_at), scale.shape))
    if WHOLE == "multiplies":
        scale = scale * tl.load(factor_at)
    if ZEROS != "":
        x = x - spread(zero_at(zeros_at, row, own, cell, stride, cells, rows, ZEROS, BITS, MORE), ORDERED, WIDTH, R, C)
    x = x * spread(scale, ORDERED, WIDTH, R, C)
    return x * PER if WHOLE == "127ths" else x


KERNELS = FormatKernels(product)
