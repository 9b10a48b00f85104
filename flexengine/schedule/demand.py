"""Weights of which a sweep loads only the rows that it needs: embedding and experts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """Tiers of the weights that are loaded by rows.

    Attributes:
        embedding: tier of the embedding table; "" if the table is on the device.
        experts: by unit, the tiers of the experts' matrices. A row is one expert.
        others: by unit, the tiers of the other streamed tensors.
        most_tokens: a sweep of more tokens loads whole matrices of experts, before the unit is computed.
    """

    embedding: str = ""
    experts: Sequence[tuple[str, ...]] = ()
    others: Sequence[tuple[str, ...]] = ()
    most_tokens: int = 0

    def of(self, unit: int) -> tuple[str, ...]:
        """Return the tiers of a unit's experts; () if no expert is off the device."""
        return self.experts[unit] if unit < len(self.experts) else ()

    def by_rows(self, tokens: int) -> bool:
        """Return whether a sweep of this many tokens loads only the experts that its tokens chose."""
        return any(self.experts) and tokens <= self.most_tokens


NOTHING = Demand()
