"""Formats of safetensors checkpoints whose matrices are codes, row by row, and a grid of scales in tensors of its own.

An encoded matrix is the bytes of its tensors, one after the other: codes, scales, zero points, a scale of the whole
matrix. An element is (code - zero point) * scale in fp32, with one rounding at most; a scale of the whole matrix
changes the other scales first, which are rounded then, too. Sources:

* fp8: DeepSeek-V3 (inference/fp8_cast_bf16.py), Qwen3-FP8 and `finegrained_fp8` of transformers; per row and per matrix
  compressed-tensors `float-quantized`. A scale is a factor, also where its name ends with "_inv".
* mxfp4, mxfp8: OCP Microscaling Formats (MX) 1.0; gpt-oss (`<name>_blocks`, `<name>_scales`).
* nvfp4: compressed-tensors `nvfp4-pack-quantized`, whose scale of the matrix divides; ModelOpt's multiplies.
* w4, w8: compressed-tensors `pack-quantized` and `int-quantized`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.codec.layouts import NATIVE, SCALE_KINDS, WHOLE_KINDS, ZERO_KINDS, PartsLayout, beyond
from flexengine.errors import InvalidInput

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
PER_127 = 7.874015718698502e-3  # of a code of LLM.int8 (bitsandbytes, `int8_vectorwise_dequant`)
ZERO = {"w4": 8, "w8": 128}  # zero point of unsigned codes, if a matrix has no zero points


class Part(NamedTuple):
    """Bytes of a matrix that are a tensor of the checkpoint."""

    nbytes: int  # of a run of rows
    rows: int  # of the run; 0 for all rows of the matrix


class OfCheckpoint(Form):
    """Format of a matrix that consists of several tensors of a checkpoint, one after the other."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        raise NotImplementedError

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        raise InvalidInput(f"{self.name} is a format of checkpoints; encode weights as int8, int4, int3 or int2")


class Undivided(OfCheckpoint):
    """Format whose rows do not lie apart: a matrix is read as a whole."""

    @property
    def step(self) -> int:
        return self.rows

    @property
    def step_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def block_columns(self) -> int:
        return 32


class Parted(OfCheckpoint):
    """Format whose tensors each lie row by row, or are of all rows."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors, in the order of their bytes."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        return lcm(*(part.rows for part in self.parts if part.rows))

    @property
    def step_bytes(self) -> int:
        raise NotImplementedError(f"rows in {self.name} lie in several places")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(part.nbytes * (-(-self.rows // part.rows) if part.rows else 1) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def spans(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        start = 0
        for part, nbytes in zip(self.parts, self.sizes, strict=True):
            if part.rows:
                yield start + low // part.rows * part.nbytes, -(-(high - low) // part.rows) * part.nbytes
            else:
                yield start, part.nbytes
            start += nbytes


def _e8m0(data: Tensor) -> Tensor:
    """Powers of two: 2^(byte - 127), of which the least is subnormal; 255 is NaN."""
    power = data.int()
    bits = torch.where(power == 0, 1 << 22, torch.where(power == 255, 0x7FC00000, power << 23))
    return bits.int().view(torch.float32)


# Decoders of scales, uint8 [n, m * bytes] to fp32 [n, m], with the bytes of one.
SCALES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "f32": (4, lambda data: data.view(torch.float32)),
    "f16": (2, lambda data: data.view(torch.float16).float()),
    "bf16": (2, lambda data: data.view(torch.bfloat16).float()),
    "e8m0": (1, _e8m0),
    "e4m3": (1, lambda data: data.view(torch.float8_e4m3fn).float()),
}


def _bytes() -> Tensor:
    return torch.arange(256, dtype=torch.uint8)[:, None]


def _nibbles() -> Tensor:
    return torch.cat([_bytes() & 15, _bytes() >> 4], 1)


_E4M3 = lambda: _bytes().view(torch.float8_e4m3fn).float()  # noqa: E731
# Numbers of each byte of codes, fp32 [256, numbers in a byte], with the usual scales. w8 has unsigned codes.
_FAMILIES: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "fp8": ("f32", _E4M3),
    "mxfp8": ("e8m0", _E4M3),
    "mxfp4": ("e8m0", lambda: torch.tensor(E2M1)[_nibbles().int()]),
    "nvfp4": ("e4m3", lambda: torch.tensor(E2M1)[_nibbles().int()]),
    "w8": ("bf16", lambda: _bytes().float()),
    "w4": ("bf16", lambda: _nibbles().float()),
}


@lru_cache
def _numbers(family: str, less: int, signed: bool, device: torch.device) -> Tensor:
    """Return the numbers of each byte of codes, as _FAMILIES has them, less a number, as one element of 4 or 8 bytes:
    torch looks these up four times as fast as rows. signed: whether codes are signed bytes."""
    numbers = _bytes().view(torch.int8).float() if signed else _FAMILIES[family][1]() - less
    return numbers.view(torch.float64 if numbers.shape[1] == 2 else torch.float32).view(-1).to(device)


@dataclass(frozen=True)
class Scaled(Parted):
    """Format of a matrix of codes with a grid of scales."""

    rows: int
    columns: int
    family: str  # one of _FAMILIES
    block: tuple[int, int]  # rows and columns that share a scale; 0 for all
    scales: str = ""  # one of SCALES; "" for the usual one
    # Zero points of scales: "packed" as codes are, along columns; "bytes", signed, of codes less ZERO; "" for none.
    zeros: str = ""
    # What an fp32 scale of the matrix does to the others: "divides", "multiplies"; "" for none. Without such a scale,
    # "127ths" multiplies elements by PER_127.
    whole: str = ""
    signed: bool = False  # whether codes of w8 are signed

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1 or (not self._in_words and self.columns % self.across):
            raise InvalidInput(f"a matrix [{self.rows}, {self.columns}] in {self.name} needs whole bytes of codes")

    @property
    def name(self) -> str:
        grid = {(0, 0): "tensor", (1, 0): "row"}.get(self.block)
        grid = grid or (str(self.block[1]) if self.block[0] == 1 else f"{self.block[0]}x{self.block[1]}")
        zeros = f"{self.zeros}zeros" if self.zeros else ""
        return "-".join(filter(None, (self.family, grid, self.scales, zeros, self.whole, "signed" * self.signed)))

    @property
    def across(self) -> int:
        """Codes in a byte."""
        return 2 if self.family.endswith("4") else 1

    @property
    def block_columns(self) -> int:
        return 32

    @property
    def grid(self) -> tuple[int, int]:
        """Scales down the rows and along the columns."""
        down, right = self.block
        return -(-self.rows // down) if down else 1, -(-self.columns // right) if right else 1

    @property
    def scale_kind(self) -> str:
        """The key of SCALES."""
        return self.scales or _FAMILIES[self.family][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        nbytes = -(-self.columns // self.across)
        return -(-nbytes // 4) * 4 if self._in_words else nbytes

    @property
    def _in_words(self) -> bool:
        """Whether a row of codes is filled up to whole words of 32 bits."""
        return self.family in ZERO and not self.signed

    @property
    def parts(self) -> tuple[Part, ...]:
        down, (_, right) = self.block[0], self.grid
        parts = [Part(self.row_bytes, 1), Part(right * SCALES[self.scale_kind][0], down)]
        if self.zeros == "packed":  # words of 32 bits, each of a column of the grid and of some of its rows
            parts.append(Part(right * 4, down * 4 * self.across))
        elif self.zeros:
            parts.append(Part(right, down))
        if self.whole in ("divides", "multiplies"):
            parts.append(Part(4, 0))
        return tuple(parts)

    @cached_property
    def layout(self) -> PartsLayout | None:
        down, right = self.block
        kind = {"fp8": "fp8", "mxfp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}.get(self.family, self.family)
        if self.zeros or self.whole == "127ths":
            kind = f"{kind} {'zeros' if self.zeros else self.whole}"
        unfit = self.signed and self.zeros == "packed"
        if right % 16 or unfit or kind not in NATIVE or self.sizes[0] < 4:
            return None
        _, scales, *starts = accumulate(self.sizes[:-1], initial=0)
        return PartsLayout(
            kind,
            kind != "fp8" and right % (16 if kind == "fp4" else 32) == 0,
            self.columns,
            row_bytes=self.row_bytes,
            down=down or self.rows,
            right=right or beyond(self.columns),
            cells=self.grid[1],
            scales=scales,
            zeros=starts[0] if self.zeros else 0,
            more=starts[-1] if starts else 0,
            scale_kind=SCALE_KINDS.index(self.scale_kind),
            zero_kind=ZERO_KINDS.index(self.zeros),
            whole_kind=WHOLE_KINDS.index(self.whole),
            flip=0x80808080 if self.family == "w8" and not self.signed else 0,
            pairs=kind == "fp8" and right % 64 == 0,
        )

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        codes, scales, *more = torch.split(data.view(-1), [*self.sizes])
        less = 0 if self.zeros == "packed" or self.signed else ZERO.get(self.family, 0)
        numbers = _numbers(self.family, less, self.signed, data.device)
        own = codes.view(self.rows, -1).index_select(0, ids).view(-1)
        found = numbers.index_select(0, own.int()).view(torch.float32)
        x = found.view(len(ids), -1)[:, : self.columns]
        cells = ids // self.block[0] if self.block[0] else torch.zeros_like(ids)
        scale = SCALES[self.scale_kind][1](scales.view(self.grid[0], -1)[cells])
        if self.whole in ("divides", "multiplies"):
            factor = more.pop().clone().view(torch.float32)
            scale = scale / factor if self.whole == "divides" else scale * factor
        if self.zeros:
            self._with_grid(Tensor.sub_, x, self._zeros(more[0], cells))
        self._with_grid(Tensor.mul_, x, scale)
        return x.mul_(PER_127) if self.whole == "127ths" else x

    def _zeros(self, data: Tensor, cells: Tensor) -> Tensor:
        """Return zero points, fp32 [n, columns of the grid]. cells: int64 [n], rows of the grid."""
        right = self.grid[1]
        if self.zeros == "bytes":
            return data.view(torch.int8).view(-1, right)[cells].float()
        bits, number = 8 // self.across, 4 * self.across
        words = data.view(-1, right, 4)[cells // number].contiguous().view(torch.int32)[..., 0]
        return (words >> (cells % number * bits)[:, None].int() & (1 << bits) - 1).float()

    def _with_grid(self, change: Callable[[Tensor, Tensor], Tensor], x: Tensor, cells: Tensor) -> None:
        """Change x, [n, columns], in place by the number of each column's cell. cells: [n, columns of the grid]."""
        width = self.block[1] or self.columns
        whole = self.columns // width * width
        if whole:
            change(x[:, :whole].view(len(x), -1, width), cells[:, : whole // width, None])
        if whole < self.columns:
            change(x[:, whole:], cells[:, -1:])


def named(name: str, rows: int, columns: int) -> Scaled:
    """Return the format of this name. Raise InvalidInput if there is none."""
    family, _, rest = name.partition("-")
    grid, *more = rest.split("-")
    known = {"tensor": (0, 0), "row": (1, 0)}
    try:
        down, _, right = grid.rpartition("x")
        block = known.get(grid) or (int(down or 1), int(right))
    except ValueError:
        raise InvalidInput(f"there is no format {name!r} of weights") from None
    scales = next((word for word in more if word in SCALES), "")
    zeros = next((word.removesuffix("zeros") for word in more if word.endswith("zeros")), "")
    whole = next((word for word in more if word in ("divides", "multiplies", "127ths")), "")
    form = Scaled(rows, columns, family, block, scales, zeros, whole, "signed" in more)
    if form.name != name or prod(form.sizes) == 0:
        raise InvalidInput(f"there is no format {name!r} of weights")
    return form
