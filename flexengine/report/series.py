"""Series of unlimited length in bounded memory: rates in time buckets, counts of lengths, and errors by kind."""

import re
from collections import Counter
from dataclasses import dataclass

from flexengine.job.rows import without_place

MOST_BUCKETS = 240
MOST_BINS = 40
MOST_KINDS = 30
MOST_CHARACTERS = 300  # of a stored message

_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]?|\d[\d,.]*")


@dataclass
class Bucket:
    """Sums of consecutive sweeps.

    Attributes:
        sweeps: number of sweeps.
        prefill_seconds: seconds of the sweeps that computed a prompt.
        decode_seconds: seconds of the other sweeps.
        prompt_tokens: prompt tokens computed.
        decode_tokens: tokens generated in the sweeps without a prompt.
    """

    sweeps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds of all sweeps."""
        return self.prefill_seconds + self.decode_seconds

    def add(self, other: "Bucket") -> None:
        """Add the sums of another bucket."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class SweepRates:
    """Tokens and seconds of all sweeps, in at most MOST_BUCKETS buckets of equally many sweeps.

    Attributes:
        buckets: in order; the last one may have fewer sweeps.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.buckets: list[Bucket] = []
        self._most, self._sweeps = most, 1

    def add(self, sweep: Bucket) -> None:
        """Add a sweep. If all buckets are full, merge each two."""
        full = not self.buckets or self.buckets[-1].sweeps >= self._sweeps
        if full and len(self.buckets) == self._most:
            for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=False):
                first.add(second)
            del self.buckets[1::2]
            self._sweeps *= 2
            full = self.buckets[-1].sweeps >= self._sweeps
        if full:
            self.buckets.append(Bucket())
        self.buckets[-1].add(sweep)


class LengthCounts(Counter[int]):
    """Numbers of sequences by their tokens. Memory is bounded, as sequences are."""

    @property
    def mean(self) -> float:
        """Return the mean length; 0 without sequences."""
        return sum(length * number for length, number in self.items()) / (self.total() or 1)

    def bins(self, most: int = MOST_BINS) -> list[tuple[int, int, int]]:
        """Return (first length, last length, number) of bins of one width, from the first to the last that is used."""
        width = 1
        while self and max(self) >= width * most:
            width *= 2
        numbers: Counter[int] = Counter()
        for length, number in self.items():
            numbers[length // width] += number
        used = range(min(numbers), max(numbers) + 1) if numbers else ()
        return [(i * width, (i + 1) * width - 1, numbers[i]) for i in used]


@dataclass
class ErrorKind:
    """Rows whose errors are of one kind.

    Attributes:
        count: number of rows.
        row: number of the first row.
        message: the first row's error, at most MOST_CHARACTERS characters.
    """

    count: int
    row: int
    message: str


class ErrorCounts:
    """Counts of rows' errors by kind. Messages that differ only in numbers and quoted text are of one kind.

    Attributes:
        kinds: by pattern, in the order of their first rows; at most MOST_KINDS.
        others: rows with errors of further kinds.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}
        self.others = 0

    def add(self, row: int, message: str) -> None:
        """Add a row's error."""
        pattern = _VARIES.sub("*", without_place(message[: 4 * MOST_CHARACTERS]))[:MOST_CHARACTERS]
        if pattern in self.kinds:
            self.kinds[pattern].count += 1
        elif len(self.kinds) < MOST_KINDS:
            cut = message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - 4] + " ..."
            self.kinds[pattern] = ErrorKind(1, row, cut)
        else:
            self.others += 1

    def by_count(self) -> list[ErrorKind]:
        """Return the kinds, the most frequent first."""
        return sorted(self.kinds.values(), key=lambda kind: -kind.count)
