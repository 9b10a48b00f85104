"""Series of unlimited length in bounded memory: rates in time buckets, and counts of lengths in bins."""

from dataclasses import dataclass

MOST_BUCKETS = 240
MOST_BINS = 40


@dataclass
class Bucket:
    """Sums of consecutive sweeps.

    Attributes:
        sweeps: number of sweeps.
        prefill_seconds: seconds of the sweeps that computed a prompt.
        decode_seconds: seconds of the other sweeps.
        prompt_tokens: prompt tokens computed.
        mixed_tokens: tokens generated in sweeps that computed a prompt.
        decode_tokens: tokens generated in the other sweeps.
    """

    sweeps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    mixed_tokens: int = 0
    decode_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds of all sweeps."""
        return self.prefill_seconds + self.decode_seconds

    def add(self, other: "Bucket") -> None:
        """Add the sums of another bucket."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Rates:
    """Tokens and seconds of all sweeps, in at most MOST_BUCKETS buckets of equally many sweeps.

    Attributes:
        buckets: in order; the last one may have fewer sweeps.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.buckets: list[Bucket] = []
        self._most, self._per = most, 1

    def add(self, sweep: Bucket) -> None:
        """Add a sweep. If all buckets are full, merge each two."""
        if self._full and len(self.buckets) == self._most:
            self._halve()
        if self._full:
            self.buckets.append(Bucket())
        self.buckets[-1].add(sweep)

    @property
    def _full(self) -> bool:
        return not self.buckets or self.buckets[-1].sweeps >= self._per

    def _halve(self) -> None:
        for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=False):
            first.add(second)
        del self.buckets[1::2]
        self._per *= 2


class Histogram:
    """Counts of whole numbers in at most `most` bins of one width, which doubles as larger numbers come.

    Attributes:
        counts: by bin; bin i holds i * width to (i + 1) * width - 1.
        width: width of a bin.
        number, total, least, largest: number, sum and limits of all values; 0 if there are none.
    """

    def __init__(self, most: int = MOST_BINS) -> None:
        self.counts, self.width = [0] * most, 1
        self.number = self.total = self.least = self.largest = 0

    def add(self, value: int) -> None:
        """Add a number of at least 0."""
        while value >= self.width * len(self.counts):
            pairs = zip(self.counts[::2], self.counts[1::2], strict=True)
            self.counts = [a + b for a, b in pairs] + [0] * (len(self.counts) // 2)
            self.width *= 2
        self.counts[value // self.width] += 1
        self.least = min(self.least, value) if self.number else value
        self.largest = max(self.largest, value)
        self.number, self.total = self.number + 1, self.total + value

    @property
    def mean(self) -> float:
        """Return the mean; 0 without values."""
        return self.total / self.number if self.number else 0.0

    def bins(self) -> list[tuple[int, int, int]]:
        """Return (first number, last number, count) of the bins from the first to the last that holds a value."""
        used = [i for i, n in enumerate(self.counts) if n]
        span = range(used[0], used[-1] + 1) if used else range(0)
        return [(i * self.width, (i + 1) * self.width - 1, self.counts[i]) for i in span]
