"""Which neuron of a layer lies in which row of its memory (LLM in a flash, section 3.3).

The memory has room for some of a layer's records. Neurons that recent tokens used stay; the least recently used ones
give their rows to new ones. Pinning the most frequent neurons (PowerInfer) was tried and left out: with a small memory
it read more, with room for a half of the neurons up to a tenth less.

The paper keeps rows without gaps, and moves the last row into the place of each deleted one. Here kernels get the row
of each neuron, so a new record takes the row of the one that leaves, and nothing is moved.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_NOWHERE, _NEVER = -1, -1


class Fetch(NamedTuple):
    """Records to read.

    Attributes:
        neurons: their numbers, rising.
        rows: row of the memory for each.
    """

    neurons: IntArray
    rows: IntArray


class Arena:
    """Rows of one layer's memory.

    Attributes:
        room: number of rows.
        window: neurons that none of the last `window` tokens used leave, though there is room; None to keep them.
        step: number of calls of `fetch`.
    """

    def __init__(self, neurons: int, room: int, window: int | None = None) -> None:
        """Make an empty memory.

        Args:
            neurons: neurons of the layer.
            room: rows, at least 1.
        """
        assert room > 0
        self.room, self.window, self.step = room, window, 0
        self._row_of = np.full(neurons, _NOWHERE, np.int64)
        self._neuron_at = np.full(room, _NOWHERE, np.int64)
        self._used = np.full(room, _NEVER, np.int64)  # by row: last step; _NEVER if it is free

    @property
    def held(self) -> IntArray:
        """Numbers of the neurons in memory, rising."""
        return np.flatnonzero(self._row_of >= 0)

    def parts(self, neurons: IntArray, most: int | None = None) -> Iterator[IntArray]:
        """Yield the neurons in as few runs as `fetch` can take, one after the other.

        Args:
            neurons: numbers, rising, without repeats.
            most: neurons of a run; None for `room`.
        """
        most = most or self.room
        for low in range(0, len(neurons), most):
            yield neurons[low : low + most]

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
            neurons: numbers, rising, without repeats; not more than `parts` yields together.
        """
        rows = self._row_of[neurons]
        missing = neurons[rows < 0]
        inside = rows[rows >= 0]
        assert len(neurons) <= self.room
        self.step += 1
        self._used[inside] = self.step
        if self.window is not None:
            self._forget(self.step - self.window)
        places = self._vacated(len(missing))
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

    def _forget(self, before: int) -> None:
        """Free the rows that were last used in step `before` or earlier."""
        old = np.flatnonzero((self._neuron_at >= 0) & (self._used <= before))
        self._free(old)

    def _free(self, rows: IntArray) -> None:
        gone = self._neuron_at[rows]
        self._row_of[gone[gone >= 0]] = _NOWHERE
        self._neuron_at[rows], self._used[rows] = _NOWHERE, _NEVER

    def _vacated(self, count: int) -> IntArray:
        """Return `count` rows for new records: free ones, then the least recently used, the first of equal ones."""
        if not count:
            return np.empty(0, np.int64)
        rows = np.argsort(self._used, kind="stable")[:count]
        self._free(rows)
        return rows
