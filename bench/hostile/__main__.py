"""Hostile rows and files: does reading crash, hang, lose or invent rows, or take more memory than it is given?

python -m bench.hostile [--rows 100000] [--seed 0] [--only FILE ...] [--memory 500M] [--out FILE]

First, rows of every format are compared with what independent parsers find. Then each file of `bench.hostile.files` is
the input of a job in a memory cgroup of the budget, 10 % and 200 MB for imports; page cache counts. Prints a line per
format and file, and appends JSON lines to --out. The exit code is 1 if anything differs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import harness, limit
from bench.hostile.files import FILES, MB, Hostile
from bench.hostile.rows import differences
from bench.models import SHAPES, make
from flexengine.config import parse_size

EACH = 100  # rows of a file
SECONDS = 300.0
REFUSED = 2  # exit code for an unusable input


def compare(rows: int, seed: int, folder: Path) -> harness.Record:
    """Return the rows read by format, and what differs."""
    counts, faults, began = Counter[str](), list[str](), time.monotonic()
    for name, count, found in differences(seed, rows, EACH, folder):
        counts[name.split(".")[1]] += count
        faults += [f"{name}: {fault}" for fault in found]
    return {"part": "rows", "seed": seed, "rows": dict(counts), "faults": faults, "seconds": time.monotonic() - began}


def attempt(hostile: Hostile, model: Path, folder: Path, budget: int) -> harness.Record:
    """Run a job over a file within the memory, and return its peak, its rows and its faults."""
    path, output = folder / hostile.name, folder / "out.jsonl"
    hostile.write(path)
    command = [
        sys.executable,
        "-m",
        "flexengine.run",
        str(path),
        "--model",
        str(model),
        "--output",
        str(output),
        "--max-tokens",
        "1",
        "--device",
        "cpu",
        "--device-mem",
        str(budget),
        "--restart",
    ]
    most, began, faults = budget + budget // 10 + 200 * MB, time.monotonic(), list[str]()
    code, peak, said = -1, None, ""
    try:
        code, _, said, peak = limit.run_limited(command, most, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        faults.append(f"no end within {SECONDS:.0f} s")
    rows = None
    if output.exists():
        with output.open("rb") as file:
            rows = sum(1 for _ in file)
        output.unlink()
    if code < 0 or "Traceback" in said:
        faults.append(f"exit code {code}: {said[-300:]}")
    if rows != hostile.rows or (hostile.rows is None and code != REFUSED):
        faults.append(f"{rows} rows, not {hostile.rows}; exit code {code}: {said[-300:]}")
    size = path.stat().st_size
    path.unlink()
    return {
        "part": "file",
        "file": hostile.name,
        "bytes": size,
        "budget": budget,
        "limit": most,
        "peak": peak,
        "rows": rows,
        "seconds": time.monotonic() - began,
        "faults": faults,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.hostile", description="Read hostile rows and files.")
    p.add_argument("--rows", type=int, default=100_000, help="rows that are compared; 0 for none")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", nargs="*", choices=[f.name for f in FILES], metavar="FILE", help="files (default: all)")
    p.add_argument("--memory", default="500M", help="the budget of a job over a file (default: 500M)")
    p.add_argument("--out", help="JSON lines are added to this file")
    args = p.parse_args(argv)
    bad = 0

    def told(record: harness.Record, line: str) -> None:
        nonlocal bad
        print(line, *(f"    {fault}" for fault in record["faults"]), sep="\n", flush=True)
        bad += len(record["faults"])
        if args.out:
            harness.emit({**harness.header("hostile", {}, []), **record}, args.out)

    with tempfile.TemporaryDirectory(prefix="flexengine-hostile-") as name:
        folder = Path(name)
        if args.rows:
            record = compare(args.rows, args.seed, folder)
            told(record, f"{sum(record['rows'].values())} rows in {record['seconds']:.1f} s: {record['rows']}")
        chosen = [f for f in FILES if args.only is None or f.name in args.only]
        if chosen and (reason := limit.why_not()):
            print(f"files are skipped: {reason}")
            chosen = []
        model = make(SHAPES["opt-tiny"], folder / "model") if chosen else folder
        for hostile in chosen:
            record = attempt(hostile, model, folder, parse_size(args.memory, "--memory"))
            peak = (record["peak"] or 0) / MB
            told(
                record,
                f"{hostile.name:20} {record['bytes']:>11,} bytes {record['rows']} rows {peak:6.0f} of"
                f" {record['limit'] / MB:.0f} MB {record['seconds']:6.1f} s",
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
