"""A job in the numbers that a cluster plan needs, and the micro-batches in which it passes through a pipeline."""

import math
from dataclasses import dataclass

from flexengine.plan.pages import PAGE_TOKENS
from flexengine.plan.sizes import aligned
from flexengine.plan.workload import Workload

MAX_BATCH = 4096  # most sequences alive at once


@dataclass(frozen=True)
class ClusterJob:
    """Rows of a job. Seconds are of rows of mean size, bytes of the longest rows.

    Attributes:
        rows: number of sequences.
        prompt: mean prompt tokens.
        output: mean generated tokens.
        longest_prompt: tokens of the longest prompt.
        ends: (tokens of the KV pages of a row at its end, number of rows), falling.
        workload: the rows.
    """

    rows: int
    prompt: int
    output: int
    longest_prompt: int
    ends: tuple[tuple[int, int], ...]
    workload: Workload

    @staticmethod
    def of(workload: Workload) -> "ClusterJob":
        """Return the job with the rows of a workload, which has at least one."""
        rows = workload.count
        prompt = sum(p * times for (p, _), times in workload.sizes.items()) / rows
        output = sum(n * times for (_, n), times in workload.sizes.items()) / rows
        ends: dict[int, int] = {}
        for (p, n), times in workload.sizes.items():
            held = aligned(p + n - 1, PAGE_TOKENS)  # the last generated token is never cached
            ends[held] = ends.get(held, 0) + times
        longest = max(p for p, _ in workload.sizes)
        falling = tuple(sorted(ends.items(), reverse=True))
        return ClusterJob(rows, max(1, round(prompt)), max(1, round(output)), longest, falling, workload)

    @staticmethod
    def uniform(rows: int, prompt: int, output: int) -> "ClusterJob":
        """Return a job of equal rows."""
        return ClusterJob.of(Workload({(prompt, output): rows}))

    @property
    def past(self) -> float:
        """Return the cached tokens of a sequence, averaged over its decode steps."""
        return self.prompt + self.output / 2

    def cached(self, batch: int) -> int:
        """Return the tokens of all KV pages of the `batch` longest rows at their end."""
        tokens, left = 0, batch
        for length, times in self.ends:
            tokens += length * min(left, times)
            left -= min(left, times)
        return tokens


@dataclass(frozen=True)
class Shape:
    """Sequences that are alive at once, and their micro-batches.

    Attributes:
        batch: sequences alive at once.
        decode: most sequences of a decode micro-batch (xi), a cohort.
        prefill: most sequences of a prefill micro-batch (eta), a part of a cohort.
    """

    batch: int
    decode: int
    prefill: int

    @property
    def cohorts(self) -> int:
        """Return the number of decode micro-batches."""
        return math.ceil(self.batch / self.decode)

    @property
    def prefills(self) -> int:
        """Return the number of prefill micro-batches."""
        return self.cohorts * math.ceil(self.decode / self.prefill)

    def rounds(self, rows: int) -> int:
        """Return how often `batch` sequences pass until all rows are done."""
        return math.ceil(rows / self.batch)


def shapes(batch: int, devices: int) -> list[Shape]:
    """Return the micro-batches to try for a number of live sequences.

    Decode micro-batches are even parts of the batch: 1 to twice the number of devices of them. Prefill micro-batches
    divide a decode micro-batch into powers of 2.
    """
    found: dict[Shape, None] = {}
    for cohorts in range(1, min(batch, 2 * devices) + 1):
        decode = math.ceil(batch / cohorts)
        prefill = decode
        while True:
            found.setdefault(Shape(batch, decode, prefill))
            if prefill == 1:
                break
            prefill = math.ceil(prefill / 2)
    return list(found)


def batches(rows: int) -> list[int]:
    """Return the numbers of live sequences to try, falling: even parts of the rows by powers of 2."""
    sizes, rounds = [], math.ceil(rows / MAX_BATCH)
    while True:
        sizes.append(math.ceil(rows / rounds))
        if sizes[-1] == 1:
            return list(dict.fromkeys(sizes))
        rounds *= 2
