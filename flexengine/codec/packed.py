"""Encoded weight matrices for the product kernels: one array of bytes, in the order in which a kernel reads it.

A matrix [rows, columns] is cut into blocks of ROWS rows by one group of columns. A block is

    scale [ROWS] fp16, minimum [ROWS] fp16, codes

A kernel reads four neighbouring columns of a row as 32 bits, for ROWS rows side by side. These 64 bytes are a quad:
byte 4 r + e holds row r, column e. Codes of fewer than 8 bits share the bytes of a quad, the first quad in the low
bits. Codes of 3 bits are divided into planes: first the lower two bits, 4 quads per byte, then the third bit, 8 quads
per byte.

    bits  planes
    8     quads as they are
    4     bits 0-3 of byte p: quad 2 p; bits 4-7: quad 2 p + 1
    2     bits 2 i, 2 i + 1 of byte p: quad 4 p + i
    3     a plane of 2 bits as above, then one of 1 bit: bit i of byte p: quad 8 p + i

Rows that fill up the last block have scale 0 and minimum 0. Columns that fill up the last group repeat the last column,
and kernels multiply them by activations that are 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.base import unpack
from flexengine.codec.groupwise import Groupwise
from flexengine.errors import InvalidInput

ROWS = 16
TOGETHER = 256  # rows dequantized at a time, for some megabytes of scratch memory
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of each plane by bits of a code, the lowest bits first


@dataclass(frozen=True)
class Packed:
    """Format of an encoded matrix: its codec and shape.

    Attributes:
        codec: codec of a group; groups must run along the rows.
        rows: output channels.
        columns: inputs.
    """

    codec: Groupwise
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.codec.across or self.codec.group % (4 * 8) or min(self.rows, self.columns) < 1:
            raise InvalidInput(f"a matrix [{self.rows}, {self.columns}] in {self.codec.name}, groups of"
                               f" {self.codec.group}{' across' * self.codec.across}, cannot be packed: it needs groups"
                               " of 32, 64 or 128 along the rows, and at least one row and one column")  # fmt: skip

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of blocks down the rows, and of groups along the columns."""
        return -(-self.rows // ROWS), -(-self.columns // self.codec.group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return 2 * 2 * ROWS + ROWS * self.codec.group * self.codec.bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix."""
        down, right = self.blocks
        return down * right * self.block_bytes

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """Return the encoded matrix, uint8 [nbytes].

        Args:
            x: [rows, columns].
            importance: [columns], see `Codec.encode`.

        Raises:
            InvalidInput: a number is not finite or beyond the range of the codec.
        """
        down, right = self.blocks
        rows = torch.nn.functional.pad(x, (0, 0, 0, down * ROWS - self.rows))
        parts = self.codec.encode(rows, importance)
        codes = unpack(parts["codes"], self.codec.bits).view(down, ROWS, right, -1, 4)
        quads = codes.permute(0, 2, 3, 1, 4).flatten(3)  # [down, right, quads, 64]
        pieces = [_bytes(parts[name].view(down, ROWS, right).transpose(1, 2)) for name in ("scale", "minimum")]
        low = 0
        for bits in PLANES[self.codec.bits]:
            pieces.append(_plane(quads >> low & (2**bits - 1), bits))
            low += bits
        return torch.cat(pieces, 2).flatten()

    def dequantize(self, data: Tensor) -> Tensor:
        """Return the dequantized matrix, fp32 [rows, columns]."""
        return self.dequantize_rows(data, torch.arange(self.rows, device=data.device))

    def dequantize_rows(self, data: Tensor, ids: Tensor) -> Tensor:
        """Return some dequantized rows, fp32 [n, columns]; ids: int64 [n]. Only the bytes of these rows are copied."""
        out = torch.empty(len(ids), self.columns, device=data.device)
        for rows, target in zip(torch.split(ids, TOGETHER), torch.split(out, TOGETHER), strict=True):
            if len(rows):
                target.copy_(self._decoded(data, rows))
        return out

    def _decoded(self, data: Tensor, ids: Tensor) -> Tensor:
        """Return the dequantized rows `ids` at once."""
        right = self.blocks[1]
        starts = (ids // ROWS * right)[:, None] + torch.arange(right, device=ids.device)
        own = self._own(ids.device)[ids % ROWS]
        row_bytes = data.view(-1)[starts[..., None] * self.block_bytes + own[:, None]]  # [n, groups, bytes of a row]
        scale, minimum = row_bytes[..., :4].contiguous().view(torch.float16).float().unbind(-1)
        codes, offset, low = torch.zeros(1, dtype=torch.uint8, device=data.device), 4, 0
        for bits in PLANES[self.codec.bits]:
            size = self.codec.group * bits // 8
            codes = codes | _quads(row_bytes[..., offset : offset + size], bits) << low
            offset, low = offset + size, low + bits
        return (minimum[..., None] + codes.float() * scale[..., None]).flatten(1)[:, : self.columns]

    def _own(self, device: torch.device) -> Tensor:
        """Return the offsets in a block of each row's bytes, int64 [ROWS, 4 + bytes of codes]."""
        row = torch.arange(ROWS, device=device)[:, None]
        halves = [2 * row + torch.arange(2, device=device) + 2 * ROWS * number for number in range(2)]
        quads = torch.arange(self.codec.group * self.codec.bits // 32, device=device)[:, None] * 4 * ROWS
        codes = (quads + torch.arange(4, device=device)).flatten() + 4 * ROWS + 4 * row
        return torch.cat([*halves, codes], 1)


def _bytes(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.uint8)


def _plane(quads: Tensor, bits: int) -> Tensor:
    """Return one plane: numbers below 2^bits, uint8 [..., quads, 64], packed into uint8 [..., bytes]."""
    each = 8 // bits
    shifts = torch.arange(each, dtype=torch.uint8, device=quads.device)[:, None] * bits
    apart = quads.view(*quads.shape[:-2], -1, each, quads.shape[-1])
    return (apart << shifts).sum(-2, dtype=torch.uint8).flatten(-2)


def _quads(plane: Tensor, bits: int) -> Tensor:
    """Return the bits [..., group] that a plane holds of a row's codes; plane: the row's bytes, uint8 [..., bytes]."""
    each = 8 // bits
    shifts = torch.arange(each, dtype=torch.uint8, device=plane.device)[:, None] * bits
    codes: Tensor = plane.reshape(*plane.shape[:-1], -1, 1, 4) >> shifts & (2**bits - 1)
    return codes.flatten(-3)
