"""Group-wise asymmetric quantisation (FlexGen section 5; systems 1.6): b-bit codes; per group, a scale and a minimum.

A dequantized element is minimum + code * scale, with both in fp16. Codes are computed from the rounded fp16 scale and
minimum, not from the exact ones. A group of equal numbers has scale 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.errors import InvalidInput

BITS, GROUPS = (2, 3, 4, 8), (8, 16, 32, 64, 128)
HALF = torch.finfo(torch.float16)
START, ROUNDS = 0.95, 3  # a fit starts with this share of the range and improves codes and range this many times
ALIKE = (1.0, 0.925, 0.85, 0.775)  # shares of the range that the faster search tries, cut equally from both ends


class GroupCodes(NamedTuple):
    """Encoded groups."""

    codes: Tensor  # uint8 [..., group]
    scale: Tensor  # fp16 [...]
    minimum: Tensor  # fp16 [...]


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
            raise InvalidInput(
                f"codec {self.name} has {self.bits} bits and groups of {self.group};"
                f" bits must be one of {BITS}, groups one of {GROUPS}"
            )

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def encode(self, x: Tensor, importance: Tensor | None = None) -> GroupCodes:
        """Return the codes of a matrix. Copies of the last column fill up the last group. Raise InvalidInput if a
        number is not finite or beyond fp16. Arguments as of `Form.encode`."""
        groups = self._grouped(x.float())
        matters = None if importance is None else self._grouped(importance.float().expand(x.shape))
        if not bool((groups.abs() <= HALF.max).all()):  # also refuses NaN
            raise InvalidInput(f"codec {self.name} cannot hold numbers that are not finite or beyond {HALF.max:g}")
        return self.fit(groups, matters)

    def fit(self, groups: Tensor, matters: Tensor | None = None) -> GroupCodes:
        """Return the codes of groups.

        Args:
            groups: fp32 [..., group]; the caller has checked that all are finite and within fp16.
            matters: [..., group], weight of each element's squared error; None for equal weights.
        """
        low, high = groups.amin(-1), groups.amax(-1)
        if not self.fitted:
            scale, minimum = self._scale_and_minimum(low, high)
        else:
            scale, minimum = (self._best if self.alike else self._fitted)(groups, matters, low, high)
        return GroupCodes(self._codes(groups, scale, minimum), scale, minimum)

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
