"""The block of docs/benchmarks.md about common prefixes, scoring, evaluation harnesses and data wrangling."""

from collections.abc import Iterator
from pathlib import Path

from bench.harness import Record
from bench.report.lines import RESULTS, records, short, table

Row = tuple[str, str, str, str, str, str, str]  # job, seconds, other side, its seconds, ratio, results, day
COMMANDS = ("python -m bench.prefix --out prefix.jsonl", "bench/lm_eval.sh", "bench/helm.sh", "bench/wrangle.sh")

BUSY = 2.0  # load per core above which a record says that other programs ran


def uses_block(folder: Path = RESULTS) -> str:
    """Return the table of jobs with their other sides, and the commands under it."""
    rows = [*_prefix(folder), *_lm_eval(folder), *_helm(folder), *_wrangle(folder)]
    if not rows:
        return "Not recorded yet."
    head = ("job", "flexengine s", "other side", "its s", "times as fast", "results", "day")
    listed = "\n".join(COMMANDS)
    return f"{table(head, rows)}\n\nCommands:\n\n<!-- not run: an hour -->\n```sh\n{listed}\n```"


def _row(job: str, ours: float, other: str, theirs: float, results: str, time: str) -> Row:
    return job, short(ours), other, short(theirs), short(theirs / ours), results, time[:10]


def _prefix(folder: Path) -> Iterator[Row]:
    newest = {record["case"]["kind"]: record for record in records("prefix", folder=folder)}
    for kind, line in newest.items():
        case, seconds = line["case"], line["seconds"]
        job = (
            f"{case['rows']} prompts, {case['common']} common tokens and {case['own']} own, {case['new']} out"
            if kind == "generate" else
            f"{case['rows']} contexts of {case['common']} tokens, {case['choices']} continuations of {case['new']}"
        )  # fmt: skip
        results = (f"{'equal' if line['same'] else 'different'}; {line['computed_tokens']:,} prompt tokens computed,"
                   f" {line['least_tokens']:,} different; predicted time {short(line['predicted'])} of the"
                   " measured")  # fmt: skip
        others = {"alone": "without prefix sharing", "before": "one decode step for each scored token"}
        for name, other in others.items():
            if name in seconds:
                yield _row(job, seconds["shared"], other, seconds[name], results, line["time"])


def _lm_eval(folder: Path) -> Iterator[Row]:
    tasks = {"three": "a task of each type of request", "word": "choices of one word",
             "shared": "choices of one word after 8 examples"}  # fmt: skip
    for line in _newest("lm_eval", folder):
        results = f"metrics differ by at most {line['largest_difference']:.1g} of their value"
        yield _row(f"lm-eval: {tasks[line['case']['name']]}", *_sides(line, f"its `hf` model, batch {line['batch']}"),
                   results, line["time"])  # fmt: skip


def _helm(folder: Path) -> Iterator[Row]:
    suites = {"three": "simple_mcqa, synthetic_reasoning, dyck_language",
              "scored": "multiple choice by log probability"}  # fmt: skip
    for line in _newest("helm", folder):
        found = line["outcome"]
        results = (f"{found['equal_completions']} of {found['completions']} completions equal, metrics differ by at"
                   f" most {found['largest_difference']:.1g}")  # fmt: skip
        yield _row(f"HELM: {suites[line['case']['name']]}", *_sides(line, f"its own client, `-n {line['threads']}`"),
                   results, line["time"])  # fmt: skip


def _wrangle(folder: Path) -> Iterator[Row]:
    for line in _newest("wrangle", folder):
        metrics = ", ".join(f"{name} {value:.3g}" for name, value in line["metrics"].items()
                            if name in ("f1", "accuracy"))  # fmt: skip
        results = f"{line['equal']} of {line['questions']} answers equal; {metrics}"
        if line.get("busy") or line["machine"]["load"] > BUSY * line["machine"]["cores"]:
            results += "; other programs used the processor meanwhile"
        yield _row(f"wrangle: {line['case']['task']}, {line['case']['name']}, {line['case']['shots']} shots",
                   line["seconds"], "transformers, one prompt at a time", line["reference_seconds"], results,
                   line["time"])  # fmt: skip


def _newest(bench: str, folder: Path) -> list[Record]:
    """Return the latest record of each case that has no error."""
    good = (line for line in records(bench, folder=folder) if not line.get("errors"))
    return list({line["case"]["name"]: line for line in good}.values())


def _sides(line: Record, other: str) -> tuple[float, str, float]:
    """Return the arguments of `_row`: median seconds of flexengine, the other side's name, its median seconds."""
    return line["seconds"]["flexengine"]["median"], other, line["seconds"]["hf"]["median"]
