"""Format of an encoded parameter."""

from dataclasses import dataclass
from math import prod

from flexengine.codec.forms import Form


@dataclass(frozen=True)
class WeightFormat:
    """Format of one encoded parameter.

    Attributes:
        packed: format of a matrix.
        count: number of experts, each with its own matrix; 0 for a single matrix without experts.
        transposed: whether the checkpoint stores the matrix as [in, out].
    """

    packed: Form
    count: int = 0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the uint8 tensor that holds the parameter."""
        return (self.count, self.packed.nbytes) if self.count else (self.packed.nbytes,)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return prod(self.shape)
