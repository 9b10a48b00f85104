"""Rates of a disk for records of neurons: by size and requests in flight, bundled against two reads, and with gaps.

python -m bench.flash.disk [--folder DIR] [--gib 4] [--turns 5] [--out FILE]

A file of random bytes is read as bundles of random records by `flexengine.guests.flash.reader`, with direct I/O. One
JSON line per size of a record:

    rates     MB/s of records, by threads
    bundled   seconds of two reads, each of half a record in its half of the file, over those of one, by threads
    gaps      seconds of two requests over those of one that reads the bytes between too, by KiB between, 32 threads

All ways take turns; medians count. The disk must not be busy otherwise.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Record

KIB = 1 << 10
SIZES, THREADS, GAPS = (4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32), (4, 8, 12, 16, 24, 32)  # KiB, requests, KiB
READ = 48 << 20  # bytes of a measured read of one thread; other numbers of threads read more


@dataclass(frozen=True)
class Case:
    """kib: of a record."""

    kib: int


@dataclass(frozen=True)
class Disk:
    """A file, and the random generator that draws records."""

    path: Path
    rng: Any

    def bundle(self, nbytes: int) -> Any:
        """Return the file as a bundle of records of nbytes."""
        from flexengine.codec.records import RecordForm
        from flexengine.guests.flash.bundles import Bundle

        size = self.path.stat().st_size
        return Bundle(self.path, RecordForm("float16", nbytes // 4), size // nbytes)

    def draw(self, count: int, below: int, every: int = 1) -> Any:
        """Return `count` random multiples of `every`, rising."""
        import numpy as np

        return np.sort(self.rng.choice(below // every, count, replace=False)) * every

    def seconds(self, bundle: Any, numbers: Any, threads: int = 32, gap: int = 0) -> tuple[float, int]:
        """Return the time of a read, and its requests."""
        import torch

        from flexengine.guests.flash.reader import RecordReader, requests
        from flexengine.tier.memory import aligned_buffer

        target = aligned_buffer(len(numbers) * bundle.form.nbytes).view(len(numbers), -1).fill_(0)
        with RecordReader([bundle], threads, gap) as reader:
            began = time.perf_counter()
            reader.read(bundle, torch.from_numpy(numbers), target, torch.arange(len(numbers)))
            return time.perf_counter() - began, len(requests(numbers, bundle.form.nbytes, gap)) - 1


@contextmanager
def random_file(folder: Path, gib: float) -> Iterator[Path]:
    """Write a file of random bytes that is in no cache of this machine, and remove it at the end."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".records") as file:
        for _ in range(int(gib * 1024 / 16)):
            file.write(os.urandom(16 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(file.name)


def count_of(nbytes: int, threads: int) -> int:
    """Return how many records to read: enough for a tenth of a second and more."""
    return min(READ * min(threads, 4), 192 << 20) // max(nbytes, 16 * KIB)


def rate(disk: Disk, nbytes: int, threads: int) -> float:
    """Return MB/s of random records."""
    bundle, count = disk.bundle(nbytes), count_of(nbytes, threads)
    numbers = disk.draw(count, bundle.neurons, every=2)
    return count * nbytes / disk.seconds(bundle, numbers, threads)[0] / 1e6


def two_over_one(disk: Disk, nbytes: int, threads: int) -> float:
    """Return the seconds of two reads of half a record over those of one whole record."""
    import numpy as np

    whole, half, count = disk.bundle(nbytes), disk.bundle(nbytes // 2), count_of(nbytes, threads)
    one, _ = disk.seconds(whole, disk.draw(count, whole.neurons, every=2), threads)
    numbers = disk.draw(count, whole.neurons, every=2)
    two, made = disk.seconds(half, np.concatenate((numbers, whole.neurons + numbers)), threads)
    assert made == 2 * count
    return two / one


def over_a_gap(disk: Disk, nbytes: int, gap: int) -> float:
    """Return the seconds of pairs of records, with `gap` bytes between, by two requests each over those by one."""
    import numpy as np

    bundle, count, step = disk.bundle(nbytes), count_of(nbytes, 32) // 4, 1 + gap // nbytes
    seconds = []
    for merged in (0, gap):
        first = disk.draw(count, bundle.neurons - step, every=2 * step + 64 * KIB // nbytes)
        took, made = disk.seconds(bundle, np.sort(np.concatenate((first, first + step))), gap=merged)
        assert made == (count if merged else 2 * count)
        seconds.append(took)
    return seconds[0] / seconds[1]


def measure(disk: Disk, case: Case, turns: int) -> Record:
    """Return the medians of one size of a record."""
    from flexengine.guests.flash.reader import MOST

    nbytes = case.kib * KIB
    gaps = [kib for kib in GAPS if kib % case.kib == 0 and 2 * case.kib + kib <= MOST // KIB]
    made: dict[str, dict[int, list[float]]] = {"rates": {}, "bundled": {}, "gaps": {}}
    for _ in range(turns):
        for threads in THREADS:
            made["rates"].setdefault(threads, []).append(rate(disk, nbytes, threads))
            made["bundled"].setdefault(threads, []).append(two_over_one(disk, nbytes, threads))
        for kib in gaps:
            made["gaps"].setdefault(kib, []).append(over_a_gap(disk, nbytes, kib * KIB))
    return {what: {key: median(values) for key, values in by.items()} for what, by in made.items()}


def main() -> None:
    """Measure and print all sizes."""
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", metavar="DIR", help="on the disk to measure (default: the temporary directory)")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the file (default 4)")
    parser.add_argument("--turns", type=harness.at_least_one, default=5)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    with random_file(Path(args.folder or tempfile.gettempdir()), args.gib) as path:
        disk = Disk(path, np.random.default_rng(0))
        for case in map(Case, SIZES):
            line = {"gib": args.gib, **measure(disk, case, args.turns)}
            harness.emit({**harness.header("flash.disk", case, [{"versions": harness.versions()}]), **line}, args.out)


if __name__ == "__main__":
    main()
