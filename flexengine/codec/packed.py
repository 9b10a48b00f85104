"""Group-wise asymmetric quantisation (FlexGen section 5; systems 1.6): b-bit codes; per group, a scale and a minimum.

A dequantized element is minimum + code * scale, with both in fp16. Codes are computed from the rounded fp16 scale and
minimum, not from the exact ones. A group of equal numbers has scale 0.

Encoded weight matrices for the product kernels are one array of bytes, in the order in which a kernel reads it.

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

import torch
from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.errors import InvalidInput

BITS, GROUPS = (2, 3, 4, 8), (8, 16, 32, 64, 128)
HALF = torch.finfo(torch.float16)
START, ROUNDS = 0.95, 3  # a fit starts with this share of the range and improves codes and range this many times
ALIKE = (1.0, 0.925, 0.85, 0.775)  # shares of the range that the faster search tries, cut equally from both ends
ROWS = 16
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of each plane by bits of a code, the lowest bits first


@dataclass(frozen=True)
class Groupwise:
    """Codec with a scale and a minimum per group of elements of a row.

    Encoding computes in fp32 and is deterministic: equal numbers give equal bits on every machine."""

    name: str  # for messages and file names
    bits: int  # bits of a code
    group: int  # number of elements that share a scale and a minimum
    fitted: bool = False  # choose scale and minimum for a small squared error, instead of the full range of the group
    alike: bool = False  # if fitted, take the best of the ranges in ALIKE, which is faster than a least-squares fit

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group not in GROUPS:
            fault = f"codec {self.name} has {self.bits} bits and groups of {self.group}"
            raise InvalidInput(f"{fault}; bits must be one of {BITS}, groups one of {GROUPS}")

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def encode(self, x: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes of a matrix, as `fit`. Copies of the last column fill up the last group. Raise InvalidInput
        if a number is not finite or beyond fp16. Arguments as of `Form.encode`."""
        groups = self._grouped(x.float())
        matters = None if importance is None else self._grouped(importance.float().expand(x.shape))
        if not bool((groups.abs() <= HALF.max).all()):  # also refuses NaN
            raise InvalidInput(f"codec {self.name} cannot hold numbers that are not finite or beyond {HALF.max:g}")
        return self.fit(groups, matters)

    def fit(self, groups: Tensor, matters: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, uint8 [..., group], scale and minimum, fp16 [...], of groups.

        Args:
            groups: fp32 [..., group]; the caller has checked that all are finite and within fp16.
            matters: [..., group], weight of each element's squared error; None for equal weights.
        """
        low, high = groups.amin(-1), groups.amax(-1)
        if not self.fitted:
            scale, minimum = self._scale_and_minimum(low, high)
        else:
            scale, minimum = (self._best if self.alike else self._fitted)(groups, matters, low, high)
        return self._codes(groups, scale, minimum), scale, minimum

    def _grouped(self, x: Tensor) -> Tensor:
        if missing := -x.shape[1] % self.group:
            x = torch.cat([x, x[:, -1:].expand(-1, missing)], 1)
        return x.reshape(len(x), -1, self.group)

    def _scale_and_minimum(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and minimum, fp16, that cover the range from `low` to `high`."""
        minimum = low.half()
        levels = low.new_full((), self.levels, dtype=torch.float32)  # see kernels.reference.rounded_codes
        return ((high - minimum.float()).clamp(min=0) / levels).half(), minimum

    def _codes(self, groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        step = scale.float()[..., None]
        above = groups - minimum.float()[..., None]
        codes = torch.where(step > 0, above / torch.where(step > 0, step, 1.0), 0.0)
        return codes.round().clamp(0, self.levels).to(torch.uint8)

    def _fitted(self, groups: Tensor, matters: Tensor | None, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and minimum of a least-squares line through the points (code, number), with codes by round."""
        weights = torch.ones_like(groups) if matters is None else matters + 1e-12
        total, cut = weights.sum(-1), (1 - START) / 2 * (high - low)
        scale, minimum = self._scale_and_minimum(low + cut, high - cut)
        for _ in range(ROUNDS):
            codes = self._codes(groups, scale, minimum).float()
            centre, mean = (codes * weights).sum(-1) / total, (groups * weights).sum(-1) / total
            apart = (codes - centre[..., None]) * weights
            spread = (apart * codes).sum(-1)
            slope = torch.where(spread > 0, (apart * groups).sum(-1) / spread, scale.float())
            scale = slope.half()
            minimum = (mean - scale.float() * centre).clamp(HALF.min, HALF.max).half()
        return scale, minimum

    def _best(self, groups: Tensor, matters: Tensor | None, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and minimum of the range in ALIKE with the least squared error over the group."""
        best = [torch.full_like(low, torch.inf), low.half(), low.half()]
        for share in ALIKE:
            cut = (1 - share) / 2 * (high - low)
            scale, minimum = self._scale_and_minimum(low + cut if share < 1 else low, high - cut)
            codes = self._codes(groups, scale, minimum).float()
            squares = (minimum.float()[..., None] + codes * scale.float()[..., None] - groups) ** 2
            error = (squares if matters is None else squares * matters).sum(-1)
            better = error < best[0]
            best = [torch.where(better, *both) for both in zip((error, scale, minimum), best, strict=True)]
        return best[1], best[2]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes in fewer bits: uint8 [..., n * bits / 8, width]. Bits i * bits .. (i + 1) * bits - 1 of byte row p
    hold row p * 8 / bits + i. codes: uint8 [..., n, width], below 2^bits; n is a multiple of 8 / bits."""
    apart = codes.reshape(*codes.shape[:-2], -1, 8 // bits, codes.shape[-1])
    return (apart << _shifts(bits, codes)).sum(-2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack` packed."""
    codes: Tensor = packed[..., None, :] >> _shifts(bits, packed) & (2**bits - 1)
    return codes.flatten(-3, -2)


def _shifts(bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)[:, None]


@dataclass(frozen=True)
class Packed(Form):
    """Format of a matrix in group-wise codes."""

    codec: Groupwise  # of a group of 32, 64 or 128 columns
    rows: int
    columns: int

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
    def step(self) -> int:
        return ROWS

    @property
    def uses_importance(self) -> bool:
        return self.codec.fitted

    @property
    def native(self) -> int:
        return self.codec.bits

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
        # Offsets in a block of each row's bytes, int64 [ROWS, 4 + bytes of codes].
        row, four = torch.arange(ROWS, device=ids.device)[:, None], torch.arange(4, device=ids.device)
        halves = [2 * row + four[:2] + 2 * ROWS * number for number in range(2)]
        quads = torch.arange(self.codec.group * self.codec.bits // 32, device=ids.device)[:, None] * 4 * ROWS
        own = torch.cat([*halves, (quads + four).flatten() + 4 * ROWS + 4 * row], 1)[ids % ROWS]
        row_bytes = data.view(-1)[starts[..., None] * self.block_bytes + own[:, None]]  # [n, groups, bytes of a row]
        scale, minimum = row_bytes[..., :4].contiguous().view(torch.float16).float().unbind(-1)
        codes, offset, low = torch.zeros(1, dtype=torch.uint8, device=data.device), 4, 0
        for bits in PLANES[self.codec.bits]:
            size = self.codec.group * bits // 8
            plane = row_bytes[..., offset : offset + size]
            codes = codes | unpack(plane.reshape(*plane.shape[:-1], -1, 4), bits).flatten(-2) << low
            offset, low = offset + size, low + bits
        return (minimum[..., None] + codes.float() * scale[..., None]).flatten(1)[:, : self.columns]


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
