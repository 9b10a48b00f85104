"""Blocks of GGUF types for tests: ordinary ones, and ones with the scales that go wrong most easily."""

import torch
from torch import Tensor

from flexengine.codec.gguf_blocks import BLOCKS

# Bytes of a block's fp16 numbers, by type; MXFP4 has none, and those of IQ1_M lie in parts.
HALVES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": (), "tq1_0": (52,),
    "tq2_0": (64,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "iq1_s": (0,),
}  # fmt: skip
# Bits of fp16 numbers: zeros, subnormal ones, one, the largest, infinities, NaN.
HARD = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01)


def _with_halves(kind: str, blocks: Tensor, halves: Tensor) -> Tensor:
    """Return the blocks with these fp16 numbers, int16 [n, numbers]."""
    for number, at in enumerate(HALVES.get(kind, ())):
        blocks[:, at : at + 2] = halves.view(torch.uint8).view(-1, 2, 2)[:, number]
    return blocks


def _any_blocks(kind: str, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, BLOCKS[kind].nbytes), generator=generator, dtype=torch.uint8)


def random_blocks(kind: str, count: int, seed: int = 0) -> Tensor:
    """Return blocks with random codes and ordinary scales, as trained weights have: uint8 [count, nbytes]."""
    blocks, generator = _any_blocks(kind, count, seed), torch.Generator().manual_seed(seed + 1)
    if kind == "mxfp4":
        blocks[:, 0] = torch.randint(115, 125, (count,), generator=generator)
    if kind == "iq1_m":
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20  # the highest bits of the scale
    halves = (torch.randn(count, 2, generator=generator) * 0.02).half()
    return _with_halves(kind, blocks, halves.view(torch.int16))


def special_blocks(kind: str) -> Tensor:
    """Return blocks with random codes and every pair of HARD numbers, or every exponent: uint8 [n, nbytes]."""
    if kind == "mxfp4":
        blocks = _any_blocks(kind, 1024, 2)
        blocks[:, 0] = torch.arange(1024) % 256
        return blocks
    hard = torch.tensor(HARD, dtype=torch.int32).to(torch.int16)
    pairs = torch.cartesian_prod(hard, hard).repeat(4, 1)
    return _with_halves(kind, _any_blocks(kind, len(pairs), 2), pairs)
