"""Group-wise asymmetric quantisation (FlexGen section 5; systems 1.6): b-bit codes; per group, a scale and a minimum.

x' = minimum + code * scale, both in 16 bits. Codes are rounded against the 16-bit numbers that are kept, not against
the exact ones; a group of equal numbers has scale 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.base import BITS, Codec, Part, pack, packed_bytes, unpack
from flexengine.errors import InvalidInput

GROUPS = (8, 16, 32, 64, 128)
HALF = torch.finfo(torch.float16)
START, ROUNDS = 0.95, 3  # of a fit: share of the range it begins with; how often codes and range are improved in turn
ALIKE = (1.0, 0.925, 0.85, 0.775)  # shares of a range, cut alike from both ends, tried where there is no time to fit


@dataclass(frozen=True)
class Groupwise(Codec):
    """bits: of a code. group: elements that share a scale. across: groups run down the columns (along the output
    channel of a weight, the tokens of a KV cache) instead of along the rows. fitted: scale and minimum are those of
    least squared error for the codes they give, rather than all of the range; alike: the best of ALIKE instead."""

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
        if not bool((low >= HALF.min).all() and (high <= HALF.max).all()):  # also refuses what is not a number
            raise InvalidInput(f"codec {self.name} cannot hold numbers that are not finite or beyond {HALF.max:g}")
        codes, scale, minimum = self.fit(groups, matters)
        return {"codes": pack(codes, self.bits), "scale": scale, "minimum": minimum}

    def fit(self, groups: Tensor, matters: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The codes of fp32 groups [..., group], uint8, and their scales and minima, fp16 [...]. matters: how much an
        error of each element does. Numbers that are not finite, or beyond fp16, are not looked for."""
        low, high = groups.amin(-1), groups.amax(-1)
        scale, minimum = self._kept(low, high)
        if self.fitted:
            find = self._best if self.alike else self._fitted
            scale, minimum = find(groups, matters, low, high)
        return self._codes(groups, scale, minimum), scale, minimum

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        groups = _values(unpack(parts["codes"], self.bits), parts["scale"], parts["minimum"])
        return self._ungrouped(groups, rows, columns)

    def slack(self, x: Tensor) -> Tensor:
        """Half a step; and, as scale and minimum are rounded to 16 bits, a step's share of that."""
        groups = self._grouped(x.float())
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / self.levels
        half = (low.abs() + 2 * (high - low)) * HALF.eps + 2 * HALF.smallest_normal
        return self._ungrouped((step / 2 + half).expand(groups.shape), *x.shape)

    @property
    def levels(self) -> int:
        return int(2**self.bits - 1)

    # Groups.

    def _grouped(self, x: Tensor) -> Tensor:
        """[lines, groups, group]; what is missing of the last group repeats the last element."""
        lines = x.T if self.across else x
        missing = -lines.shape[1] % self.group
        if missing:
            lines = torch.cat([lines, lines[:, -1:].expand(-1, missing)], 1)
        return lines.reshape(len(lines), -1, self.group)

    def _ungrouped(self, groups: Tensor, rows: int, columns: int) -> Tensor:
        lines = groups.flatten(-2)
        return lines[:, :rows].T if self.across else lines[:, :columns]

    # A group's numbers.

    def _kept(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and minimum in the 16 bits that are kept."""
        minimum = low.half()
        levels = low.new_full((), self.levels, dtype=torch.float32)  # see kernels.reference.rounded_codes
        return ((high - minimum.float()).clamp(min=0) / levels).half(), minimum

    def _codes(self, groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        step = scale.float()[..., None]
        above = groups - minimum.float()[..., None]
        codes = torch.where(step > 0, above / torch.where(step > 0, step, 1.0), 0.0)
        return codes.round().clamp(0, self.levels).to(torch.uint8)

    def _fitted(self, groups: Tensor, matters: Tensor | None, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds to codes, draws the line of least squares through (code, number), rounds again, and so on."""
        weights = torch.ones_like(groups) if matters is None else matters + 1e-12
        total, cut = weights.sum(-1), (1 - START) / 2 * (high - low)
        scale, minimum = self._kept(low + cut, high - cut)
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
        """The scale and minimum with the least squared error over the group, of the ranges tried."""
        best_scale, best_minimum = self._kept(low, high)
        best = self._error(groups, matters, best_scale, best_minimum)
        for share in ALIKE[1:]:
            cut = (1 - share) / 2 * (high - low)
            scale, minimum = self._kept(low + cut, high - cut)
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
