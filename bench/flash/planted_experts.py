"""A Mixtral checkpoint with random weights whose successive tokens choose alike experts, as those of trained models do.

Mixtral has no table of positions, so the tokens are made to count: token t is followed by token t + 1. The first `code`
elements of a token's embedding are its code, which no layer changes, and the output projection finds the code again.
Codes of successive tokens are an autoregressive process. Routers read random directions of the code. So a router's
scores are normal, and those of successive tokens have the correlation of the codes.

The router of the next layer gives the same scores one layer earlier, so guesses of this model are always right: a
bench must make them worse (experts_side.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bench.flash.planted import STEADY, successive
from bench.models import MixtralShape


@dataclass(frozen=True)
class PlantedMixtral(MixtralShape):
    """A Mixtral decoder with planted choices of experts.

    Attributes:
        code: elements of a token's code.
        repeated: share of a token's experts that the token before chose. 0.69 is the mean over the layers of the model
            that bench.flash.moe_lm trains; tokens that choose independently have active / experts.
    """

    dtype: str = "bfloat16"
    code: int = 64
    repeated: float = 0.69

    def draw(self, name: str, size: tuple[int, ...], generator: Any) -> Any:
        import torch

        def normal(std: float, *shape: int) -> Any:
            return torch.empty(shape or size).normal_(0.0, std, generator=generator)

        if name.endswith("norm.weight"):
            return torch.ones(size)
        if name.endswith("embed_tokens.weight"):
            values = normal(1.0)
            values[:, : self.code] = self.codes()
            return values
        if name.endswith("lm_head.weight"):
            values = torch.zeros(size)
            values[:, : self.code] = torch.nn.functional.normalize(self.codes()).roll(1, 0)
            return values
        if name.endswith("gate.weight"):
            values = torch.zeros(size)
            values[:, : self.code] = torch.nn.functional.normalize(normal(1.0, size[0], self.code))
            return values
        if name.endswith(("o_proj.weight", "w2.weight")):
            values = normal(STEADY)
            values[: self.code] = 0
            return values
        return normal(0.02)

    def codes(self) -> Any:
        """Return the codes of all tokens, fp32 [vocabulary, code]."""
        import torch

        kept = correlation(self.repeated, self.experts, self.active)
        return successive(self.vocab, self.code, kept, torch.Generator().manual_seed(self.seed))


@lru_cache
def correlation(repeated: float, experts: int, active: int) -> float:
    """Return the correlation of two tokens' normal scores with which they have a share `repeated` of their `active`
    highest ones in common; from 20,000 pairs."""
    import torch

    first, noise = torch.empty(2, 20_000, experts).normal_(generator=torch.Generator().manual_seed(0))
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        second = middle * first + (1 - middle**2) ** 0.5 * noise
        same = first.topk(active).indices[:, :, None] == second.topk(active).indices[:, None]
        low, high = (middle, high) if float(same.any(-1).float().mean()) < repeated else (low, middle)
    return low
