"""Common prefixes computed once or for each prompt, and scoring beside an older version, on the demo model.

python -m bench.prefix [--cases generate score] [--before DIR] [--turns 3] [--rows N] [--out prefix.jsonl]

generate: 200 prompts of 500 common tokens and 50 of their own, 5 tokens each, with and without prefix sharing. score:
256 contexts of 200 tokens with 4 continuations of 3, with this version, without prefix sharing, and with the version
whose checkout is DIR (--before). Sides take turns. One JSON line per case: seconds, computed prompt tokens beside the
least number, the ratio of the medians, and the plan's prediction. Exit code: 1 if the results of the sides differ.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Record
from bench.models import demo_model

SIDE = Path(__file__).with_name("side.py")
DEVICE_MEM = "8G"
TOLERANCE = 0.01  # nats, of sums of log probabilities


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        kind: generate or score.
        rows: prompts or contexts.
        common: tokens that prompts have in common, or tokens of a context.
        own: further tokens of each prompt.
        new: tokens to generate, or tokens of a continuation.
        choices: continuations of a context.
    """

    kind: str
    rows: int
    common: int
    own: int
    new: int
    choices: int = 1

    @property
    def least_tokens(self) -> int:
        """Prompt tokens to compute if each shared token is computed once. Each sequence computes at least the token
        whose logits it needs first."""
        if self.kind == "generate":
            return self.common + self.rows * self.own
        return self.rows * (self.common - 1 + self.choices * self.new)


CASES = {case.kind: case for case in (Case("generate", 200, 500, 50, 5), Case("score", 256, 200, 0, 3, 4))}


def run(case: Case, options: Record, checkout: Path) -> Record:
    """Return what a job took in a process of its own. checkout: of the version to run."""
    job = {**asdict(case), "model": str(demo_model()), "device_mem": DEVICE_MEM, "options": options}
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    made = subprocess.run(
        [sys.executable, str(SIDE)], input=json.dumps(job), text=True, capture_output=True, env=environment,
        cwd=checkout,
    )  # fmt: skip
    if made.returncode:
        raise SystemExit(f"{options} in {checkout} failed:\n{made.stderr[-2000:]}")
    found: Record = json.loads(made.stdout)
    return found


def measure(case: Case, before: Path | None, turns: int) -> tuple[Record, bool]:
    """Return the record of a case, and whether all sides have the same results."""
    here = harness.REPO
    sides: dict[str, tuple[Record, Path]] = {"shared": ({}, here), "alone": ({"prefix_sharing": False}, here)}
    if case.kind == "score" and before is not None:
        sides["before"] = ({}, before)
    runs: dict[str, list[Record]] = {name: [] for name in sides}
    words = ["measure", "--model", str(demo_model()), "--device-mem", DEVICE_MEM, "--quiet"]  # rates for predictions
    subprocess.run([sys.executable, "-m", "flexengine", *words], cwd=here, check=True, stdout=subprocess.DEVNULL)
    for _ in range(turns):
        for name, (options, checkout) in sides.items():
            runs[name].append(run(case, options, checkout))
    seconds = {name: median(r["seconds"] for r in made) for name, made in runs.items()}
    answers = [r["answer"] for made in runs.values() for r in made]
    same = all(alike(case, answer, answers[0]) for answer in answers)
    shared = runs["shared"]
    names = ("seconds", "prefill_seconds", "decode_seconds", "computed_prompt_tokens", "sweeps")
    return {
        "same": same, "runs": {name: [{n: r[n] for n in names} for r in made] for name, made in runs.items()},
        "seconds": seconds, "speedup": {name: s / seconds["shared"] for name, s in seconds.items()},
        "least_tokens": case.least_tokens, "computed_tokens": shared[0]["computed_prompt_tokens"],
        "predicted": median(r["predicted_seconds"] / r["sweep_seconds"] for r in shared),
        "policy": shared[0]["policy"],
    }, same  # fmt: skip


def alike(case: Case, one: Any, other: Any) -> bool:
    """Return whether two answers are equal: tokens exactly, log probabilities within TOLERANCE."""
    if case.kind == "generate":
        return bool(one == other)
    return all(abs(a - b) <= TOLERANCE for a, b in zip(one, other, strict=True))


def main() -> int:
    """Measure and print the cases that the command line names. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--before", type=Path, metavar="DIR", help="checkout of an older version, also run for scoring")
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--rows", type=harness.at_least_one, help="fewer prompts or contexts")
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    good = True
    for name in args.cases:
        case = CASES[name] if args.rows is None else Case(**{**asdict(CASES[name]), "rows": args.rows})
        line, same = measure(case, args.before, args.turns)
        harness.emit({**harness.header("prefix", case, [{"versions": harness.versions()}]), **line}, args.out)
        good = good and same
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
