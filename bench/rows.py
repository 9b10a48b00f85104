"""How time and memory grow with the number of rows: short prompts on a tiny model, where nearly all is overhead.

python -m bench.rows [--rows 1000 10000 100000]

Each count is one process of the command line. Prints a JSON line per count: wall seconds, peak resident bytes of the
process, and from the second count on the milliseconds that each further row took.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import Record, emit, machine

TOKENS = 8  # generated per row
SEED = 1


def make(folder: Path, rows: int) -> Path:
    """A file of `rows` prompts of 4 to 12 token ids."""
    rng = random.Random(SEED)
    path = folder / f"{rows}.jsonl"
    with path.open("w") as file:
        for _ in range(rows):
            ids = [rng.randrange(3, 512) for _ in range(rng.randint(4, 12))]
            file.write(json.dumps({"prompt_token_ids": ids}) + "\n")
    return path


def make_model(folder: Path) -> Path:
    """Three OPT layers of random weights, 0.2 M parameters."""
    command = [sys.executable, "-m", "bench.models", "opt-tiny", str(folder / "model")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "model"


def run(model: Path, prompts: Path, rows: int) -> Record:
    """One job, from the start of its process to the end."""
    output = prompts.with_suffix(".out.jsonl")
    command = [sys.executable, "-m", "flexengine.run", str(prompts), "--model", str(model), "--output", str(output),
               "--max-tokens", str(TOKENS), "--ignore-eos", "--device", "cpu"]  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(log[-2000:])
    with output.open("rb") as lines:
        found = sum(1 for _ in lines)
    if found != rows:
        raise SystemExit(f"{found} rows came out of {rows}")
    computed = sum(float(x) for x in re.findall(r"(?:prefill|decode) ([\d.]+) s", log.splitlines()[-1]))
    return {"rows": rows, "seconds": seconds, "sweeps_seconds": computed, "peak_rss": usage.ru_maxrss * 1024}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    arguments = parser.parse_args()
    counts = sorted(arguments.rows)
    with tempfile.TemporaryDirectory(prefix="rows-") as name:
        model = make_model(Path(name))
        before: Record | None = None
        for rows in counts:
            record = run(model, make(Path(name), rows), rows)
            if before:
                more = rows - before["rows"]
                record["ms_per_further_row"] = 1e3 * (record["seconds"] - before["seconds"]) / more
                record["rss_bytes_per_further_row"] = (record["peak_rss"] - before["peak_rss"]) / more
            emit({"bench": "rows", **record, "tokens": TOKENS, "seed": SEED, "machine": machine()}, arguments.out)
            before = record


if __name__ == "__main__":
    main()
