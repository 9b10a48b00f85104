"""Group-wise asymmetric quantisation (FlexGen section 5; systems 1.6): b-bit codes; per group, a scale and a minimum.

A dequantized element is minimum + code * scale, with both in fp16. Codes are computed from the rounded fp16 scale and
minimum, not from the exact ones. A group of equal numbers has scale 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.base import BITS, Codec, Part, pack, packed_bytes, unpack
from flexengine.errors import InvalidInput

GROUPS = (8, 16, 32, 64, 128)
HALF = torch.finfo(torch.float16)
START, ROUNDS = 0.95, 3  # a fit starts with this share of the range and improves codes and range this many times
ALIKE = (1.0, 0.925, 0.85, 0.775)  # shares of the range that the faster search tries, cut equally from both ends


@dataclass(frozen=True)
class Groupwise(Codec):
    """Codec with a scale and a minimum per group of elements.

    Attributes:
        name: for messages and file names.
        bits: bits of a code.
        group: number of elements that share a scale and a minimum.
        across: groups run down the columns (along the output channel of a weight, or the tokens of a KV cache) instead
            of along the rows.
        fitted: choose scale and minimum for a small squared error, instead of the full range of the group.
        alike: if fitted, take the best of the ranges in ALIKE, which is faster than a least-squares fit.
    """

    name: str
    bits: int
    group: int
    across: bool = False
    fitted: bool = False
    alike: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group not in GROUPS:
            raise InvalidInput(f"codec {self.name} has {self.bits} bits and groups of {self.group};"
                               f" bits must be one of {BITS}, groups one of {GROUPS}")  # fmt: skip

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        lines, length = (columns, rows) if self.across else (rows, columns)
        groups = -(-length // self.group)
        return {
            "codes": Part((lines, groups, packed_bytes(self.group, self.bits)), torch.uint8),
            "scale": Part((lines, groups), torch.float16),
            "minimum": Part((lines, groups), torch.float16),
        }

    def encode(self, x: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        groups = self._grouped(x.float())
        matters = None
        if importance is not None:
            matters = self._grouped(importance.float().expand(x.shape))
        low, high = groups.amin(-1), groups.amax(-1)
        if not bool((low >= HALF.min).all() and (high <= HALF.max).all()):  # also refuses NaN
            raise InvalidInput(f"codec {self.name} cannot hold numbers that are not finite or beyond {HALF.max:g}")
        codes, scale, minimum = self.fit(groups, matters)
        return {"codes": pack(codes, self.bits), "scale": scale, "minimum": minimum}

    def fit(self, groups: Tensor, matters: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, uint8 [..., group], scales and minima, fp16 [...], of groups.

        Args:
            groups: fp32 [..., group]; the caller has checked that all are finite and within fp16.
            matters: [..., group], weight of each element's squared error; None for equal weights.
        """
        low, high = groups.amin(-1), groups.amax(-1)
        scale, minimum = self._scale_and_minimum(low, high)
        if self.fitted:
            search = self._best if self.alike else self._fitted
            scale, minimum = search(groups, matters, low, high)
        return self._codes(groups, scale, minimum), scale, minimum

    def dequantize(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        groups = _values(unpack(parts["codes"], self.bits), parts["scale"], parts["minimum"])
        return self._ungrouped(groups, rows, columns)

    def slack(self, x: Tensor) -> Tensor:
        """Return half a step, plus the error that rounding scale and minimum to fp16 adds, [rows, columns]."""
        groups = self._grouped(x.float())
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / self.levels
        half = (low.abs() + 2 * (high - low)) * HALF.eps + 2 * HALF.smallest_normal
        return self._ungrouped((step / 2 + half).expand(groups.shape), *x.shape)

    @property
    def levels(self) -> int:
        return int(2**self.bits - 1)

    def _grouped(self, x: Tensor) -> Tensor:
        """Return x as [lines, groups, group]; copies of the last element fill up the last group."""
        lines = x.T if self.across else x
        missing = -lines.shape[1] % self.group
        if missing:
            lines = torch.cat([lines, lines[:, -1:].expand(-1, missing)], 1)
        return lines.reshape(len(lines), -1, self.group)

    def _ungrouped(self, groups: Tensor, rows: int, columns: int) -> Tensor:
        lines = groups.flatten(-2)
        return lines[:, :rows].T if self.across else lines[:, :columns]

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
        """Return scale and minimum of a least-squares fit.

        Each round computes the codes, then fits a line through the points (code, number).
        """
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
        best_scale, best_minimum = self._scale_and_minimum(low, high)
        best = self._error(groups, matters, best_scale, best_minimum)
        for share in ALIKE[1:]:
            cut = (1 - share) / 2 * (high - low)
            scale, minimum = self._scale_and_minimum(low + cut, high - cut)
            error = self._error(groups, matters, scale, minimum)
            better = error < best
            best = torch.where(better, error, best)
            best_scale = torch.where(better, scale, best_scale)
            best_minimum = torch.where(better, minimum, best_minimum)
        return best_scale, best_minimum

    def _error(self, groups: Tensor, matters: Tensor | None, scale: Tensor, minimum: Tensor) -> Tensor:
        squares = (_values(self._codes(groups, scale, minimum), scale, minimum) - groups) ** 2
        return (squares if matters is None else squares * matters).sum(-1)


def _values(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return minimum.float()[..., None] + codes.float() * scale.float()[..., None]
