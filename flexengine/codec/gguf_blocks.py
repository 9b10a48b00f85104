"""Formats of GGUF files (ggml's block types), whose matrices are read as they lie in the file.

A row is a sequence of blocks of 32 or 256 columns, and rows follow each other. The bytes of a block are those of
ggml's structs (llama.cpp, ggml/src/ggml-common.h). Dequantized numbers are those of gguf-py
(`gguf.quants.dequantize`), bit for bit; a NaN may have another payload.

An element is scale * code, or scale * code - minimum. Scales and minima of the K types are products of an fp16 number
of the block of 256 columns and an integer of the group of 16 or 32 columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.codec.forms import Form
from flexengine.errors import InvalidInput

# Values of the codes 0 to 15 of IQ4_NL and IQ4_XS, and of MXFP4 (twice those of E2M1).
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at a byte of each block, fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _codes(data: Tensor, bits: int, width: int, number: int = 0) -> Tensor:
    """Return codes of `bits` bits, uint8 [n, codes]. data: uint8 [n, bytes]; of each `width` bytes, the first codes of
    all bytes come first, then their second ones, and so on. number: of codes in a byte, 0 for all that fit."""
    shifts = torch.arange(0, bits * (number or 8 // bits), bits, dtype=torch.uint8, device=data.device)
    codes: Tensor = data.view(len(data), -1, 1, width) >> shifts[:, None] & (1 << bits) - 1
    return codes.flatten(1)


def _bits(data: Tensor) -> Tensor:
    """Return the bits of bytes, from the lowest one of the first byte on, uint8 [n, 8 * bytes]."""
    return _codes(data, 1, 1)


def _scaled(scale: Tensor, codes: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Return scale * codes - minimum, fp32 [n, columns]. codes: [n, columns]; scale, minimum: fp32 [n, groups]."""
    groups = codes.float().view(*scale.shape, -1) * scale[..., None]
    return (groups if minimum is None else groups - minimum[..., None]).flatten(1)


def _valued(scale: Tensor, codes: Tensor, values: tuple[int, ...]) -> Tensor:
    return _scaled(scale, torch.tensor(values, dtype=torch.int8, device=codes.device)[codes.int()])


def _q4_0(b: Tensor) -> Tensor:
    return _scaled(_half(b, 0), _codes(b[:, 2:], 4, 16).char() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _scaled(_half(b, 0), _codes(b[:, 4:], 4, 16), -_half(b, 2))


def _q5_0(b: Tensor) -> Tensor:
    return _scaled(_half(b, 0), (_codes(b[:, 6:], 4, 16) | _bits(b[:, 2:6]) << 4).char() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _scaled(_half(b, 0), _codes(b[:, 8:], 4, 16) | _bits(b[:, 4:8]) << 4, -_half(b, 2))


def _q8_0(b: Tensor) -> Tensor:
    return _scaled(_half(b, 0), b[:, 2:].contiguous().view(torch.int8))


def _q2_k(b: Tensor) -> Tensor:
    scales = b[:, :16]
    return _scaled(
        _half(b, 80) * (scales & 15).float(), _codes(b[:, 16:80], 2, 32), _half(b, 82) * (scales >> 4).float()
    )


def _q3_k(b: Tensor) -> Tensor:
    scales = (_codes(b[:, 96:104], 4, 8) | _codes(b[:, 104:108], 2, 4) << 4).char() - 32
    codes = _codes(b[:, 32:96], 2, 32).char() - (_codes(b[:, :32], 1, 32).char() ^ 1) * 4
    return _scaled(_half(b, 108) * scales.float(), codes)


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of Q4_K and Q5_K, fp32 [n, 8] each."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, high & 15 | low >> 2 & 48], 1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 2 & 48], 1)
    return _half(b, 0) * scales.float(), _half(b, 2) * minima.float()


def _q4_k(b: Tensor) -> Tensor:
    scales, minima = _six_bits(b)
    return _scaled(scales, _codes(b[:, 16:], 4, 32), minima)


def _q5_k(b: Tensor) -> Tensor:
    scales, minima = _six_bits(b)
    return _scaled(scales, _codes(b[:, 48:], 4, 32) | _codes(b[:, 16:48], 1, 32) << 4, minima)


def _q6_k(b: Tensor) -> Tensor:
    codes = (_codes(b[:, :128], 4, 64) | _codes(b[:, 128:192], 2, 32) << 4).char() - 32
    return _scaled(_half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float(), codes)


def _iq4_nl(b: Tensor) -> Tensor:
    return _valued(_half(b, 0), _codes(b[:, 2:], 4, 16), IQ4)


def _iq4_xs(b: Tensor) -> Tensor:
    scales = (_codes(b[:, 4:8], 4, 1) | _codes(b[:, 2:4], 2, 1) << 4).char() - 32
    return _valued(_half(b, 0) * scales.float(), _codes(b[:, 8:], 4, 16), IQ4)


def _mxfp4(b: Tensor) -> Tensor:
    power = b[:, :1].int()  # of two, plus 128; the lowest two scales are subnormal
    scales = torch.where(power < 2, 0x00200000 << power.clamp(max=1), (power - 1) << 23).view(torch.float32)
    return _valued(scales, _codes(b[:, 1:], 4, 16), FP4)


def _tq1_0(b: Tensor) -> Tensor:
    """Digits to the base 3 of fixed-point numbers: five in a byte, four in the last bytes."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=b.device)[:, None]
    digits = [b[:, None, low:end] * powers[:n] for low, end, n in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    codes = torch.cat([part.flatten(1) for part in digits], 1).int() * 3 >> 8
    return _scaled(_half(b, 52), codes - 1)


def _tq2_0(b: Tensor) -> Tensor:
    return _scaled(_half(b, 64), _codes(b[:, :64], 2, 32).char() - 1)


def _by_gguf(kind: str, b: Tensor) -> Tensor:
    """Return the blocks of types whose codes are numbers of grid points, dequantized by gguf-py, on the CPU."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(b.cpu().numpy(), GGMLQuantizationType[kind.upper()])).to(b.device)


class Block(NamedTuple):
    """Geometry of a block type."""

    columns: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]  # uint8 [n, nbytes] to fp32 [n, columns]


BLOCKS = {
    "q4_0": Block(32, 18, _q4_0),
    "q4_1": Block(32, 20, _q4_1),
    "q5_0": Block(32, 22, _q5_0),
    "q5_1": Block(32, 24, _q5_1),
    "q8_0": Block(32, 34, _q8_0),
    "q2_k": Block(256, 84, _q2_k),
    "q3_k": Block(256, 110, _q3_k),
    "q4_k": Block(256, 144, _q4_k),
    "q5_k": Block(256, 176, _q5_k),
    "q6_k": Block(256, 210, _q6_k),
    "iq4_nl": Block(32, 18, _iq4_nl),
    "iq4_xs": Block(256, 136, _iq4_xs),
    "mxfp4": Block(32, 17, _mxfp4),
    "tq1_0": Block(256, 54, _tq1_0),
    "tq2_0": Block(256, 66, _tq2_0),
}
_GRIDS = {"iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq3_xxs": 98, "iq3_s": 110, "iq1_s": 50, "iq1_m": 56}
BLOCKS.update({name: Block(256, nbytes, partial(_by_gguf, name)) for name, nbytes in _GRIDS.items()})
# Types that the native kernels read, in the order of TYPES in kernels/blocks.cpp; the first one's number is BLOCKS in
# quantized_gemm.h.
NATIVE, FIRST = [*BLOCKS][: [*BLOCKS].index("mxfp4") + 1], 16


@dataclass(frozen=True)
class GgufBlocks(Form):
    """Format of a matrix in blocks of one of ggml's types."""

    kind: str  # one of BLOCKS
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.columns % self.block_columns or min(self.rows, self.columns) < 1:
            raise InvalidInput(
                f"a matrix [{self.rows}, {self.columns}] cannot be in {self.kind.upper()}: it needs at least one row,"
                f" and rows of whole blocks of {self.block_columns} columns"
            )

    @property
    def name(self) -> str:
        return self.kind

    @property
    def block(self) -> Block:
        """The geometry of a block."""
        return BLOCKS[self.kind]

    @property
    def native(self) -> int | None:
        return FIRST + NATIVE.index(self.kind) if self.kind in NATIVE else None

    @property
    def block_columns(self) -> int:
        return self.block.columns

    @property
    def step_bytes(self) -> int:
        return self.columns // self.block_columns * self.block.nbytes

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        made = "read from GGUF files only, not made from other weights; encode as int8, int4, int3 or int2"
        raise InvalidInput(f"weights in {self.kind.upper()} are {made}")

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        rows = data.view(-1, self.step_bytes)[ids]
        return self.block.decode(rows.view(-1, self.block.nbytes)).view(len(ids), self.columns)


def __getattr__(name: str) -> Callable[..., GgufBlocks]:
    """Return the function that makes the format of this name, for `codec.forms.FORMS`."""
    if name not in BLOCKS:
        raise AttributeError(name)
    return partial(GgufBlocks, name)
