"""Which neuron of a layer lies in which row of its memory (LLM in a flash, section 3.3).

The memory has room for some of a layer's records. Neurons that recent tokens used stay; the least recently used ones
give their rows to new ones. Pinning the most frequent neurons (PowerInfer) was tried and left out: with a small memory
it read more, with room for a half of the neurons up to a tenth less.

The paper keeps rows without gaps, and moves the last row into the place of each deleted one. Here kernels get the row
of each neuron, so a new record takes the row of the one that leaves, and nothing is moved.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_NOWHERE, _NEVER = -1, -1


class Fetch(NamedTuple):
    """Records to read."""

    neurons: IntArray  # their numbers, rising
    rows: IntArray  # row of the memory for each


class Arena:
    """Rows of one layer's memory."""

    def __init__(self, neurons: int, room: int) -> None:
        assert room > 0
        self.room = room  # number of rows
        self.step = 0  # number of calls of `fetch`
        self._row_of = np.full(neurons, _NOWHERE, np.int64)
        self._neuron_at = np.full(room, _NOWHERE, np.int64)
        self._used = np.full(room, _NEVER, np.int64)  # by row: last step; _NEVER if it is free

    @property
    def held(self) -> IntArray:
        """Numbers of the neurons in memory, rising."""
        return np.flatnonzero(self._row_of >= 0)

    def overlapping(self, neurons: IntArray, each: int) -> list[IntArray]:
        """Return more neurons than there is room for, in runs for successive calls of `fetch`.

        A run may be fetched while the rows of the run before are in use. `room - 2 * each` of the neurons that are in
        memory now stay until their run.

        Args:
            neurons: numbers, rising, without repeats.
            each: neurons of a run that are not kept so; at most half of the room.
        """
        assert 0 < each <= self.room // 2
        held = neurons[self._row_of[neurons] != _NOWHERE][: self.room - 2 * each]
        runs = (np.cumsum(np.isin(neurons, held, invert=True)) - 1).clip(0) // each
        parts = np.split(neurons, np.flatnonzero(np.diff(runs)) + 1)
        self.reserve(held, len(parts))
        return parts

    def fetch(self, neurons: IntArray) -> Fetch:
        """Make room for the neurons of the next token, or of a batch of tokens. Return those that must be read.

        Args:
            neurons: numbers, rising, without repeats; not more than there is room for.
        """
        rows = self._row_of[neurons]
        missing = neurons[rows < 0]
        inside = rows[rows >= 0]
        assert len(neurons) <= self.room
        self.step += 1
        self._used[inside] = self.step
        # Free rows come first, then the least recently used ones, the first of equal ones.
        places = np.argsort(self._used, kind="stable")[: len(missing)] if len(missing) else np.empty(0, np.int64)
        self._free(places)
        self._row_of[missing], self._neuron_at[places], self._used[places] = places, missing, self.step
        return Fetch(missing, places)

    def reserve(self, neurons: IntArray, calls: int) -> None:
        """Have those of the neurons that are in memory leave after all others, for the next `calls` calls of `fetch`,
        or until they are fetched."""
        rows = self._row_of[neurons]
        self._used[rows[rows >= 0]] = self.step + calls + 1

    def rows(self, neurons: IntArray) -> IntArray:
        """Return the rows of neurons that are all in memory."""
        return self._row_of[neurons]

    def _free(self, rows: IntArray) -> None:
        gone = self._neuron_at[rows]
        self._row_of[gone[gone >= 0]] = _NOWHERE
        self._neuron_at[rows], self._used[rows] = _NOWHERE, _NEVER
