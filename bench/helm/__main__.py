"""flexengine helm against HELM's own HuggingFaceClient, with the demo model (SmolLM2).

python -m bench.helm [--cases NAME...] [--instances N] [--threads N...] [--runs N] [--smoke] [--out helm.jsonl]

Cases: `three` has simple_mcqa, synthetic_reasoning and dyck_language; `scored` is multiple choice by the log
probability of each answer, on generated questions. Each round runs flexengine once, and HELM's own client once with
each number of threads (-n); the client's fastest number is compared. Seconds are those of whole processes, from
Python's start to the written metrics, with empty caches of HELM. One JSON line per case: medians, their ratio, how many
completions have equal texts and tokens, and the largest relative difference of a metric. Exit code: 1 if a side failed,
or if a completion differs, or a metric in 4 digits.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record
from bench.helm.outcome import Outcome, compared
from bench.helm.questions import write
from bench.models import demo_model

TOLERANCE = 1e-4  # relative difference of a metric
NAME = "SmolLM2"  # of the model in HELM
ENTRIES = {
    "three": ("simple_mcqa", "synthetic_reasoning:mode=pattern_match", "dyck_language:num_parenthesis_pairs=3"),
    "scored": ("custom_mcqa:path={questions},num_train_instances=2,method=multiple_choice_separate_original",),
}


@dataclass(frozen=True)
class Case:
    """Runs of HELM.

    Attributes:
        instances: --max-eval-instances.
        seed: seed of generated questions.
    """

    name: str
    instances: int
    seed: int = 1


def run(case: Case, folder: Path, threads: list[int], runs: int) -> Record:
    """Run all sides of a case, and return its record."""
    questions, model = folder / "questions.jsonl", folder / NAME
    write(questions, case.instances, case.seed)
    model.symlink_to(demo_model())
    entries = [entry.format(questions=questions) for entry in ENTRIES[case.name]]
    job = {"model": str(model), "name": NAME, "entries": entries}

    def side(name: str, number: int, round_: int, instances: int = case.instances) -> Record:
        output = folder / f"{name}-{number}-{round_}"
        output.mkdir()
        began = time.perf_counter()
        line = harness.run_module("bench.helm.side", json.dumps(
            {**job, "side": name, "threads": number, "folder": str(output), "instances": instances}))  # fmt: skip
        line |= {"side": name, "threads": number, "seconds": time.perf_counter() - began, "folder": str(output)}
        if "skipped" in line:
            line["error"] = f"skipped: {line['skipped']}"
        shown = line.get("error") or f"{line['seconds']:.1f} s"
        print(f"  {case.name}, {name} (-n {number}): {shown}\n{line.get('stderr', '')}", file=sys.stderr, flush=True)
        return line

    side("flexengine", 1, -1, instances=1)  # not counted: it builds kernels, and measures the machine
    lines = []
    for round_ in range(runs):
        lines += [side("flexengine", 1, round_), *(side("hf", number, round_) for number in threads)]
    return record(case, lines)


def record(case: Case, lines: list[Record]) -> Record:
    """Return the record of a case."""
    good = [line for line in lines if "error" not in line]
    ours = [line for line in good if line["side"] == "flexengine"]
    by_threads: dict[int, list[float]] = {}
    for line in good:
        if line["side"] == "hf":
            by_threads.setdefault(line["threads"], []).append(line["seconds"])
    best = min(by_threads, key=lambda number: statistics.median(by_threads[number]), default=0)
    theirs = [line for line in good if line["side"] == "hf" and line["threads"] == best]
    seconds = {name: harness.stats([line["seconds"] for line in side])
               for name, side in (("flexengine", ours), ("hf", theirs))}  # fmt: skip
    mine, other = seconds["flexengine"], seconds["hf"]
    outcomes = [compared(Path(one["folder"]), Path(two["folder"])) for one, two in zip(ours, theirs, strict=False)]
    found = max(outcomes, key=Outcome.fault, default=None)
    return {
        **harness.header("helm", case, lines), "entries": ENTRIES[case.name], "threads": best, "seconds": seconds,
        "ratio": mine["median"] / other["median"] if mine and other else None,
        "outcome": None if found is None else vars(found),
        "hf_seconds_by_threads": {str(number): harness.stats(some) for number, some in by_threads.items()},
        "errors": [line["error"] for line in lines if "error" in line],
    }  # fmt: skip


def differs(record: dict[str, Any]) -> bool:
    """Return whether a side failed, or the sides differ."""
    found = record["outcome"]
    return bool(record["errors"]) or found is None or not found["metrics"] or (
        found["equal_completions"] < found["completions"] or found["largest_difference"] > TOLERANCE)  # fmt: skip


def main() -> int:
    """Run the cases. Return the exit code."""
    parser = argparse.ArgumentParser(description="flexengine helm against HELM's own HuggingFaceClient")
    parser.add_argument("--cases", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("-m", "--instances", type=harness.at_least_one, default=32, help="of each run (default 32)")
    parser.add_argument("--threads", nargs="+", type=harness.at_least_one, default=[1, 4], metavar="N",
                        help="numbers of threads of HELM's own client (default 1 4; HELM's default is 4)")  # fmt: skip
    parser.add_argument("--runs", type=harness.at_least_one, default=2, help="rounds (default 2)")
    parser.add_argument("--smoke", action="store_true", help="two instances, four threads, one round")
    parser.add_argument("--out", help="file for the records (default: helm.jsonl under bench/results/)")
    args = parser.parse_args()
    failed = False
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, 2 if args.smoke else args.instances)
            made = run(case, Path(folder), [4] if args.smoke else args.threads, 1 if args.smoke else args.runs)
        harness.emit(made, args.out or (None if args.smoke else "helm.jsonl"))
        failed |= differs(made)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
