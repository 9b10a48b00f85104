"""Weights that are loaded row by row: which tensors of a program, and in which sweeps."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """Tensors of which a forward pass names the rows that it needs, by where they lie.

    Attributes:
        embedding: home of the embedding table; "" if the table is on the device.
        experts: per unit, the homes of its experts' matrices. A row is one expert.
        others: per unit, the homes of the streamed tensors beside those.
        most_tokens: a sweep of more tokens loads the experts' matrices whole, before the unit is computed.
    """

    embedding: str = ""
    experts: Sequence[tuple[str, ...]] = ()
    others: Sequence[tuple[str, ...]] = ()
    most_tokens: int = 0

    def of(self, unit: int) -> tuple[str, ...]:
        """Return the homes of a unit's experts; () if it has none off the device."""
        return self.experts[unit] if unit < len(self.experts) else ()

    def by_rows(self, tokens: int) -> bool:
        """Whether a sweep of this many tokens loads only the experts that its tokens chose."""
        return any(self.experts) and tokens <= self.most_tokens


NOTHING = Demand()
