"""flexengine wrangle on real tables, against transformers row by row. bench/wrangle.sh fetches the tables.

python -m bench.wrangle DIR [--cases NAME...] [--rows N] [--shots K] [--smoke] [--out wrangle.jsonl]

One JSON line per case: answers that are those of transformers, the largest difference of a log probability, metrics,
and seconds of both sides. The model is the demo model. Its F1 in matching is low: the size of the model is the reason,
so equality is what this bench checks. Exit code: 1 if an answer differs although the log probabilities of the reference
do not make it a tie.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import harness
from bench.harness import Record
from bench.models import demo_model
from bench.wrangle.data import LABEL, tables

TOLERANCE = 1e-3  # nats: float32 sums of hundreds of tokens, in another order


@dataclass(frozen=True)
class Case:
    """A run of `flexengine wrangle`.

    Attributes:
        table: name of the table, see `data.tables`.
        options: options of the command.
        shots: examples in a prompt.
        limit: option that sets the number of rows.
        rows: number of rows; None is all.
    """

    name: str
    task: str
    table: str
    options: tuple[str, ...]
    shots: int
    limit: str
    rows: int | None = None

    def words(self, table: Path, output: Path, shots: int, rows: int | None) -> list[str]:
        """Return the command line."""
        some = () if rows is None else (self.limit, str(rows))
        return ["wrangle", self.task, str(table), "-o", str(output), *self.options, "--shots", str(shots), *some,
                "--json", "--restart"]  # fmt: skip


_MATCH = ("--label", LABEL, "--pick", "balanced")
CASES = (
    Case("fodors-zagats", "match", "fodors-zagats", (*_MATCH, "--noun", "Restaurant"), 4, "--limit"),
    Case("dblp-acm", "match", "dblp-acm", (*_MATCH, "--noun", "Paper"), 4, "--limit"),
    Case("city", "impute", "restaurants", ("--column", "city", "--evaluate"), 8, "--test", 200),
)
SMOKE_ROWS = {"match": 8, "impute": 3}


def run(case: Case, table: Path, shots: int, rows: int | None) -> Record:
    """Run both sides of a case, and return its record."""
    output = table.with_name(f"{case.name}-out.jsonl")
    began = time.perf_counter()
    command = [sys.executable, "-m", "flexengine", *case.words(table, output, shots, rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise SystemExit(f"flexengine wrangle ended with exit code {done.returncode}")
    asked = Path(f"{output}.rows.jsonl")
    reference = subprocess.run(
        [sys.executable, "-m", "bench.wrangle.reference", str(demo_model()), str(asked)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    theirs: Record = json.loads(reference.stdout.splitlines()[-1])
    ours = json.loads(done.stdout.splitlines()[-1])
    header = harness.header("wrangle", case, [theirs])
    header["case"] = asdict(case) | {"shots": shots, "rows": rows}
    return {
        **header, **compared(answers(output, asked), theirs["answers"]), "metrics": ours["metrics"],
        "failed": ours["failed"], "seconds": seconds, "reference_seconds": theirs["seconds"],
    }  # fmt: skip


def answers(output: Path, asked: Path) -> list[tuple[str | None, float | None]]:
    """Return the answers in an output, in the order of the questions."""
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    questions = [json.loads(line) for line in asked.read_text("utf-8").splitlines()]
    names = [(q["row"], q["target"]) for q in questions]
    return [(rows[row][f"{target}_prediction"], rows[row][f"{target}_confidence"]) for row, target in names]


def compared(ours: list[tuple[str | None, float | None]], theirs: list[tuple[str, float]]) -> Record:
    """Return the number of equal answers and the largest difference of a log probability among them. `wrong` counts
    different answers whose log probabilities are not a tie within TOLERANCE."""
    pairs = list(zip(ours, theirs, strict=True))
    gaps = [abs(mine[1] - other[1]) for mine, other in pairs if mine[0] == other[0] and mine[1] is not None]
    wrong = sum(mine[0] != other[0] and (mine[1] is None or abs(mine[1] - other[1]) > TOLERANCE)
                for mine, other in pairs)  # fmt: skip
    return {"questions": len(pairs), "equal": len(gaps), "wrong": wrong, "largest_difference": max(gaps, default=None)}


def main() -> int:
    """Run the cases. Return the exit code."""
    parser = argparse.ArgumentParser(description="flexengine wrangle on real tables, against transformers")
    parser.add_argument("folder", type=Path, help="folder with the sdist of py-entitymatching")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--rows", type=int, help="only so many rows")
    parser.add_argument("--shots", type=int, help="examples in a prompt")
    parser.add_argument("--smoke", action="store_true", help="a few rows and one or two examples")
    parser.add_argument("--out", help="file for the records (default: wrangle.jsonl under bench/results/)")
    args = parser.parse_args()
    made, wrong = tables(args.folder), 0
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        shots = 2 if args.smoke else case.shots if args.shots is None else args.shots
        rows = SMOKE_ROWS[case.task] if args.smoke else args.rows or case.rows
        record = run(case, made[case.table], shots, rows)
        harness.emit(record, args.out or (None if args.smoke else "wrangle.jsonl"))
        wrong += record["wrong"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
