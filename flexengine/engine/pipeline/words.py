"""Numbers in a row: the layout of the bodies of frames. Every number is an int64; reals are the bits of a float64."""

import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_HALF = 32


class Writer:
    """Collects numbers."""

    def __init__(self) -> None:
        self._words: list[int] = []

    def add(self, *numbers: int) -> None:
        """Add whole numbers of 64 bits."""
        self._words += numbers

    def add_long(self, number: int) -> None:
        """Add a whole number of up to 65 bits, such as a seed."""
        self._words += (number >> _HALF, number & ((1 << _HALF) - 1))

    def add_real(self, number: float) -> None:
        """Add a real number."""
        self._words += struct.unpack("<q", struct.pack("<d", number))

    def add_list(self, numbers: Iterable[int]) -> None:
        """Add a list of whole numbers, after its length."""
        listed = list(numbers)
        self._words += (len(listed), *listed)

    @property
    def body(self) -> Tensor:
        """All numbers as uint8 [8 * numbers]."""
        return torch.tensor(self._words, dtype=torch.int64).view(torch.uint8)


class Reader:
    """Returns the numbers of a Writer in their order."""

    def __init__(self, body: Tensor) -> None:
        self._words: list[int] = body.view(torch.int64).tolist()
        self._next = 0

    def take(self) -> int:
        """Return a whole number."""
        self._next += 1
        return self._words[self._next - 1]

    def take_long(self) -> int:
        """Return a whole number of up to 65 bits."""
        return (self.take() << _HALF) + self.take()

    def take_real(self) -> float:
        """Return a real number."""
        (number,) = struct.unpack("<d", struct.pack("<q", self.take()))
        return float(number)

    def take_many(self, count: int) -> Sequence[int]:
        """Return whole numbers."""
        self._next += count
        return self._words[self._next - count : self._next]

    def take_list(self) -> Sequence[int]:
        """Return a list of whole numbers."""
        return self.take_many(self.take())
