"""bitsandbytes in 4 bits (NF4, FP4): blocks of numbers of the matrix read as one row, which may cross its rows.

An encoded matrix is the bytes of its tensors, one after the other: codes, two in a byte, the first in the high bits;
absmax of each block in fp32, or its code of 8 bits with nested_absmax of each 256 blocks and nested_quant_map; and
quant_map, the 16 numbers of codes. An element is quant_map[code] * absmax, rounded once; a nested absmax is
nested_quant_map[code] * nested_absmax + offset, rounded twice (`dequantize_4bit` of bitsandbytes/functional.py).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from flexengine.codec.layouts import SCALE_KINDS, PartsLayout
from flexengine.codec.scaled import Undivided
from flexengine.errors import InvalidInput

NAMES = ("nf4", "fp4")


@dataclass(frozen=True)
class FlatBlocks(Undivided):
    """Format of a matrix in blocks that may cross rows."""

    rows: int
    columns: int
    kind: str  # one of NAMES
    block: int  # elements
    nested: int = 0  # blocks that share a nested_absmax; 0 if absmax is in fp32
    offset: float = 0.0  # of nested absmax

    def __post_init__(self) -> None:
        if self.rows * self.columns % 2 or min(self.rows, self.columns, self.block) < 1:
            raise InvalidInput(f"a matrix [{self.rows}, {self.columns}] in {self.name} needs whole bytes of codes")

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.block}" + f"-nested{self.nested}" * bool(self.nested)

    @property
    def blocks(self) -> int:
        """Number of blocks of the matrix."""
        return -(-self.rows * self.columns // self.block)

    @property
    def sizes(self) -> tuple[int, ...]:
        codes, blocks = self.rows * self.columns // 2, self.blocks
        if self.nested:
            return codes, blocks, 4 * 16, 4 * -(-blocks // self.nested), 4 * 256
        return codes, 4 * blocks, 4 * 16

    @cached_property
    def layout(self) -> PartsLayout | None:
        whole = self.columns % self.block == self.block % 32 == 0  # no block crosses rows, and none ends in a part
        if not whole or self.nested & (self.nested - 1):
            return None
        scales, table, *numbers = accumulate(self.sizes[:-1])
        return PartsLayout(
            "table",
            False,
            self.columns,
            row_bytes=self.columns // 2,
            right=self.block,
            cells=self.columns // self.block,
            scales=scales,
            more=table,
            order=numbers[-1] if numbers else 0,
            scale_kind=SCALE_KINDS.index("nested" if self.nested else "f32"),
            nested=max(0, self.nested.bit_length() - 1),
            offset=int.from_bytes(struct.pack("<f", self.offset), "little"),
        )

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        codes, absmax, *maps = torch.split(data.view(-1), [*self.sizes])
        table = maps[0].clone().view(torch.float32)
        if self.columns % self.block == 0 == self.columns % 2:  # no block crosses rows
            pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1).view(torch.float64).view(-1)
            own = codes.view(self.rows, -1).index_select(0, ids).view(-1)
            x = pairs.index_select(0, own.int()).view(torch.float32).view(len(ids), -1, self.block)
            blocks = ids[:, None] * x.shape[1] + torch.arange(x.shape[1], device=data.device)
            return x.mul_(self._scale(absmax, maps, blocks)[..., None]).view(len(ids), -1)
        place = ids[:, None] * self.columns + torch.arange(self.columns, device=data.device)
        code = codes[place // 2] >> (4 - place % 2 * 4).to(torch.uint8) & 15
        return table[code.int()] * self._scale(absmax, maps, place // self.block)

    def _scale(self, absmax: Tensor, maps: Sequence[Tensor], block: Tensor) -> Tensor:
        """Return the scales of blocks, in the shape of their numbers. absmax, maps: bytes of the tensors."""
        if not self.nested:
            return absmax.clone().view(torch.float32)[block]
        each, numbers = (part.clone().view(torch.float32) for part in maps[1:])
        return numbers[absmax[block].int()] * each[block // self.nested] + self.offset


def named(name: str, rows: int, columns: int) -> FlatBlocks:
    """Return the format of this name, without its offset. Raise InvalidInput if there is none."""
    kind, _, rest = name.partition("-")
    block, _, nested = rest.partition("-nested")
    if kind not in NAMES or not block.isdigit() or not (nested or "0").isdigit():
        raise InvalidInput(f"there is no format {name!r} of weights")
    return FlatBlocks(rows, columns, kind, int(block), int(nested or 0))
