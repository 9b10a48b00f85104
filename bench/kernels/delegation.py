"""When attention on the host pays: decode sweeps with and without delegation over cached lengths, with slow links.

python -m bench.kernels.delegation DIR [--runs 3] [--case small] [--up RATE] [--out FILE]

DIR: directory in which the checkpoint is made.

All data is in memory, and each lane has one core; the KV cache lives on the host, behind links of the case's rates.
Times are those of the fastest decode sweep, as other programs only add to them. Two records:
crossover: seconds of a decode sweep by cached tokens, with and without delegation, in turns; the length from which
    delegation is faster, as measured and as `bench.kernels.delegation_rule` predicts it with the rates of these runs.
balance: several gpu_batches at the length at which the host attends for as long as the device computes: the shares of
    the decode sweeps in which each of them works.
"""

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import harness
from bench.cases import Case, fixed
from bench.harness import Record
from bench.models import OptShape, make


@dataclass(frozen=True)
class DelegationCase:
    """A machine and the runs on it.

    Attributes:
        up, down: bytes per second of the links.
        latency: seconds that each transfer takes in addition.
        cached: prompt tokens of the runs. Each length ends in the middle of a page, so that on average half a page more
            is moved.
        balanced, balanced_rows, batches: model, rows of a gpu_batch, and gpu_batches of the balanced run.
    """

    name: str
    shape: OptShape
    balanced: OptShape
    rows: int = 2
    balanced_rows: int = 16
    tokens: int = 14
    up: float = 3e8
    down: float = 1e9
    latency: float = 2e-3
    cached: tuple[int, ...] = (26, 154, 218, 282, 346, 474)
    batches: int = 3


MOST_CACHED = 1200  # most cached tokens of the balanced run, so that its prompts take less than minutes
_WIDE = OptShape(6, 512, 16384, 8, 2000, 2048, "float32")
_NARROW = OptShape(8, 512, 2048, 8, 2000, 2048, "float32")
_TINY = OptShape(4, 64, 128, 4, 500, 256, "float32")
CASES = {
    case.name: case
    for case in (
        DelegationCase("small", _WIDE, _NARROW),
        DelegationCase("smoke", _TINY, _TINY, 2, 2, tokens=4, cached=(8, 24)),
    )
}


@dataclass(frozen=True)
class Side:
    """A run, with the times of its fastest decode sweep.

    The first and last layers are left out: the first waits for its pages and includes the model's prologue, and no
    transfer runs beside the last.

    Attributes:
        sweep: seconds of the sweep.
        layer: seconds of a layer, from its start to the start of the next.
        ops: seconds of a layer's tasks, by op.
        busy: share of the sweep by lane.
    """

    sweep: float
    layer: float
    ops: dict[str, float]
    busy: dict[str, float]
    summary: Record
    tokens: list[list[int]]


@dataclass(frozen=True)
class Shape:
    """The model, batches and links of a run: `batches` gpu_batches of `rows` equal rows each."""

    model: Path
    rows: int
    batches: int
    links: Record


def run(case: DelegationCase, of: Shape, cached: int, delegate: bool) -> Side:
    """Run one job."""
    from flexengine import Engine, Policy, SamplingParams
    from flexengine.tier.machine import Links

    rows = Case(case.name, of.rows * of.batches, fixed(cached), fixed(case.tokens)).requests(case.shape.vocab)
    policy = Policy(of.rows, of.batches, cache=(0, 1, 0), slots=3, schedule="zigzag",
                    delegate="host" if delegate else "none")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        links = Links(**of.links)
        with Engine(of.model, policy=policy, device="sim", links=links, trace=trace, offload_dir=folder) as engine:
            results = engine.generate([{"prompt_token_ids": list(r.prompt_token_ids)} for r in rows],
                                      SamplingParams(max_tokens=case.tokens, ignore_eos=True))  # fmt: skip
            assert engine.core.trace is not None
            return _side(engine.core.trace.spans, engine.summary.to_json(), [r.token_ids for r in results])


def _side(spans: Sequence[Any], summary: Record, tokens: list[list[int]]) -> Side:
    """Return the Side of a trace, without the prefill sweep and the first decode sweep."""
    by_sweep: dict[int, list[Any]] = defaultdict(list)
    for span in spans:
        by_sweep[span[0].cell.sweep].append(span)
    found = [by_sweep[n] for n in sorted(by_sweep) if n >= 2]
    ends = [max(end for _, _, end in sweep) for sweep in (by_sweep[1], *found)]
    seconds = [end - before for before, end in pairwise(ends)]
    least = min(range(len(found)), key=lambda i: seconds[i])
    layers = sorted({task.cell.layer for task, _, _ in found[least]})[1:-2]  # the output projection counts as one
    ops: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    starts: dict[int, float] = {}
    for task, began, end in found[least]:
        busy[task.lane] += (end - began) / seconds[least]
        if task.cell.layer in layers:
            ops[task.op.name] += (end - began) / len(layers)
        if task.op.name in ("COMPUTE", "PROJECT"):
            starts[task.cell.layer] = min(began, starts.get(task.cell.layer, began))
    layer = (starts[layers[-1] + 1] - starts[layers[0]]) / len(layers)
    return Side(seconds[least], layer, dict(ops), dict(busy), summary, tokens)


def best(sides: Sequence[Side]) -> Side:
    """Return the run with the fastest sweep, which other programs disturbed least."""
    return min(sides, key=lambda side: side.sweep)


def crossing(lengths: Sequence[float], moved: Sequence[float], there: Sequence[float]) -> float | None:
    """Return the length from which `there` stays smaller than `moved`, interpolated linearly; None if it never does."""
    gaps = [m - t for m, t in zip(moved, there, strict=True)]
    if gaps[-1] <= 0:
        return None
    for i in range(len(gaps) - 1, 0, -1):
        if gaps[i - 1] <= 0:
            share = -gaps[i - 1] / (gaps[i] - gaps[i - 1])
            return lengths[i - 1] + share * (lengths[i] - lengths[i - 1])
    return float(lengths[0])


def rule_of(case: DelegationCase, sides: dict[int, dict[bool, Side]]) -> Any:
    """Return the planner's rule with the rates of the runs: links and the host's attention at the longest cache,
    computing and the time between the tasks of a delegated layer at the shortest. Lengths are those of the middle
    decode sweep."""
    from bench.kernels.delegation_rule import Rule

    shape, longest, shortest = case.shape, max(case.cached), min(case.cached)
    kv = 2 * shape.hidden * 4
    page = -(-(256 << 10) // kv)
    moved, there, few = sides[longest][False], sides[longest][True], sides[shortest][True]
    middle = longest + case.tokens / 2
    whole = -(-middle // page) * page
    computing = few.ops["PROJECT"] + few.ops["FINISH"]
    chain = sum(few.ops[name] for name in ("PROJECT", "FINISH", "SEND", "ATTEND", "FETCH"))
    near, far = (sides[at][False].ops["COMPUTE"] for at in (shortest, longest))
    attention = max(1e-9, far - near) / (longest - shortest)  # seconds of the device's attention per cached token
    return Rule(
        kv, 3 * shape.hidden * 4, shape.hidden * 4,
        up=case.rows * whole * kv / (moved.ops["LOAD_CACHE"] - case.latency), down=case.down,
        host=case.rows * middle * kv / there.ops["ATTEND"], device=case.rows * kv / attention,
        page=page, sequences=case.rows, computing=computing, fixed=max(0.0, few.layer - chain),
        latency=case.latency, overlap=True,
    )  # fmt: skip


def crossover(case: DelegationCase, model: Path, runs: int) -> Record:
    """Return the first record."""
    sides: dict[int, dict[bool, Side]] = {}
    of = Shape(model, case.rows, 1, {"h2d": case.up, "d2h": case.down, "latency": case.latency})
    for cached in case.cached:
        tried: dict[bool, list[Side]] = {False: [], True: []}
        for _ in range(runs):
            for delegate in (False, True):
                tried[delegate].append(run(case, of, cached, delegate))
        assert tried[False][0].tokens == tried[True][0].tokens, "delegation changed tokens"
        sides[cached] = {delegate: best(found) for delegate, found in tried.items()}
        times = {d: side.layer for d, side in sides[cached].items()}
        shown = f"{cached} cached: a layer {times[False]:.5f} s, delegated {times[True]:.5f} s"
        print(f"  {shown}", file=sys.stderr, flush=True)
    rule = rule_of(case, sides)
    lengths = [cached + case.tokens / 2 for cached in case.cached]
    by_layer = [[sides[c][d].layer for c in case.cached] for d in (False, True)]
    by_sweep = [[sides[c][d].sweep for c in case.cached] for d in (False, True)]
    measured, predicted = crossing(lengths, *by_layer), rule.crossover
    return {
        "lengths": lengths, "moved_layer_seconds": by_layer[0], "delegated_layer_seconds": by_layer[1],
        "moved_seconds": by_sweep[0], "delegated_seconds": by_sweep[1],
        "measured_crossover": measured, "measured_crossover_of_sweeps": crossing(lengths, *by_sweep),
        "rule_crossover": predicted,
        "ratio": predicted / measured if measured else None,
        "rates": {name: getattr(rule, name) for name in ("up", "host", "device", "computing", "fixed", "latency")},
        "moved_bytes": {str(c): sides[c][False].summary["bytes"] for c in case.cached},
        "delegated_bytes": {str(c): sides[c][True].summary["bytes"] for c in case.cached},
    }  # fmt: skip


def balance(case: DelegationCase, model: Path, runs: int) -> Record:
    """Return the second record.

    A first run at the longest cache gives the length at which host and device are equally busy. The next run corrects
    the length, as the device computes more slowly while the host reads memory.
    """
    of = Shape(model, case.balanced_rows, case.batches, {"h2d": 4e9, "d2h": 4e9})
    first = run(case, replace(of, batches=1), max(case.cached), True)
    cached = round(max(case.cached) * (first.ops["PROJECT"] + first.ops["FINISH"]) / first.ops["ATTEND"])
    cached = min(cached, MOST_CACHED, case.balanced.positions - case.tokens - 8)
    beside = run(case, of, cached, True).busy
    cached = round(cached * max(0.5, min(2.0, beside["device"] / beside["cpu"])))
    cached = min(cached, MOST_CACHED, case.balanced.positions - case.tokens - 8)
    sides = {d: best([run(case, of, cached, d) for _ in range(runs)]) for d in (False, True)}
    shares = {lane: sides[True].busy.get(lane, 0.0) for lane in ("cpu", "device")}
    return {
        "cached": cached, "batches": case.batches, "busy": sides[True].busy, "busy_sum": sum(shares.values()),
        "moved_seconds": sides[False].sweep, "delegated_seconds": sides[True].sweep,
    }  # fmt: skip


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description="decode sweeps with attention on the host and without")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--case", choices=sorted(CASES), default="small")
    parser.add_argument("--runs", type=harness.at_least_one, default=3, help="rounds of each side (default 3)")
    parser.add_argument("--up", type=float, help="bytes per second of the link to the device")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    args = parser.parse_args()
    case = CASES[args.case]
    case = replace(case, up=args.up or case.up)
    os.environ["OMP_NUM_THREADS"] = "1"  # host, device and links are simulated by cores: one thread per lane
    model, balanced = make(case.shape, args.directory / "wide"), make(case.balanced, args.directory / "narrow")
    versions = {"versions": harness.versions()}
    record = crossover(case, model, args.runs)
    harness.emit({**harness.header("delegation crossover", case, [versions]), **record}, args.out)
    record = balance(case, balanced, args.runs)
    harness.emit({**harness.header("delegation balance", case, [versions]), **record}, args.out)


if __name__ == "__main__":
    main()
