"""What is in the memory of blocks that are read on demand."""

import numpy as np

from flexengine.guests.flash.neurons import Arena, IntArray


def held(arena: Arena) -> IntArray:
    """Return the numbers of the neurons or experts in memory, rising."""
    return np.flatnonzero(arena._row_of >= 0)
