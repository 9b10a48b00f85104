"""8 bits per element and one scale per row, symmetric: what integer products multiply with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.base import Codec, Part
from flexengine.errors import InvalidInput

LEVELS = 127


@dataclass(frozen=True)
class Channel8(Codec):
    """x' = code * scale of its row: an output channel of a weight."""

    name: str

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"codes": Part((rows, columns), torch.int8), "scale": Part((rows,), torch.float32)}

    def encode(self, x: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        most = x.float().abs().amax(1)
        if not bool(torch.isfinite(most).all()):
            raise InvalidInput(f"codec {self.name} cannot hold numbers that are not finite")
        scale = most / LEVELS
        step = torch.where(scale > 0, scale, 1.0)[:, None]
        return {"codes": (x.float() / step).round().clamp(-LEVELS, LEVELS).to(torch.int8), "scale": scale}

    def decode(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        return parts["codes"].float() * parts["scale"][:, None]

    def slack(self, x: Tensor) -> Tensor:
        most = x.float().abs().amax(1, keepdim=True)
        return (most / LEVELS / 2 * (1 + 1e-5)).expand(x.shape)
