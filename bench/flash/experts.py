"""Experts on demand on a Mixtral shape, in half of its memory: bytes and seconds of a decode sweep.

python -m bench.flash.experts DIR [--shape mixtral] [--rows 1 2 4] [--turns 3] [--sides whole slots flash guessing]
                              [--memory BYTES] [--right 0.59] [--out FILE]

DIR: where the checkpoint is made or reused (17.9 GB). It has the widths and the vocabulary of Mixtral-8x7B, and 8
experts of which a token uses 2, but 6 layers in place of 32, with 2.9 GB each. mixtral-half has half of the widths, a
smaller vocabulary, and 8 layers (5.9 GB).

All sides have the same memory, in a cgroup, and the planner's policy. whole loads all experts of a layer that are not
in memory. slots is the planner's present choice: experts on demand into slots, while few are chosen. flash keeps
experts in memory, and reads others when they are chosen. guessing is flash that also reads experts of the next layer
early.

Weights are random. Which experts a token chooses is planted: as many of them were chosen by the token before as in the
mixture that bench.flash.moe_lm trains (planted_experts.py). The names of that mixture's guesses are right for 76 % of
all chosen experts, and for 59 % of those that are not in memory. Guesses of the planted model would all be right, so
names are replaced by random ones until --right of them are left (1 in 8 random ones is right by chance). The record has
what was then counted: repeated, distinct (experts that a layer used in all decode sweeps, mean over the layers),
guessed, missing_guessed, and bytes that guesses read ahead and in vain.

Turns alternate between the sides. One JSON line per number of rows.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from bench import harness
from bench.cases import Request
from bench.flash.planted_experts import PlantedMixtral
from bench.harness import Job, Limits, Record
from bench.models import make

PROMPT, NEW = 16, 24  # tokens of each row
RIGHT = 0.59  # share of the experts that are not in memory that guesses named, in the mixture of bench.flash.moe_lm
SHAPES = {
    "mixtral": PlantedMixtral(layers=6, hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "mixtral-half": PlantedMixtral(layers=8, hidden=2048, ffn=7168, heads=16, vocab=8192, kv_heads=4),
    "tiny": PlantedMixtral(layers=4, hidden=256, ffn=896, heads=4, vocab=512, kv_heads=2, shard_bytes=4_000_000),
}
SHOWN = ("sweep_seconds", "sweep_bytes", "repeated", "distinct", "guessed", "missing_guessed", "ahead_bytes",
         "wasted_bytes")  # fmt: skip
FLASH = {"flash": "oracle"}
SIDES: dict[str, Record] = {
    "whole": {"options": {"most_share": 0.0}},
    "slots": {},
    "flash": {"lossy": FLASH, "options": {"guessing": False}},
    "guessing": {"lossy": FLASH},
}


def requests(rows: int, vocabulary: int) -> tuple[Request, ...]:
    """Return rows of PROMPT random-looking tokens."""
    return tuple(Request(tuple(5 + (row * 97 + 31 * i * i) % (vocabulary - 5) for i in range(PROMPT)), NEW)
                 for row in range(rows))  # fmt: skip


def run_turn(side: str, model: Path, args: Any, rows: int, memory: int) -> Record:
    """Run a side once, and return its record."""
    options = {"right": args.right, **SIDES[side].get("options", {})}
    job = Job(str(model), requests(rows, SHAPES[args.shape].vocab), lossy=SIDES[side].get("lossy"), options=options)
    run = harness.run_module("bench.flash.experts_side", job.to_json(), Limits(memory))
    if "distinct" in run:
        run["distinct"] = mean(run["distinct"])
    if "error" in run:
        print(f"  {side}: {run['error']} {run.get('stderr', '')}", file=sys.stderr, flush=True)
    return run


def measure(model: Path, args: Any, rows: int, memory: int) -> tuple[Record, bool]:
    """Return the record of a number of rows, and whether all runs succeeded."""
    runs: dict[str, list[Record]] = {side: [] for side in args.sides}
    for _ in range(args.turns):
        for side in args.sides:
            runs[side].append(run_turn(side, model, args, rows, memory))
    every = [run for turns in runs.values() for run in turns]
    shown = {name: harness.medians(runs, name) for name in SHOWN}
    print(f"{rows} rows: {harness.rounded(shown)}", file=sys.stderr, flush=True)
    case = {"shape": args.shape, "rows": rows, "memory": memory, "right": args.right}
    record = {
        **harness.header("flash_experts", case, every),
        "tokens_equal": len({str(run.get("token_ids")) for run in every}) == 1, **shown,
        "runs": {side: [harness.brief(run) for run in turns] for side, turns in runs.items()},
    }  # fmt: skip
    return record, not any("error" in run for run in every)


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="mixtral")
    parser.add_argument("--rows", type=harness.at_least_one, nargs="+", default=[1, 2, 4])
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--memory", type=harness.at_least_one, help="bytes of the cgroup (default: half of the model)")
    parser.add_argument("--right", type=float, default=RIGHT, help="share of the names of guesses that are kept")
    parser.add_argument("--out", help="append records to this file")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    model = make(shape, args.directory.resolve() / f"experts-{args.shape}", workers=2)
    memory = args.memory or sum(shape.nbytes(group) for group in shape.groups()) // 2
    fine = True
    for rows in args.rows:
        record, succeeded = measure(model, args, rows, memory)
        harness.emit(record, args.out)
        fine &= succeeded
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
