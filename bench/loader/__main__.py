"""Encoding of weights: the steps one after another, and overlapped; seconds and memory.

python -m bench.loader [--models demo llama-1.1b] [--weights int8 int4] [--folder DIR] [--turns 3] [--note TEXT]
                       [--out loader.jsonl]

Both ways take turns. Each run is a process of its own, starts with the checkpoint out of the page cache and writes the
files into an empty directory, each followed by fsync. One JSON line per model and format: the seconds of each step
alone (reading, encoding with the engine's threads, writing), their sum, the overlapped seconds, the ratio to the
slowest step, and the most memory of the overlapped run above that of the process before it reads. The least possible
seconds are those of the slowest step, or the processor seconds of all steps divided by the cores, if these are more.

Exit code: 1 if the overlapped seconds are over SLOWER times the least possible ones, or the memory is over MORE times
PARAMETERS of the largest parameter.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import harness
from bench.compare.bound import evict
from bench.harness import Record
from bench.models import SHAPES, demo_model, make, shard_files

SLOWER, MORE = 1.15, 1.1
PARAMETERS = 2  # parameters, in their stored form, that may be in memory: one is read and encoded, one is written
WAYS = ("steps", "overlapped")


@dataclass(frozen=True)
class Case:
    """model: "demo", or a name in bench.models.SHAPES; weights: the format of all layers."""

    model: str
    weights: str


def run(model: Path, case: Case, way: str, folder: Path) -> Record:
    """Return what one run took. folder: on the disk that the files are written to."""
    evict(shard_files(model))
    with tempfile.TemporaryDirectory(dir=folder) as out:
        setting = {"model": str(model), "weights": case.weights, "way": way, "out": out}
        found = harness.run_module("bench.loader.side", json.dumps(setting))
    if "error" in found:
        raise SystemExit(f"{case}, {way}: {found['error']}\n{found.get('stderr', '')}")
    return found


def measure(model: Path, case: Case, turns: int, folder: Path) -> tuple[Record, list[str]]:
    """Return the record of a case, and what is wrong."""
    runs: dict[str, list[Record]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            runs[way].append(run(model, case, way, folder))
    one, other = runs.values()
    steps = {step: median(r["steps"][step] for r in one) for step in one[0]["steps"]}
    seconds, slowest = median(r["seconds"] for r in other), max(steps, key=lambda step: steps[step])
    step_cpu = {step: median(r["step_cpu_seconds"][step] for r in one) for step in steps}
    least = max(steps[slowest], sum(step_cpu.values()) / len(os.sched_getaffinity(0)))
    facts, cpu = one[0]["facts"], median(r["cpu_seconds"] for r in other)
    peak, limit = max(r["peak"] for r in other), int(MORE * PARAMETERS * facts["largest_bytes"])
    line: Record = {
        **facts, "files_equal": len({r["digest"] for r in (*one, *other)}) == 1,
        "steps": steps, "sum": sum(steps.values()), "slowest": slowest,
        "step_cpu_seconds": step_cpu, "overlapped": seconds, "ratio": seconds / steps[slowest],
        "least": least, "ratio_to_least": seconds / least, "cpu_seconds": cpu, "cores_used": cpu / seconds,
        "peak": peak, "limit": limit, "peak_in_largest": peak / facts["largest_bytes"],
        "runs": {way: [{k: r[k] for k in ("seconds", "steps", "peak") if k in r} for r in made]
                 for way, made in runs.items()},
    }  # fmt: skip
    wrong = []
    if not line["files_equal"]:
        wrong.append("the files differ")
    if seconds > SLOWER * least:
        wrong.append(f"overlapped, it took {seconds / least:.2f} times the least possible seconds")
    if peak > limit:
        wrong.append(f"{peak:,} bytes of memory are over {limit:,}")
    return {**line, "wrong": wrong}, wrong


def main() -> int:
    """Measure and print the cases that the command line names. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["demo", *SHAPES], default=["demo", "llama-1.1b"])
    parser.add_argument("--weights", nargs="+", choices=["int8", "int4", "int3", "int2"], default=["int8", "int4"])
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="for random checkpoints, which are kept, and encoded files (default: a temporary one)",
    )
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--note", default="", help="text that is recorded, such as other load of the machine")
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            model = demo_model() if name == "demo" else make(SHAPES[name], folder / name)
            for weights in args.weights:
                case = Case(name, weights)
                line, wrong = measure(model, case, args.turns, folder)
                head = harness.header("loader", case, [{"versions": harness.versions()}])
                harness.emit({**head, "note": args.note, **line}, args.out)
                good = good and not wrong
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
