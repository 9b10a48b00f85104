"""Encoded matrices as products read them: one string of bytes, in the order in which a kernel walks it.

A matrix [rows, columns] is cut into blocks of ROWS rows by one group of columns. A block is

    scale [ROWS] fp16, minimum [ROWS] fp16, codes

A kernel wants four neighbouring columns of a row in 32 bits, for ROWS rows side by side: a quad of 64 bytes, byte
4 r + e for row r and column e. Codes of fewer than 8 bits share those bytes: the low bits belong to the first quad. Of
3 bits, the lower two come first, 4 quads a byte, then the third, 8 quads a byte.

    bits  planes
    8     quads as they are
    4     bits 0-3 of byte p: quad 2 p; bits 4-7: quad 2 p + 1
    2     bits 2 i, 2 i + 1 of byte p: quad 4 p + i
    3     a plane of 2 bits as above, then one of 1 bit: bit i of byte p: quad 8 p + i

What rows lack of a whole block has scale 0 and minimum 0; what columns lack of a whole group repeats the last one, and
meets activations that are 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.base import unpack
from flexengine.codec.groupwise import Groupwise
from flexengine.errors import InvalidInput

ROWS = 16
TOGETHER = 256  # rows decoded at a time: some megabytes
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of each plane, the lowest first


@dataclass(frozen=True)
class Packed:
    """How a matrix of this shape lies in `nbytes` bytes."""

    codec: Groupwise
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.codec.across or self.codec.group % (4 * 8) or min(self.rows, self.columns) < 1:
            raise InvalidInput(f"a matrix [{self.rows}, {self.columns}] in {self.codec.name}, groups of"
                               f" {self.codec.group}{' across' * self.codec.across}: blocks take groups of 32, 64, 128"
                               " along rows, and a row and a column at least")  # fmt: skip

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of rows, groups of columns."""
        return -(-self.rows // ROWS), -(-self.columns // self.codec.group)

    @property
    def block_bytes(self) -> int:
        return 2 * 2 * ROWS + ROWS * self.codec.group * self.codec.bits // 8

    @property
    def nbytes(self) -> int:
        down, right = self.blocks
        return down * right * self.block_bytes

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """uint8 [nbytes]. x: [rows, columns]; importance: see Codec.encode, which says what is refused."""
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

    def decode(self, data: Tensor) -> Tensor:
        """The matrix in fp32 again, nearly."""
        return self.decode_rows(data, torch.arange(self.rows, device=data.device))

    def decode_rows(self, data: Tensor, ids: Tensor) -> Tensor:
        """Some rows in fp32. ids: int64 [n]; only their own bytes are copied, some rows at a time."""
        out = torch.empty(len(ids), self.columns, device=data.device)
        for rows, target in zip(torch.split(ids, TOGETHER), torch.split(out, TOGETHER), strict=True):
            target.copy_(self._decoded(data, rows))
        return out

    def _decoded(self, data: Tensor, ids: Tensor) -> Tensor:
        right = self.blocks[1]
        starts = (ids // ROWS * right)[:, None] + torch.arange(right, device=ids.device)
        own = self._own(ids.device)[ids % ROWS]
        found = data.view(-1)[starts[..., None] * self.block_bytes + own[:, None]]  # [n, groups, bytes of a row]
        scale, minimum = found[..., :4].contiguous().view(torch.float16).float().unbind(-1)
        codes, at, low = torch.zeros(1, dtype=torch.uint8, device=data.device), 4, 0
        for bits in PLANES[self.codec.bits]:
            size = self.codec.group * bits // 8
            codes = codes | _quads(found[..., at : at + size], bits) << low
            at, low = at + size, low + bits
        return (minimum[..., None] + codes.float() * scale[..., None]).flatten(1)[:, : self.columns]

    def _own(self, device: torch.device) -> Tensor:
        """Where the bytes of each row of a block are in it: [ROWS, 4 + bytes of codes]."""
        row = torch.arange(ROWS, device=device)[:, None]
        halves = [2 * row + torch.arange(2, device=device) + 2 * ROWS * number for number in range(2)]
        quads = torch.arange(self.codec.group * self.codec.bits // 32, device=device)[:, None] * 4 * ROWS
        codes = (quads + torch.arange(4, device=device)).flatten() + 4 * ROWS + 4 * row
        return torch.cat([*halves, codes], 1)


def _bytes(half: Tensor) -> Tensor:
    return half.contiguous().view(torch.uint8)


def _plane(quads: Tensor, bits: int) -> Tensor:
    """[..., quads, 64] numbers below 2^bits into [..., bytes]."""
    each = 8 // bits
    shifts = torch.arange(each, dtype=torch.uint8, device=quads.device)[:, None] * bits
    apart = quads.view(*quads.shape[:-2], -1, each, quads.shape[-1])
    return (apart << shifts).sum(-2, dtype=torch.uint8).flatten(-2)


def _quads(plane: Tensor, bits: int) -> Tensor:
    """The codes [..., group] of a row's bytes [..., bytes] in a plane."""
    each = 8 // bits
    shifts = torch.arange(each, dtype=torch.uint8, device=plane.device)[:, None] * bits
    codes: Tensor = plane.reshape(*plane.shape[:-1], -1, 1, 4) >> shifts & (2**bits - 1)
    return codes.flatten(-3)
