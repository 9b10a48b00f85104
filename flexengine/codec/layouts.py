"""Where the native kernels find the tensors of a matrix of several tensors, see kernels/parted.h."""

from typing import NamedTuple

# Decoders, in the order of TYPES in kernels/parted.cpp. The first one's number is FIRST in `Product.bits` of
# quantized_gemm.h. "zeros": with zero points.
_BY_ROWS = ("fp8", "fp4", "table", "w4", "w4 zeros", "w8", "w8 zeros", "w8 127ths")
NATIVE = (*_BY_ROWS, "gptq2", "gptq3", "gptq4", "gptq8", "awq4")
FIRST = 48
SCALE_KINDS = ("f32", "f16", "bf16", "e8m0", "e4m3", "nested")
ZERO_KINDS = ("", "bytes", "packed")
WHOLE_KINDS = ("", "divides", "multiplies", "127ths")
ACROSS = 64  # columns; more than a matrix has if there is one scale for all


class PartsLayout(NamedTuple):
    """Numbers of struct Layout of kernels/decoders.h, whose names are the same."""

    kind: str  # one of NATIVE
    dots: bool  # whether x is rounded to int8 and multiplied with codes; else the rounded x, by decoded numbers
    columns: int
    row_bytes: int = 0
    down: int = 1
    right: int = 0
    cells: int = 1
    scales: int = 0
    zeros: int = 0
    more: int = 0
    order: int = 0
    scale_kind: int = 0
    zero_kind: int = 0
    whole_kind: int = 0
    less: int = 0
    flip: int = 0
    nested: int = 0
    offset: int = 0
    pairs: bool = False  # whether numbers without scales are exact in bf16, and multiplied with x rounded to int8

    @property
    def number(self) -> int:
        """Number of the decoder in `Product.bits`."""
        return FIRST + NATIVE.index(self.kind)


def beyond(columns: int) -> int:
    """Return the width of a cell that has all columns."""
    return -(-columns // ACROSS) * ACROSS
