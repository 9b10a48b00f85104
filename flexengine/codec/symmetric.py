"""Codes of 4 bits as other programs read them: a scale per group of 32 numbers of a row, and no minimum.

A number is (code - MIDDLE) * scale, as in compressed-tensors' `pack-quantized` and in GPTQ (`sym`). This takes as many
bytes as `packed.int4`, which has a minimum, too, but groups of 64. Errors of normally distributed numbers are smaller
by 6 % in mean square, and those with heavy tails are equal.
"""

import torch
from torch import Tensor

from flexengine.codec.packed import pack

BITS_OF_4, GROUP_OF_4, MIDDLE = 4, 32, 8
SHARES = (1.05, 0.95, 0.85)  # scales that fits begin with, as shares of the one that reaches the farthest number
STEPS = 2  # least-squares scales of each fit


def fit_symmetric(x: Tensor, dtype: torch.dtype, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 [rows, columns], and scales, [rows, columns / GROUP_OF_4], with a small squared error. Equal
    numbers give equal codes on every machine.

    Args:
        x: fp32 [rows, columns], finite; columns: a multiple of GROUP_OF_4.
        dtype: of the scales: fp32, fp16 or bf16.
        importance: [columns], weight of each column's squared error; None for equal weights.
    """
    groups = x.view(len(x), -1, GROUP_OF_4)
    matters = torch.ones(1) if importance is None else importance.float().view(-1, GROUP_OF_4) + 1e-12
    low, high = groups.amin(-1), groups.amax(-1)
    reach = torch.where(-low >= high, -low, -high) / MIDDLE  # MIDDLE steps go to one end, and one less to the other
    least, best = torch.full_like(reach, torch.inf), reach
    for share in SHARES:
        scales = reach * share
        for _ in range(STEPS):
            steps = _steps(groups, scales)
            spread = (matters * steps * steps).sum(-1)
            scales = torch.where(spread > 0, (matters * steps * groups).sum(-1) / spread, scales)
        scales = scales.to(dtype).float()
        away = _steps(groups, scales) * scales[..., None] - groups
        error = (matters * away * away).sum(-1)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    codes = (_steps(groups, best) + MIDDLE).to(torch.uint8)
    return codes.flatten(1), best.to(dtype)


def _steps(groups: Tensor, scales: Tensor) -> Tensor:
    """Return codes less MIDDLE, fp32, of numbers [..., GROUP_OF_4]; 0 if a scale is 0."""
    divisor = torch.where(scales != 0, scales, torch.inf)[..., None]
    return (groups / divisor).round().clamp(-MIDDLE, MIDDLE - 1)


def words_of(codes: Tensor) -> Tensor:
    """Return codes of 4 bits in words, int32 [rows, columns / 8]: bits 4 i to 4 i + 3 are column 8 word + i. codes:
    uint8 [rows, columns], columns a multiple of 8."""
    return pack(codes.view(-1, 2, 1), BITS_OF_4).view(len(codes), -1).view(torch.int32)
