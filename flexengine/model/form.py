"""How a parameter is kept that is not kept as numbers."""

from dataclasses import dataclass
from math import prod

from flexengine.codec.packed import Packed


@dataclass(frozen=True)
class Form:
    """How one parameter is kept. count: experts, each a matrix of its own; 0: one matrix. transposed: the checkpoint
    has it as [in, out]."""

    packed: Packed
    count: int = 0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the uint8 tensor."""
        return (self.count, self.packed.nbytes) if self.count else (self.packed.nbytes,)

    @property
    def nbytes(self) -> int:
        return prod(self.shape)
