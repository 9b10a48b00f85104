"""Attention workers in processes of one machine, beside one process.

python -m bench.workers [--cases block choice grid queries kills] [--turns 3] [--kills 40] [--folder DIR] [--out FILE]

block: contexts of 2,000 tokens on a simulated accelerator whose weights come from a throttled disk. One process takes
turns with the same process and workers that each have as much memory; both under the policies that the planner chooses.
choice: jobs for which workers pay, and jobs for which they do not: without workers, with workers that the planner may
use, and with workers that it must use. grid: tokens of three families under all partitions and cache formats, with one
to four workers, through shared memory and over TCP, beside those of one process. queries: seconds of a decode sweep
with queries that go first and without, for models with and without grouped heads and one or more gpu_batches in flight.
kills: rows are generated again and again while a random worker is killed by SIGKILL after a random time, until so many
were killed; tokens must be those of one process. Exit code: 1 if tokens differ.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench import harness
from bench.harness import Record
from bench.models import make
from bench.workers import choice, queries
from bench.workers.choice import DISK, HOST, MEMORY, SHAPE, TOKENS, WORKER_MEMORY, WORKERS
from bench.workers.grid import VOCABULARY, grid, make_family

CASES = ("block", "choice", "grid", "queries", "kills")
ROWS, CONTEXT = 8, 2000
KILL_SECONDS = 12.0  # most seconds between two kills


def header(fields: Record) -> Record:
    """Return the first fields of a record. fields: of the case."""
    return harness.header("workers", fields, [{"versions": harness.versions()}])


def side(job: Record, directory: Path, threads: int | None = None, module: str = "side") -> Record:
    """Return the record of a job in a process of its own. module: of this package, which runs it."""
    (path := directory / "job.json").write_text(json.dumps(job))
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    made = subprocess.run([sys.executable, "-m", f"bench.workers.{module}", str(path)], capture_output=True, text=True,
                          env=environment)  # fmt: skip
    if made.returncode:
        raise SystemExit(f"{job.get('policy')} failed:\n{made.stderr[-3000:]}")
    found: Record = json.loads(made.stdout.splitlines()[-1])
    return found


def block(turns: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case block, and whether tokens are equal."""
    model, rng = make(SHAPE, directory / "block"), random.Random(1)
    job = {"model": str(model), "device": "sim", "memory": MEMORY, "host": HOST, "tokens": TOKENS,
           "folder": str(directory), "measure": True, "links": {"disk_read": DISK, "disk_write": DISK},
           "rows": [[rng.randrange(3, SHAPE.vocab) for _ in range(CONTEXT)] for _ in range(ROWS)]}  # fmt: skip
    sides = {"one process": job,
             "workers": {**job, "workers": WORKERS, "worker_mem": WORKER_MEMORY}}  # fmt: skip
    runs: dict[str, list[Record]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, given in sides.items():
            runs[name].append(run := side(given, directory))
            print(f"  {name}: {run['tok_s']:.2f} tok/s, decode {run['decode_tok_s']:.2f}, predicted"
                  f" {run['predicted_seconds']:.1f} s, took {run['measured_seconds']:.1f} s",
                  file=sys.stderr)  # fmt: skip
    rates = {name: median(run["tok_s"] for run in each) for name, each in runs.items()}
    decode = {name: median(run["decode_tok_s"] for run in each) for name, each in runs.items()}
    errors = {name: median(run["predicted_seconds"] / run["measured_seconds"] for run in each)
              for name, each in runs.items()}  # fmt: skip
    same = all(run["tokens"] == runs["one process"][0]["tokens"] for each in runs.values() for run in each)
    case = {"name": "block", "rows": ROWS, "context": CONTEXT, "tokens": TOKENS, "workers": WORKERS, "memory": MEMORY,
            "host": HOST, "worker_mem": WORKER_MEMORY, "disk": DISK}  # fmt: skip
    record = header(case) | {
        "tok_s": rates, "ratio": rates["workers"] / rates["one process"], "decode_tok_s": decode,
        "decode_ratio": decode["workers"] / decode["one process"], "predicted_to_measured": errors, "same": same,
        "runs": {name: [{k: v for k, v in run.items() if k != "tokens"} for run in each]
                 for name, each in runs.items()},
    }  # fmt: skip
    return record, same


def chosen(turns: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case choice, and whether tokens are equal."""
    found: Record = {}
    for case in choice.CASES:
        with ExitStack() as stack:
            jobs = choice.sides(case, directory, stack)
            runs: dict[str, list[Record]] = {name: [] for name in jobs}
            for _ in range(turns):
                for name, job in jobs.items():
                    runs[name].append(side(job, directory))
        found[case.name] = choice.summary(runs)
        print(f"  {case.name}: {found[case.name]['seconds']}, used {found[case.name]['used']}", file=sys.stderr)
    record = header({"name": "choice", "workers": choice.WORKERS, "turns": turns}) | {"cases": found}
    return record, all(each["same"] for each in found.values())


def first(turns: int, directory: Path) -> Iterator[tuple[Record, bool]]:
    """Yield the records of case queries, and whether tokens are equal."""
    for case in queries.CASES:
        job = {"case": asdict(case), "turns": turns, "folder": str(directory)}
        found = queries.figures(case, side(job, directory, threads=1, module="queries"))
        print(f"  {case.name}: {found['saved']:.1%} saved", file=sys.stderr)
        shape = {"of": case.name, "turns": turns, "heads": queries.HEADS, **asdict(case)}
        yield header({"name": "queries", **shape}) | found, found["same"]


def kills(count: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case kills, and whether tokens are those of one process."""
    rng, killed, losses, runs, same = random.Random(2), 0, 0, 0, True
    rows = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
    job = {"model": str(make_family("llama", directory)), "device": "cpu", "rows": rows, "tokens": 100}
    expected = side(job, directory)["tokens"]
    policies = [{"gpu_batch_size": 4, "num_gpu_batches": 2, "cache": {"workers": 0.75, "device": 0.25}, "partition": p}
                for p in ("requests", "heads", "tokens")]  # fmt: skip
    for number, policy in enumerate(policies):
        given = {**job, "policy": policy, "workers": 2, "worker_mem": "16M", "kill_seconds": KILL_SECONDS,
                 "kills": -(-count // len(policies)), "seed": number}  # fmt: skip
        run = side(given, directory)
        killed, losses, runs = killed + run["killed"], losses + run["losses"], runs + run["runs"]
        same = same and run["results"] == [expected]
        print(f"  {killed} killed, {losses} losses, {runs} runs, same: {same}", file=sys.stderr)
    case = {"name": "kills", "rows": len(rows), "tokens": 100, "workers": 2}
    return header(case) | {"kills": killed, "losses": losses, "runs": runs, "same": same}, same


def main() -> int:
    """Measure and print the cases that the command line names. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--kills", type=harness.at_least_one, default=40)
    parser.add_argument("--folder", type=Path, metavar="DIR",
                        help="for models, which are kept, and spill files (default: a temporary one)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.folder or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for name in args.cases:
            for record, same in measured(name, args, directory):
                harness.emit(record, args.out)
                good = good and same
    return 0 if good else 1


def measured(name: str, args: argparse.Namespace, directory: Path) -> Iterator[tuple[Record, bool]]:
    """Yield the records of a case, and whether tokens are equal."""
    if name == "block":
        yield block(args.turns, directory)
    elif name == "choice":
        yield chosen(args.turns, directory)
    elif name == "kills":
        yield kills(args.kills, directory)
    elif name == "queries":
        yield from first(args.turns, directory)
    else:
        found, same = grid(directory)
        yield header({"name": "grid"}) | found, same


if __name__ == "__main__":
    sys.exit(main())
