"""Flipped bits in the files of a model, and in files prepared from it: does --verify find each one and name the file?

No other check finds them, as a weight with a flipped bit is a valid weight.
"""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.faults.failing import Fault
from bench.faults.trials import Tally, forked, real_command

SUMS = "SHA256SUMS"


def listed(directory: Path) -> Path:
    """Return the directory after coreutils has written SHA256SUMS into it."""
    subprocess.run(f"sha256sum -- * > {SUMS}", shell=True, cwd=directory, check=True)
    return directory


def one_job(given: Path, work: Path, *more: str) -> Callable[[], tuple[int, str]]:
    """Run a job of one row in a process of its own. Return its exit code and its output."""
    rows = work / "one.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}\n')
    words = [str(rows), "--model", str(given), "--device", "cpu", "--ignore-eos", *more]

    def run() -> tuple[int, str]:
        ended = forked(lambda: real_command(words), [], Fault(), work / "log", 300.0)
        return ended.code, ended.said

    return run


def prepare(given: Path, work: Path, cache: Path, *more: str) -> Path:
    """Return the directory that a job prepares in an empty cache."""
    code, said = one_job(given, work, *more)()
    found = [place for place in (cache / "prepared").iterdir() if place.is_dir()]
    if code or len(found) != 1:
        raise RuntimeError(f"a job on {given} fails without a flipped bit: exit code {code}, {found}\n{said[-3000:]}")
    return found[0]


@contextmanager
def flipped(directory: Path, generator: random.Random) -> Iterator[Path]:
    """Flip one bit of one file while the block runs, and yield the file. Each bit, except those of SHA256SUMS, is
    equally likely.

    The file's times stay unchanged, as when a disk decays. With another time the engine would prepare the model again.
    """
    files = sorted(f for f in directory.iterdir() if f.is_file() and f.name != SUMS)
    (file,) = generator.choices(files, [f.stat().st_size for f in files])
    bit = generator.randrange(8 * file.stat().st_size)
    _flip(file, bit)
    try:
        yield file
    finally:
        _flip(file, bit)


def _flip(file: Path, bit: int) -> None:
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))
    os.utime(file, ns=times)


def found_by_code(directory: Path, check: Callable[[Path], None], count: int, seed: int, tally: Tally) -> None:
    """Flip `count` bits, one after another.

    Args:
        check: a Verifier's check. It must find nothing before and after, and each flipped bit.
    """
    from flexengine.errors import BadCheckpoint

    generator = random.Random(f"{seed} {tally.kind}")
    check(directory)
    for _ in range(count):
        with flipped(directory, generator) as file:
            began = time.monotonic()
            try:
                check(directory)
                wrong = ["not found"]
            except BadCheckpoint as error:
                wrong = [] if f"{file.name} (has " in str(error) else [f"not named: {error}"]
            tally.points[file.suffix] += 1
            tally.note(f"a bit of {file}", wrong, seconds=time.monotonic() - began)
    check(directory)


def found_by_command(directory: Path, job: Callable[[], tuple[int, str]], count: int, seed: int, tally: Tally) -> None:
    """Run the whole command on a model, or on prepared files, with a flipped bit, which it must refuse, and then
    without."""
    generator = random.Random(f"{seed} {tally.kind}")
    for _ in range(count):
        with flipped(directory, generator) as file:
            began = time.monotonic()
            code, said = job()
            seconds = time.monotonic() - began
        wrong = [] if code == 2 and f"{file.name} (has " in said else [f"exit code {code}: {said[-500:]}"]
        tally.points[file.suffix] += 1
        tally.note(f"a bit of {file}", wrong, seconds=seconds)
    if (code := job()[0]) != 0:
        tally.note("afterwards", [f"exit code {code}"])
