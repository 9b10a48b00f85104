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
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.codec.groupwise import Groupwise, pack, unpack
from flexengine.errors import InvalidInput

ROWS = 16
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of each plane by bits of a code, the lowest bits first


@dataclass(frozen=True)
class Packed(Form):
    """Format of a matrix in group-wise codes."""

    codec: Groupwise  # of a group of 32, 64 or 128 columns
    rows: int
    columns: int
    step: ClassVar[int] = ROWS
    in_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.codec.group % (4 * 8) or min(self.rows, self.columns) < 1:
            raise InvalidInput(
                f"a matrix [{self.rows}, {self.columns}] in {self.codec.name}, groups of {self.codec.group}, cannot be"
                " packed: it needs groups of 32, 64 or 128, and at least one row and one column"
            )

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def uses_importance(self) -> bool:
        return self.codec.fitted

    @property
    def group(self) -> int:
        return self.codec.group

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of blocks down the rows, and of groups along the columns."""
        return -(-self.rows // ROWS), -(-self.columns // self.codec.group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return 2 * 2 * ROWS + ROWS * self.codec.group * self.codec.bits // 8

    @property
    def step_bytes(self) -> int:
        return self.blocks[1] * self.block_bytes

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        down, right = self.blocks
        rows = torch.nn.functional.pad(x, (0, 0, 0, down * ROWS - self.rows))
        codes, *halves = self.codec.encode(rows, importance)
        quads = codes.view(down, ROWS, right, -1, 4).permute(0, 2, 3, 1, 4).flatten(3)  # [down, right, quads, 64]
        apart = (half.view(down, ROWS, right).transpose(1, 2) for half in halves)
        pieces = [half.contiguous().view(torch.uint8) for half in apart]
        low = 0
        for bits in PLANES[self.codec.bits]:
            pieces.append(pack(quads >> low & (2**bits - 1), bits).flatten(2))
            low += bits
        return torch.cat(pieces, 2).flatten()

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        right = self.blocks[1]
        starts = (ids // ROWS * right)[:, None] + torch.arange(right, device=ids.device)
        own = self._own(ids.device)[ids % ROWS]
        row_bytes = data.view(-1)[starts[..., None] * self.block_bytes + own[:, None]]  # [n, groups, bytes of a row]
        scale, minimum = row_bytes[..., :4].contiguous().view(torch.float16).float().unbind(-1)
        codes, offset, low = torch.zeros(1, dtype=torch.uint8, device=data.device), 4, 0
        for bits in PLANES[self.codec.bits]:
            size = self.codec.group * bits // 8
            plane = row_bytes[..., offset : offset + size]
            codes = codes | unpack(plane.reshape(*plane.shape[:-1], -1, 4), bits).flatten(-2) << low
            offset, low = offset + size, low + bits
        return (minimum[..., None] + codes.float() * scale[..., None]).flatten(1)[:, : self.columns]

    def _own(self, device: torch.device) -> Tensor:
        """Return the offsets in a block of each row's bytes, int64 [ROWS, 4 + bytes of codes]."""
        row = torch.arange(ROWS, device=device)[:, None]
        halves = [2 * row + torch.arange(2, device=device) + 2 * ROWS * number for number in range(2)]
        quads = torch.arange(self.codec.group * self.codec.bits // 32, device=device)[:, None] * 4 * ROWS
        codes = (quads + torch.arange(4, device=device)).flatten() + 4 * ROWS + 4 * row
        return torch.cat([*halves, codes], 1)


# Groups run along the input, where errors do less harm than along the output channel.
CODECS = {
    codec.name: codec
    for codec in (
        Groupwise("int8", 8, 64),
        Groupwise("int4", 4, 64, fitted=True),
        Groupwise("int3", 3, 64, fitted=True),
        Groupwise("int2", 2, 32, fitted=True),
    )
}
int8, int4, int3, int2 = (partial(Packed, codec) for codec in CODECS.values())
