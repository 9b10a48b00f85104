"""Staggered pipelines in real time, beside virtual time.

python -m bench.stagger [--cases sleeping engines turns] [--most 8] [--unit 20] [--turns 3] [--out stagger.jsonl]

sleeping: the programs of `bench.stagger.orders` run on the engine's executor, whose lanes are threads that
sleep: a slice takes t_m, attention t_a, and a move between replicas a tenth of t_a. For n = 2 to 8 and t_a (n - 1) /
t_m = 1, 0.5 and 2, each order runs until a period is within 2 % of the virtual clock, at most so often (--turns); the
fastest run counts, as other programs of the machine only delay. Period and busy shares are those of a window between
filling and draining. Exit code: 1 if such a period is more than 10 % off the virtual clock, or the ratio of rotational
and fixed throughput is more than 10 % off n / (n - 1) at t_a = t_m / (n - 1). engines: --turns times, two engines in
processes share an attention worker, beside one engine alone and virtual time (`bench.stagger.engines`). Exit code: 1 if
the time of a layer is more than 10 % off, or tokens differ. turns: one job on two engines in processes with one
attention worker, in fixed and rotational order (`bench.stagger.turns`). Exit code: 1 if a period is more than 5 % off
the virtual clock, the ratio of throughputs more than 5 % off n / (n - 1), or tokens differ.

If other programs use the machine, `chrt -f 10 python -m bench.stagger` lets no sleep last longer because of them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from bench import harness
from bench.harness import Record
from bench.simulate import simulate
from bench.stagger.engines import LIMIT, engines
from bench.stagger.orders import POOL, Stagger, fixed, interleaved, replica_lane, rotational, steady
from bench.stagger.turns import turns
from flexengine.runtime.execute import Executor
from flexengine.runtime.trace import Trace
from flexengine.schedule.tasks import Op, Task

ORDERS: dict[str, Callable[[int], Stagger]] = {"fixed": fixed, "rotational": rotational, "interleaved": interleaved}
BALANCES = (1.0, 0.5, 2.0)  # t_a (n - 1) / t_m
CASES = ("sleeping", "engines", "turns")
LAYERS = 12  # least, of a window
NEAR = 0.02  # relative error of a run that is not repeated


def measure(order: Stagger, slice_seconds: float, attention: float) -> Record:
    """Return periods and busy shares of one program, measured and in virtual time."""
    seconds = {Op.COMPUTE: slice_seconds, Op.ATTEND: attention, Op.LEAVE: attention / 10}
    window = -(-LAYERS // order.replicas) * order.replicas  # equally many slices on each replica
    first, last = 2 * order.replicas, 2 * order.replicas + window
    program = list(order.program(last + 2))
    trace = Trace(None)

    def perform(task: Task) -> None:
        time.sleep(seconds[task.op])

    with Executor(perform, "thread", trace.add) as executor:
        executor.run(program)
    real, virtual = (steady(spans, first, last)
                     for spans in (trace.spans, simulate(program, lambda task: seconds[task.op]).spans))  # fmt: skip
    lanes = [replica_lane(r) for r in range(order.replicas)]
    return {
        "period": real.period, "virtual_period": virtual.period, "ratio": real.period / virtual.period,
        "devices_busy": sum(real.busy[lane] for lane in lanes) / len(lanes), "pool_busy": real.busy[POOL],
        "virtual_devices_busy": sum(virtual.busy[lane] for lane in lanes) / len(lanes),
        "virtual_pool_busy": virtual.busy[POOL], "layers": window, "rate": order.batches / real.period,
    }  # fmt: skip


def fastest(order: Stagger, slice_seconds: float, attention: float, turns: int) -> Record:
    """Return the run with the shortest period, and the ratios of all runs. A run within NEAR is the last."""
    runs = list[Record]()
    while len(runs) < turns and not any(run["ratio"] < 1 + NEAR for run in runs):
        runs.append(measure(order, slice_seconds, attention))
    return {**min(runs, key=itemgetter("period")), "ratios": [run["ratio"] for run in runs]}


def pipelines(most: int, unit: float, turns: int) -> Record:
    """Return the record. unit: seconds of the shorter of t_a and t_m / (n - 1)."""
    points, gains = list[Record](), dict[str, float]()
    for n in range(2, most + 1):
        for balance in BALANCES:
            share = unit / min(1.0, balance)  # t_m / (n - 1)
            point = {"n": n, "balance": balance, "slice": (n - 1) * share, "attention": balance * share}
            found = {name: fastest(make(n), point["slice"], point["attention"], turns) for name, make in ORDERS.items()}
            points.append({**point, "orders": found})
            if balance == 1:
                gains[str(n)] = found["rotational"]["rate"] / found["fixed"]["rate"]
            print(f"  n {n}, t_a (n - 1) / t_m {balance:g}: "
                  + ", ".join(f"{name} {x['ratio']:.3f}" for name, x in found.items()), file=sys.stderr)  # fmt: skip
    record = harness.header("stagger", {"name": "sleeping", "unit": unit, "n": [2, most], "turns": turns},
                            [{"versions": harness.versions()}])  # fmt: skip
    worst = max((x["ratio"] for point in points for x in point["orders"].values()), key=lambda ratio: abs(ratio - 1))
    off = max(abs(gain * (int(n) - 1) / int(n) - 1) for n, gain in gains.items())
    return record | {"worst_ratio": worst, "rotational_to_fixed": gains, "worst_gain_error": off, "points": points,
                     "good": abs(worst - 1) <= LIMIT and off <= LIMIT}  # fmt: skip


def main() -> int:
    """Run the cases that the command line names. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--most", type=int, default=8, metavar="N", help="largest n (default 8)")
    parser.add_argument("--unit", type=float, default=20.0, metavar="MS",
                        help="milliseconds of the shorter of t_a and t_m / (n - 1) (default 20)")  # fmt: skip
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    good = True
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            if name == "sleeping":
                record = pipelines(args.most, args.unit / 1e3, args.turns)
            else:
                record = engines(args.turns, Path(folder)) if name == "engines" else turns(Path(folder))
        harness.emit(record, args.out)
        good = good and record["good"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
