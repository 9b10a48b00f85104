"""Accuracy of the planner's predictions, and quality of the policies that it chooses.

python -m bench.plan error --model-dir DIR [--out plan.jsonl]
python -m bench.plan held-out --model-dir DIR [--only N ...] [--out plan.jsonl]
python -m bench.plan first --model-dir DIR [--only N ...] [--out plan.jsonl]
python -m bench.plan auto --model-dir DIR [--cases resident host disk] [--pairs 2] [--out plan.jsonl]

DIR is the directory in which models are made or reused. `error`: predicted and measured seconds of given policies on
cpu and sim. `held-out`: the same for cases on which the cost model was not developed: formats and shapes of attention,
windows, experts, long prompts and outputs, encoded weights, data on disk, scored rows, and the planner's own policies.
`first`: the same cases, each planned as the first job on a machine, with a directory of its own for measured rates.
Errors are printed beside their limits: measured rates 8 % (median) and 20 % (worst), first jobs 40 % (worst).
`auto`: the planner's choice against a grid of 24 policies, and against the best of them run again beside it.
Every run is a process of its own with the model dropped from the page cache. Before the first run of a model on a
machine, a process measures both, and all runs of them plan with these rates. Rates stored in $FLEXENGINE_CACHE are used
unchanged, with the corrections of earlier jobs; if the directory is empty, they are measured.
--quick: a model of three small layers and assumed rates, to check that the bench works.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench import harness, limit
from bench.cases import Case
from bench.compare.bound import evict
from bench.harness import Job, Limits, Record
from bench.models import SHAPES, demo_model, make, shard_files
from bench.plan.cases import (
    AUTO,
    AUTO_QUICK,
    DEMO,
    ERROR,
    ERROR_QUICK,
    HELD_OUT,
    HELD_OUT_QUICK,
    OPT,
    AutoCase,
    ErrorCase,
    Shape,
)
from bench.plan.side import ASSUME, MEASURE, Asked

SIDE = "bench.plan.side"
FIRST = "first"
CASES = {"error": (ERROR, ERROR_QUICK), "held-out": (HELD_OUT, HELD_OUT_QUICK), FIRST: (HELD_OUT, HELD_OUT_QUICK)}
LIMITS = {"median": 0.08, "worst": 0.2}  # of absolute relative errors with measured rates
FIRST_LIMITS = {"worst": 0.4}
TIMEOUT = 300.0  # most seconds of a process
Ask = Callable[[Asked, Limits], Record]


def ask_process(asked: Asked, limits: Limits) -> Record:
    """Run the side in a process of its own, and return its JSON line."""
    return harness.run_module(SIDE, asked.to_json(), limits)


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """State that all runs share.

    Attributes:
        model_dir: directory in which checkpoints are made.
        scratch: an empty directory on the same disk.
        quick: see the module's docstring.
        ask: run a side.
        models: directories of the models used so far, by name.
        rates: hardware, and the seconds that measuring it took, of the models and machines used so far.
    """

    model_dir: Path
    scratch: str
    quick: bool = False
    ask: Ask = ask_process
    models: dict[str, Path] = field(default_factory=dict)
    rates: dict[str, Record] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """Return the directory of a model. Make the model if necessary."""
        if name not in self.models:
            home = self.model_dir if name == OPT else self.model_dir / name
            self.models[name] = demo_model().resolve() if name == DEMO else make(SHAPES[name], home, workers=2)
        return self.models[name]

    def asked(self, case: ErrorCase) -> Asked:
        """Return the input of a side for a case, without a policy."""
        directory, machine = self.model(case.model), case.machine
        requests = tuple(case.case.requests(harness.vocab_size(directory)))
        job = Job(str(directory), requests, dtype=case.dtype, device=machine.device, device_mem=machine.device_mem,
                  scratch=self.scratch, lossy=case.lossy)  # fmt: skip
        return Asked(job, links=machine.links, score=case.score)

    def measured(self, case: ErrorCase) -> Record:
        """Return {"hardware", "seconds"} of machine and model. Raise SystemExit if they cannot be measured."""
        key = " ".join([f"{case.model} on {case.machine.rates}", *filter(None, [case.dtype])])
        key += f" {sorted(case.lossy.items())}" if case.lossy else ""
        if key not in self.rates:
            say(f"rates of {key}")
            asked = replace(self.asked(case), task=ASSUME if self.quick else MEASURE)
            line = self.ask(asked, Limits(case.machine.memory, TIMEOUT))
            if "error" in line:
                raise SystemExit(f"no rates of {key}: {line}")
            self.rates[key] = {"of": key, "seconds": line["seconds"], "hardware": line["hardware"]}
        return self.rates[key]

    def run(self, case: ErrorCase, first: bool = False) -> Record:
        """Run a case once, and return its record with rates and errors; see `judged`. first: without known rates."""
        hardware = None if first else self.measured(case)["hardware"]
        evict(shard_files(self.model(case.model)))
        asked = self.asked(case)
        policy = case.shape.policy if case.shape else None
        asked = replace(asked, job=replace(asked.job, policy=policy), hardware=hardware)
        with empty_rates() if first else nullcontext():
            line = judged(self.ask(asked, Limits(case.machine.memory, TIMEOUT)), case.case)
        shown = line.get("error") or line.get("refused") or (
            f"{line['tok_s']:.2f} tok/s, {line['total_seconds']:.1f} s,"
            f" predicted {line['predicted']['seconds'] + line['predicted']['load_seconds']:.1f} s"
            f" ({line['prediction_error']:+.0%}); {by_lane(lanes_of(line))}"
        )  # fmt: skip
        say(f"  {'auto' if case.shape is None else briefly(case.shape)}: {shown}")
        if "stderr" in line:
            say(line["stderr"])
        return line


@contextmanager
def empty_rates() -> Iterator[None]:
    """Set $FLEXENGINE_CACHE to a temporary directory without measured rates. Links lead to everything else."""
    before, old = os.environ.get("FLEXENGINE_CACHE"), harness.cache()
    with tempfile.TemporaryDirectory(prefix="bench-") as new:
        for path in old.iterdir() if old.is_dir() else ():
            if path.name != "hardware":
                (Path(new) / path.name).symlink_to(path)
        os.environ["FLEXENGINE_CACHE"] = new
        try:
            yield
        finally:
            os.environ.pop("FLEXENGINE_CACHE")
            if before is not None:
                os.environ["FLEXENGINE_CACHE"] = before


def lanes_of(line: Record) -> Record:
    """Return by lane the seconds predicted for the sweeps made, alone and slowed by other lanes, and the measured ones;
    and the error of the nearest number between the first two."""
    lanes, predicted = {}, line["predicted"]
    for lane, made in line["summary"]["plan"]["lanes"].items():
        alone, measured, whole = made["predicted"], made["measured"], predicted["lanes"].get(lane, 0.0)
        slowed = alone * max(1.0, predicted["slowed"].get(lane, 0.0) / whole) if whole else alone
        error = min(max(measured, alone), slowed) / measured - 1 if measured else None
        lanes[lane] = {"predicted": alone, "slowed": slowed, "measured": measured, "error": error}
    return lanes


def by_lane(lanes: Record) -> str:
    """Return as text the numbers of the lanes that worked: "predicted seconds alone - slowed: measured"."""
    worked = {lane: x for lane, x in lanes.items() if max(x["predicted"], x["measured"]) >= 0.05}
    return ", ".join(
        f"{lane} {x['predicted']:.1f}-{x['slowed']:.1f}: {x['measured']:.1f}" for lane, x in worked.items()
    )


def briefly(shape: Shape) -> str:
    """Return a policy as text, without fields that have their defaults."""
    said = {name: value for name, value in asdict(shape).items() if value != getattr(Shape(1), name)}
    return " ".join(f"{name}={value}" for name, value in said.items())


def judged(line: Record, case: Case) -> Record:
    """Return a run's record with added fields: tok_s (over the seconds of loading and all sweeps), sweeps_tok_s (over
    those of sweeps alone), and the error of the predicted seconds of all sweeps, predicted / measured - 1."""
    if "error" in line or "refused" in line:
        return line
    if line["generated_tokens"] != case.output_tokens:
        return {**line, "error": f"{line['generated_tokens']} tokens generated, not {case.output_tokens}"}
    summary = line["summary"]
    seconds, predicted = summary["total_seconds"], line["predicted"]  # weights that stay are read in the first sweep
    return {
        **line,
        "total_seconds": seconds,
        "tok_s": line["generated_tokens"] / (seconds + summary["load_seconds"]),
        "sweeps_tok_s": line["generated_tokens"] / seconds,
        "prediction_error": (predicted["seconds"] + predicted["load_seconds"]) / seconds - 1,
    }


def kept(line: Record) -> Record:
    """Return the recorded fields of a run."""
    if "summary" not in line:
        return harness.brief(line)
    summary, predicted = line["summary"], line["predicted"]
    rest = {k: v for k, v in harness.brief(line).items() if k not in ("summary", "predicted")}
    return {
        **rest,
        "predicted_seconds": predicted["seconds"],
        "load_seconds": [predicted["load_seconds"], summary["load_seconds"]],
        "sweeps": [predicted["sweeps"], summary["sweeps"]],
        "error_of_sweeps_made": summary["plan"]["error"],
        "lanes": {lane: {**numbers, "of_whole_plan": predicted["lanes"].get(lane, 0.0)}
                  for lane, numbers in lanes_of(line).items()},
        "peak_bytes": summary["peak_bytes"],
        "bytes": summary["bytes"],
        "policy": summary["policy"],
    }  # fmt: skip


# ---- error


def error_of(runs: Sequence[Record]) -> Record | None:
    """Return median and worst of |prediction_error|, and its signed mean; None for no runs."""
    signed = harness.good(runs, "prediction_error")
    errors = [abs(e) for e in signed]
    found = {"runs": len(errors), "mean": statistics.fmean(signed)} if signed else {}
    return {"median": statistics.median(errors), "worst": max(errors), **found} if errors else None


@dataclass(frozen=True)
class Part:
    """Case of a record of `error` or `held-out`."""

    name: str
    runs: int


def run_errors(bench: Bench, cases: Sequence[ErrorCase], part: str = "error") -> Record:
    """Run all cases, and return the record. Rates are measured before the first run that needs them."""
    runs, lines = [], []
    for number, case in enumerate(cases):
        say(f"run {number + 1} of {len(cases)}: {case.model} on {case.machine.device}, {case.case.name}")
        lines.append(bench.run(case, part == FIRST))
        runs.append({**asdict(case), **kept(lines[-1])})
    found = error_of([line for line in lines if "refused" not in line])
    limits = FIRST_LIMITS if part == FIRST else LIMITS
    if found:
        say("; ".join(f"{what} {found[what]:.1%} of at most {limit:.0%}" for what, limit in limits.items()))
    return {
        **harness.header("plan", Part(part, len(cases)), lines),
        "part": part,
        "prediction_error": found,
        "limits": limits,
        "failed": sum("error" in line or "refused" in line for line in lines),
        "runs": runs,
        "rates": list(bench.rates.values()),
    }


# ---- auto


@dataclass
class Tried:
    """Runs of an auto case.

    Attributes:
        auto: runs of the planner's policy.
        grid: runs of the grid's policies, including those that failed or do not fit.
        pairs: (grid's best, planner's) runs at the end.
    """

    auto: list[Record] = field(default_factory=list)
    grid: list[tuple[Shape, Record]] = field(default_factory=list)
    unfit: list[tuple[Shape, Record]] = field(default_factory=list)
    pairs: list[tuple[Record, Record]] = field(default_factory=list)

    @property
    def best(self) -> tuple[Shape, Record]:
        """Return the grid's fastest run."""
        return max(self.grid, key=lambda entry: entry[1]["tok_s"])

    @property
    def ratios(self) -> list[float]:
        """Return the planner's rate over that of the grid's best, by pair."""
        good = [(best, auto) for best, auto in self.pairs if "tok_s" in best and "tok_s" in auto]
        return [auto["tok_s"] / best["tok_s"] for best, auto in good]

    @property
    def lines(self) -> list[Record]:
        """Return every run that did not fail."""
        runs = [*self.auto, *(line for _, line in self.grid), *(line for pair in self.pairs for line in pair)]
        return [line for line in runs if "tok_s" in line]


def try_all(bench: Bench, case: AutoCase, pairs: int) -> Tried:
    """Run the planner's policy at the beginning, the middle and the end of the grid, then pairs with the grid's
    best."""

    def run(shape: Shape | None) -> Record:
        return bench.run(ErrorCase(case.model, case.machine, case.case, shape))

    found = Tried()
    found.auto.append(run(None))
    for shape in case.grid:
        if len(found.grid) == case.tried:
            break
        if len(found.grid) == case.tried // 2 and len(found.auto) == 1:
            found.auto.append(run(None))
        line = run(shape)
        (found.grid if "tok_s" in line else found.unfit).append((shape, line))
    found.auto.append(run(None))
    for number in range(pairs if found.grid else 0):
        say(f"  pair {number + 1} of {pairs}")
        found.pairs.append((run(found.best[0]), run(None)))
    return found


def run_auto(bench: Bench, case: AutoCase, pairs: int) -> Record:
    """Run a case and return its record."""
    say(f"case {case.name}: {case.case.rows} rows, {case.case.prompt_tokens} in, {case.case.output_tokens} out")
    reason = limit.why_not() if case.machine.memory is not None else None
    if reason:
        say(f"  no memory limit ({reason}); --device-mem {case.machine.without} instead")
        case = replace(case, machine=replace(case.machine, memory=None, device_mem=case.machine.without))
    rates = bench.measured(ErrorCase(case.model, case.machine, case.case, None))
    found = try_all(bench, case, pairs)
    return {
        **harness.header("plan", replace(case, grid=()), found.lines),
        "part": "auto",
        "limit_bytes": case.machine.memory,
        **summed(found),
        "rates": rates,
        "auto": [kept(line) for line in found.auto],
        "grid": [{"given": shape.policy, **kept(line)} for shape, line in (*found.grid, *found.unfit)],
        "pairs": [[kept(best), kept(auto)] for best, auto in found.pairs],
    }


def summed(found: Tried) -> Record:
    """Return the summary of a case's runs.

    ratio is the planner's rate over that of the grid's best, which ran beside it. outputs has the hashes of all tokens,
    which are one hash if all policies gave the same tokens.
    """
    planners = [*found.auto, *(auto for _, auto in found.pairs)]
    return {
        "ratio": harness.stats(found.ratios),
        "ratios": found.ratios,
        "auto_tok_s": harness.stats(rates_of(planners)),
        "best_tok_s": harness.stats(rates_of([line for line, _ in found.pairs])),
        "best_policy": found.best[0].policy if found.grid else None,
        "grid_tok_s": harness.stats(rates_of([line for _, line in found.grid])),
        "tried": len(found.grid),
        "unfit": len(found.unfit),
        "auto_failed": sum("tok_s" not in line for line in planners),
        "outputs": sorted({kept(line)["tokens_sha256"] for line in found.lines}),
        "prediction_error": error_of(found.lines),
        "planning_seconds": harness.stats([line["planning_seconds"] for line in planners if "tok_s" in line]),
        "peak_rss": most(found.lines, "peak_rss"),
        "cgroup_peak": most(found.lines, "cgroup_peak"),
        "device_peak": most([line["summary"]["peak_bytes"] for line in found.lines], "device"),
    }


def most(lines: Sequence[Record], name: str) -> int | None:
    """Return the largest of these numbers; None if all are None."""
    return max((line[name] for line in lines if line.get(name) is not None), default=None)


def rates_of(lines: Sequence[Record]) -> list[float]:
    """Return tok_s of the runs that have it."""
    return [line["tok_s"] for line in lines if "tok_s" in line]


def parse() -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*CASES, "auto"))
    parser.add_argument("--model-dir", type=Path, required=True, help="where the models are made or reused")
    parser.add_argument("--cases", nargs="+", choices=sorted(AUTO), default=list(AUTO), help="of auto (default: all)")
    parser.add_argument("--pairs", type=int, default=2, help="runs of the grid's best beside auto (default 2)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="of all parts but auto: these runs, from 1")
    parser.add_argument("--quick", action="store_true", help="a model of three small layers, rates assumed")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    return parser.parse_args()


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a run of `error`, or a run of the planner's policy,
    failed."""
    args = parse()
    args.model_dir.mkdir(parents=True, exist_ok=True)
    directory, failed = args.model_dir.resolve(), False
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="bench-") as scratch:
        bench = Bench(directory, scratch, args.quick)
        if args.part != "auto":
            cases = CASES[args.part][args.quick]
            record = run_errors(bench, [cases[n - 1] for n in args.only] if args.only else cases, args.part)
            harness.emit(record, args.out)
            failed = bool(record["failed"])
        else:
            for name in args.cases:
                record = run_auto(bench, (AUTO_QUICK if args.quick else AUTO)[name], args.pairs)
                harness.emit(record, args.out)
                failed |= bool(record["auto_failed"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
