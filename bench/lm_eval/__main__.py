"""flexengine lm-eval against the `hf` model of lm-evaluation-harness, on local tasks with the demo model (SmolLM2).

python -m bench.lm_eval [--cases NAME...] [--rows N] [--batches N...] [--runs N] [--smoke] [--out lm_eval.jsonl]

Cases: `three` has a task of each type of request, with choices of six words; `word` has choices of one word, of which
`hf` scores those of one token in one forward pass; `shared` is `word` after eight examples, the same ones for each
question. `hf` first runs once with each batch size, and flexengine once, as its first run on a machine compiles its
kernels. The fastest size of `hf` is then run in turns with flexengine. Seconds are those of opening the model and of
the evaluation, in a process each. One JSON line per case: medians, their ratio, and the largest relative difference of
a metric. Exit code: 1 if a side failed, or if a metric differs in 4 digits.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record
from bench.lm_eval.tasks import TASKS, write
from bench.models import demo_model

TOLERANCE = 1e-4  # relative difference of a metric
TARGETS = {"three": 0.4, "word": None, "shared": 0.25}  # most seconds of flexengine, as a share of those of hf


@dataclass(frozen=True)
class Case:
    """Tasks to run.

    Attributes:
        rows: documents of a task of multiple choice; other tasks have a quarter.
    """

    name: str
    rows: int
    seed: int = 1


def run(case: Case, folder: Path, batches: list[int], runs: int, options: Record) -> Record:
    """Run both sides of a case, and return its record."""
    job: dict[str, Any] = {"model": str(demo_model()), "tasks": TASKS[case.name], "folder": str(folder)}

    def side(name: str, batch: int = 1) -> Record:
        line = harness.run_module("bench.lm_eval.side", json.dumps({**job, "side": name, "batch": batch,
                                                                    "options": options}))  # fmt: skip
        if "skipped" in line:
            line["error"] = f"skipped: {line['skipped']}"
        shown = line.get("error") or f"{line['seconds']:.1f} s"
        print(f"  {case.name}, {name} (batch {batch}): {shown}\n{line.get('stderr', '')}", file=sys.stderr, flush=True)
        return {**line, "batch": batch}

    tried = [side("hf", batch) for batch in batches]
    first = side("flexengine")
    fine = [line for line in tried if "error" not in line]
    record: Record = {}
    ours, theirs = list[Record](), list[Record]()
    if fine:
        best = min(fine, key=lambda line: float(line["seconds"]))["batch"]
        for _ in range(runs):
            ours.append(side("flexengine"))
            theirs.append(side("hf", best))
        record["batch"] = best
    seconds = {name: harness.stats(harness.good(lines, "seconds"))
               for name, lines in (("flexengine", ours), ("hf", theirs))}  # fmt: skip
    mine, other = seconds["flexengine"], seconds["hf"]
    ratio = mine["median"] / other["median"] if mine and other else None
    return {
        **harness.header("lm_eval", case, [*tried, *ours, *theirs]), **record, "seconds": seconds, "ratio": ratio,
        "target": TARGETS[case.name], "largest_difference": difference(ours, theirs),
        "first_seconds": first.get("seconds"),
        "hf_seconds_by_batch": {str(line["batch"]): line.get("seconds") for line in tried},
        "runs": [harness.brief(line) for line in (*ours, *theirs)],
    }  # fmt: skip


def difference(ours: list[Record], theirs: list[Record]) -> float | None:
    """Return the largest relative difference of a metric between the sides; None if a side has none."""
    mine, other = ([line["metrics"] for line in lines if "metrics" in line] for lines in (ours, theirs))
    if not mine or not other:
        return None
    gaps = (abs(float(mine[0][name]) - value) / max(abs(value), 1e-9) for name, value in other[0].items())
    return max(gaps, default=None)


def main() -> int:
    """Run the cases. Return the exit code."""
    parser = argparse.ArgumentParser(description="flexengine lm-eval against the hf model of lm-evaluation-harness")
    parser.add_argument("--cases", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rows", type=harness.at_least_one, default=128, help="documents of multiple choice")
    parser.add_argument("--batches", nargs="+", type=harness.at_least_one, default=[1, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--runs", type=harness.at_least_one, default=3, help="alternating rounds (default 3)")
    parser.add_argument("--device-mem", help="passed to the engine, e.g. 1200M (default: its own choice)")
    parser.add_argument("--smoke", action="store_true", help="four documents, one batch size, one round")
    parser.add_argument("--out", help="file for the records (default: lm_eval.jsonl under bench/results/)")
    args = parser.parse_args()
    options = {} if args.device_mem is None else {"device_mem": args.device_mem}
    failed = False
    for name in args.cases:
        case = Case(name, 4 if args.smoke else args.rows)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), case.rows, case.seed)
            record = run(case, Path(folder), args.batches[:1] if args.smoke else args.batches,
                         1 if args.smoke else args.runs, options)  # fmt: skip
        harness.emit(record, args.out or (None if args.smoke else "lm_eval.jsonl"))
        failed |= record["ratio"] is None or record["largest_difference"] > TOLERANCE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
