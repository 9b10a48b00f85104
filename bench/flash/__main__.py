"""Neurons on demand against streaming, on an OPT-6.7B shape with planted activations, in half of its memory.

python -m bench.flash DIR [--out FILE] [--shape opt-6.7b] [--rows 1 2 4 8] [--turns 3] [--sides naive streamed flash]

DIR: where the checkpoint is made or reused (13 GB; the cache takes 9 GB more for the records). Sides: naive reads all
weights in every sweep. streamed is the planner's choice without flash. flash reads neurons when they become active.
All have the same memory, in a cgroup. Turns alternate between the sides. Rows have prompts of 8, 32, 56, ... tokens, so
that they use different neurons; after 480 tokens lengths begin again at 20. Rows of lengths that differ by 24 use
neurons that are somewhat alike, so the first half of the rows takes turns with the second half. The last line of every
number of rows has seconds of each side: of a decode sweep, of a decoded token, of the job, and of the job as the plan
predicts it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import harness
from bench.cases import Request
from bench.flash.planted import SHAPES, PlantedShape, plant_predictors
from bench.harness import Job, Limits, Record
from bench.models import make

NEW = 32  # tokens generated per row
TIMES = ("sweep_seconds", "token_seconds", "job_seconds", "predicted_seconds")
NAIVE = {"gpu_batch_size": 8, "num_gpu_batches": 1, "weights": [0, 0, 1]}
SIDES: dict[str, Record] = {
    "naive": {"policy": NAIVE}, "streamed": {}, "flash": {"lossy": {"flash": "predictors"}},
}  # fmt: skip


def requests(rows: int, vocabulary: int) -> tuple[Request, ...]:
    """Return rows with prompts of 8, 32, 56, ... tokens, from the 21st on of 20, 44, 68, ... tokens, where each of the
    first half of them is followed by one of the second half."""
    rising = [8 + 24 * (row % 20) + 12 * (row // 20) for row in range(rows)]
    lengths = [rising[row // 2 + row % 2 * ((rows + 1) // 2)] for row in range(rows)]
    return tuple(Request(tuple(5 + (row * 97 + i) % (vocabulary - 5) for i in range(n)), NEW)
                 for row, n in enumerate(lengths))  # fmt: skip


def run_turn(side: str, model: Path, shape: PlantedShape, rows: int, memory: int) -> Record:
    """Run a side once. Return its record with the seconds of a decode sweep."""
    job = Job(str(model), requests(rows, shape.vocab), **SIDES[side])
    run = harness.run_side("flexengine_side", job, Limits(memory))
    if "summary" in run:
        summary: dict[str, Any] = run["summary"]
        run["sweep_seconds"] = summary["decode_seconds"] / max(1, summary["sweeps"] - 1)
        run["token_seconds"] = summary["decode_seconds"] / (rows * (NEW - 1))
        run["job_seconds"] = summary["plan"]["measured_seconds"]
        run["predicted_seconds"] = summary["plan"]["predicted_seconds"]
    return run


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="opt-6.7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--share", type=float, default=0.5, help="memory limit as a share of the model (default 0.5)")
    parser.add_argument("--out", help="append records to this file")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    model = make(shape, args.directory.resolve() / args.shape, workers=2)
    plant_predictors(model, shape)
    memory = int(args.share * sum(shape.nbytes(group) for group in shape.groups()))
    failed = False
    for rows in args.rows:
        runs: dict[str, list[Record]] = {side: [] for side in args.sides}
        for _ in range(args.turns):
            for side in args.sides:
                runs[side].append(run_turn(side, model, shape, rows, memory))
        all_runs = [run for turns in runs.values() for run in turns]
        failed |= any("error" in run for run in all_runs)
        seconds = {name: harness.medians(runs, name) for name in TIMES}
        record = {
            **harness.header("flash", {"shape": args.shape, "rows": rows, "memory": memory}, all_runs),
            "tokens_equal": len({str(run.get("token_ids")) for run in all_runs}) == 1, **seconds,
            "runs": {side: [harness.brief(run) for run in turns] for side, turns in runs.items()},
        }  # fmt: skip
        harness.emit(record, args.out)
        print(f"{rows} rows: {harness.rounded(seconds)}", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
