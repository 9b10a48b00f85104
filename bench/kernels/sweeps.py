"""Where the time of prompts and of a decode sweep goes: products, attention, other kernels, and between kernels.

python -m bench.kernels.sweeps [--rows 64] [--prompt 128] [--new 33] [--runs 3] [--lossy exact ...]
                              [--out kernels.jsonl]

SmolLM2 in RAM. A job with --new tokens per row has as many decode sweeps more than one with a single token; their
difference is divided by the number of sweeps. Kernels count the seconds of their steps (NativeKernels.spent), and calls
for attention alone are timed here. One JSON line per choice of switches, with milliseconds: medians of the runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench import harness
from bench.harness import Record

PRODUCTS = ("linear", "decoded", "dots")
# Functions of the native library, and kinds of steps.
ATTENTION = {"decode call": "_decode", "append call": "_append", "prompt call": "_prompts"}
ATTENTION_STEPS = ("append", "attend", "merge", "prompts")


class Calls:
    """Seconds in the library's functions for attention, by name."""

    def __init__(self, kernel: Any) -> None:
        self.seconds = dict.fromkeys(ATTENTION, 0.0)
        for name, attribute in ATTENTION.items():
            setattr(kernel, attribute, self._timed(name, getattr(kernel, attribute)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return call


def parts_of(whole: float, kernels: Mapping[str, float], sweeps: int) -> Record:
    """Return milliseconds by part.

    Args:
        whole: seconds in all.
        kernels: seconds of each kind of step, and of each function for attention.
        sweeps: number to divide by.
    """
    attention = (*ATTENTION, *ATTENTION_STEPS)
    inside = {
        "products": sum(kernels[kind] for kind in PRODUCTS),
        "attention": sum(kernels[kind] for kind in attention),
        "other kernels": sum(seconds for kind, seconds in kernels.items() if kind not in (*PRODUCTS, *attention)),
    }
    seconds = {"all": whole, **inside, "between kernels": whole - sum(inside.values())}
    return {name: 1000 * value / sweeps for name, value in seconds.items()}


def measured(engine: Any, kernel: Any, calls: Calls, rows: list[Any], new: int) -> tuple[float, dict[str, float]]:
    """Run a job. Return its seconds, and those of the kernels by name."""
    from flexengine import SamplingParams

    before, start = {**kernel.spent(), **calls.seconds}, time.perf_counter()
    engine.generate(rows, SamplingParams(max_tokens=new, ignore_eos=True))
    seconds, after = time.perf_counter() - start, {**kernel.spent(), **calls.seconds}
    return seconds, {name: after[name] - before[name] for name in after}


def run(switches: Record, args: argparse.Namespace) -> Record:
    """Return the milliseconds of the prompts and of a sweep, by part."""
    import torch

    from flexengine import Engine, Lossy, Policy, kernels

    kernel = kernels.load()
    calls = Calls(kernel)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40_000, (args.rows, args.prompt), generator=generator).tolist()
    rows = [{"prompt_token_ids": row} for row in ids]
    found: dict[str, list[Record]] = {"prompts": [], "sweep": []}
    policy = Policy(args.rows, 1, prefill_tokens=2048)  # jobs of different lengths may get different ones
    with Engine(device="cpu", lossy=Lossy(**switches), policy=policy) as engine:
        measured(engine, kernel, calls, rows, 2)  # reads the weights
        for _ in range(args.runs):
            short, less = measured(engine, kernel, calls, rows, 1)
            whole, more = measured(engine, kernel, calls, rows, args.new)
            added = {name: more[name] - less[name] for name in more}
            found["prompts"].append(parts_of(short, less, 1))
            found["sweep"].append(parts_of(whole - short, added, args.new - 1))
    return {phase: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for phase, runs in found.items()}  # fmt: skip


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=harness.at_least_one, default=64)
    parser.add_argument("--prompt", type=harness.at_least_one, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--new", type=int, default=33, help="tokens generated per row (default 33)")
    parser.add_argument("--runs", type=harness.at_least_one, default=3)
    parser.add_argument("--lossy", nargs="+", type=harness.lossy, default=[{}], metavar="NAME=VALUE,...")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    args = parser.parse_args()
    if args.new < 2:
        parser.error(f"--new is {args.new}; it must be 2 or more, as a single token has no decode sweep")
    for switches in args.lossy:
        case = {"rows": args.rows, "prompt": args.prompt, "new": args.new}
        header = harness.header("kernels.sweeps", case, [{"versions": harness.versions()}])
        parts = run(switches, args)
        harness.emit({**header, "lossy": harness.named(switches), **parts}, args.out)
        print(f"{harness.named(switches)}: {harness.rounded(parts)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
