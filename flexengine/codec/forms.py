"""Formats of encoded weights. A new one is a class derived from `Form` in a file of its own, and an entry of `FORMS`.

Every format works with all kernels at once: they decode its rows in torch, and multiply. Kernels that read a format's
bytes themselves are entries of `kernels.base.KERNELS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from flexengine.errors import InvalidInput, shown

if TYPE_CHECKING:
    from flexengine.codec.layouts import PartsLayout

TOGETHER, SCRATCH = 256, 1 << 20  # most rows and, beyond one row, numbers dequantized at a time


class Form(ABC):
    """Format of an encoded matrix. A dataclass; the encoded matrix is one array of bytes."""

    rows: int  # output channels
    columns: int  # inputs

    @property
    def step(self) -> int:
        """Rows encoded together: rows k * step .. (k + 1) * step - 1; the last ones are filled up."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the format, for files and messages."""

    @property
    @abstractmethod
    def step_bytes(self) -> int:
        """Bytes of `step` rows, if these lie side by side. Raise NotImplementedError if not."""

    @abstractmethod
    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """Return the encoded matrix, uint8 [nbytes]. Equal numbers give equal bytes on every machine.
        Raise InvalidInput if a number is not finite or beyond the range of the format.

        Args:
            x: [rows, columns].
            importance: [columns], weight of each column's squared error; None for equal weights.
        """

    @abstractmethod
    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        """Return rows of the encoded matrix `data`, fp32 [n, columns]; ids: int64 [n], at least one."""

    @property
    def uses_importance(self) -> bool:
        """Whether `encode` makes use of the importance."""
        return False

    @property
    def native(self) -> int | None:
        """Number of the format in the native kernels (`Product.bits` of quantized_gemm.h); None for none."""
        return None if self.layout is None else self.layout.number

    @property
    def layout(self) -> "PartsLayout | None":
        """Where the native kernels find the tensors of a matrix of several tensors; None if it is one, or if they do
        not read it."""
        return None

    @property
    def in_steps(self) -> bool:
        """Whether `kernels.steps.Steps.product` multiplies by such weights."""
        return self.native is not None

    @property
    def group(self) -> int:
        """Columns of x that share a scale if a product rounds x to 8 bits."""
        return 64

    @property
    def block_columns(self) -> int:
        """Columns of a block, if a row needs whole blocks; else 1."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix."""
        return -(-self.rows // self.step) * self.step_bytes

    def spans(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield first byte and number of bytes of the parts of rows low to high - 1, which, one after the other, are
        the matrix of these rows in this format. low: a multiple of `step`."""
        yield low // self.step * self.step_bytes, self.with_rows(high - low).nbytes

    def matrices(self) -> Iterator[tuple[int, int, "Form"]]:
        """Yield first row, first byte and format of each matrix that this one consists of, one after the other. It is
        one if all rows have the same format."""
        yield 0, 0, self

    def with_rows(self, rows: int) -> Self:
        """Return the same format of a matrix with another number of rows."""
        return replace(self, rows=rows)  # type: ignore[type-var]

    def dequantize(self, data: Tensor) -> Tensor:
        """Return the dequantized matrix, fp32 [rows, columns]."""
        return self.dequantize_rows(data, torch.arange(self.rows, device=data.device))

    def dequantize_rows(self, data: Tensor, ids: Tensor) -> Tensor:
        """Return some dequantized rows, fp32 [n, columns]; ids: int64 [n]. Only the bytes of these rows are copied."""
        out = torch.empty(len(ids), self.columns, device=data.device)
        step = max(1, min(TOGETHER, SCRATCH // self.columns))
        for rows, target in zip(torch.split(ids, step), torch.split(out, step), strict=True):
            if len(rows):
                target.copy_(self.decode(data, rows))
        return out


# "module:object" by name; the module is imported when a weight has the format. The object is the class of the format,
# or a function that returns it; its arguments are rows and columns.
FORMS = {name: f"flexengine.codec.packed:{name}" for name in ("int8", "int4", "int3", "int2")}
_GGUF = (
    "q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4 tq1_0 tq2_0"
    " iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m"
)
FORMS.update({name: f"flexengine.codec.gguf_blocks:{name}" for name in _GGUF.split()})
# Families of formats, whose names go on after the first "-", as "fp8-128x128": functions of name, rows and columns.
FAMILIES = dict.fromkeys(("fp8", "mxfp8", "mxfp4", "nvfp4", "w8", "w4"), "flexengine.codec.scaled:named")

FAMILIES |= dict.fromkeys(("gptq2", "gptq3", "gptq4", "gptq8", "awq4"), "flexengine.codec.by_inputs:named")
FAMILIES |= dict.fromkeys(("nf4", "fp4"), "flexengine.codec.flat_blocks:named")


def make_form(name: str, rows: int, columns: int) -> Form:
    """Return a format of FORMS for a matrix, or of several for its rows, as "q4_k+q6_k" for its two halves. Raise
    InvalidInput if there is none of this name."""
    family = FAMILIES.get(name.partition("-")[0]) if "-" in name else None
    path = FORMS.get(name) or ("flexengine.codec.mixed:halves" if "+" in name else family)
    if path is None:
        raise InvalidInput(f"there is no format {shown(name)} of weights; known are {', '.join(FORMS)}")
    form: Form = resolve_name(path)(rows=rows, columns=columns, **{} if name in FORMS else {"name": name})
    return form


@dataclass(frozen=True)
class WeightFormat:
    """Format of one encoded parameter."""

    packed: Form  # of a matrix
    count: int = 0  # of experts, each with its own matrix; 0 for a single matrix without experts
    transposed: bool = False  # whether the checkpoint stores the matrix as [in, out]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the uint8 tensor that holds the parameter."""
        return (self.count, self.packed.nbytes) if self.count else (self.packed.nbytes,)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return prod(self.shape)
