"""Resident memory of jobs against the memory they were given, with Python's cyclic garbage collector off.

python -m bench.resident jobs [--quick] [--out bench/results/resident.jsonl]

Each case is a list of jobs that one engine runs one after another, in a process of its own. A case fails if the process
grows by more than OVER times its budget in any job, if a job fails, or if the kernel kills it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.harness import Limits, Record, emit, machine, now, run_module, versions
from bench.limit import why_not
from bench.models import OptShape, make

MB = 10**6
OVER = 1.1  # most growth, as a multiple of the budget
SECONDS = 600.0  # a case may take
Rows = tuple[int, int, int]  # rows of a job, tokens of each prompt, tokens to generate


@dataclass(frozen=True)
class Setting:
    """Jobs of one engine. Sizes in bytes.

    Attributes:
        model: directory.
        jobs: the jobs, in order.
        device: cpu or sim.
        device_mem, host_mem: the budget; host_mem for sim only.
        policy: fields of a Policy; None lets the planner choose.
        lossy: fields of a Lossy.
        short: numbers of the jobs, from 0, in whose second sweep one task gets no memory.
        collector: whether the cyclic garbage collector is on.
    """

    model: str
    jobs: tuple[Rows, ...]
    device: str = "cpu"
    device_mem: int = 300 * MB
    host_mem: int | None = None
    policy: Record | None = None
    lossy: Record = field(default_factory=dict)
    short: tuple[int, ...] = ()
    collector: bool = False

    @property
    def budget(self) -> int:
        """Bytes of RAM the jobs were given."""
        return self.device_mem + (self.host_mem or 0)


def measure(setting: Setting, limit: int | None = None) -> Record:
    """Run a setting in a fresh process and return what it grew by.

    Args:
        setting: the jobs.
        limit: bytes of a memory cgroup around the process; None for no cgroup.

    Returns:
        base: resident bytes before the engine was made. jobs: per job peak and after (bytes above base), ledger (most
        booked bytes), replanned (times), failed (rows), seconds. closed: bytes above base once the engine is closed.
        over: the largest peak as a multiple of the budget. wrong: what is not as it should be, in words.
    """
    found = run_module("bench.peers.resident", json.dumps(asdict(setting)), Limits(limit, SECONDS))
    if "error" in found:
        return {**found, "over": None, "wrong": [found["error"]]}
    jobs, wrong = found["jobs"], []
    over = max(job["peak"] for job in jobs) / setting.budget
    if over > OVER:
        wrong.append(f"grown to {over:.2f} of the budget of {setting.budget:,} bytes; at most {OVER} is allowed")
    if any(job["failed"] for job in jobs):
        wrong.append("rows failed")
    if [bool(job["replanned"]) for job in jobs] != [n in setting.short for n in range(len(jobs))]:
        wrong.append("a job was planned anew that was not to be, or was not although it was to be")
    return {**found, "over": over, "wrong": wrong}


# Much cache for little computing: 32 KiB of K and V per token in float32, 1.6 MFLOP per layer and token.
SHAPE = OptShape(layers=16, hidden=256, ffn=1024, heads=4, vocab=4096)
JOBS: tuple[Rows, ...] = (
    (16, 200, 8), (24, 256, 8), (8, 64, 16), (30, 256, 8), (4, 1000, 4), (24, 200, 24),
    (1, 1500, 8), (32, 256, 4), (12, 300, 8), (20, 250, 8), (6, 128, 4), (30, 260, 6),
)  # fmt: skip
QUICK = OptShape(layers=4, hidden=128, ffn=256, heads=2, vocab=1024)
QUICK_JOBS: tuple[Rows, ...] = ((8, 100, 4), (16, 200, 4), (4, 50, 4)) * 4


def jobs_in_a_row(work: Path, quick: bool) -> Iterator[tuple[str, Setting, int | None]]:
    """(name, setting, cgroup limit) of 12 jobs of mixed sizes on one engine."""
    shape, jobs, size = (QUICK, QUICK_JOBS, 60 * MB) if quick else (SHAPE, JOBS, 300 * MB)
    cpu = Setting(str(make(shape, work / "model")), jobs, device_mem=size)
    sim = replace(cpu, device="sim", device_mem=size // 2, host_mem=size // 2)
    short = tuple(range(1, len(cpu.jobs), 3))
    for setting in (cpu, sim):
        yield f"{setting.device}, 12 jobs", setting, None
        yield f"{setting.device}, 12 jobs, 4 of them short of memory", replace(setting, short=short), None
    if why_not() is None:  # beside the budget, room for Python and its libraries
        limit = int(OVER * size) + 400 * MB
        yield "cpu, 12 jobs, 4 of them short of memory, in a cgroup", replace(cpu, short=short), limit


KINDS = {"jobs": jobs_in_a_row}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m bench.resident", description="Measure resident memory of jobs.")
    p.add_argument("kinds", nargs="+", choices=KINDS)
    p.add_argument("--quick", action="store_true", help="a tiny model")
    p.add_argument("--out", help="JSON lines are added to this file")
    args = p.parse_args(argv)
    bad = 0
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="flexengine-resident-") as work:
            for name, setting, limit in KINDS[kind](Path(work), args.quick):
                found = measure(setting, limit)
                bad += bool(found["wrong"])
                print(f"{name:60} {found['over'] or 0:.2f} of the budget  {'; '.join(found['wrong'])}", file=sys.stderr)
                about = {"bench": "resident", "kind": kind, "case": name, "quick": args.quick, "time": now(),
                         "machine": machine(), "versions": versions(), "budget": setting.budget,
                         "limit": limit}  # fmt: skip
                emit({**about, **found}, args.out)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
