"""Products with weights in GGUF's block types, or in formats of safetensors files, beside the engine's own int4.

python -m bench.kernels.blocks [--kinds q4_k q6_k ...] [--rows 1 16 64 256] [--computes fp32 bf16 int8]
                               [--shape 2048 2048] [--threads 1] [--rounds 15] [--held 0] [--out formats.jsonl]

Codes are random and scales ordinary. All kinds take turns in one process; the least time of all rounds counts. Prints
GOP/s (a multiplication and an addition count as two) by kind and number of rows, and one JSON line.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from bench import harness
from flexengine import kernels
from flexengine.codec.forms import make_form
from flexengine.codec.gguf_blocks import BLOCKS, NATIVE
from flexengine.codec.scaled import OfCheckpoint

import torch  # isort: skip  # after flexengine, which sets the threads' wait policy

COMPUTES = {"fp32": None, "bf16": "bf16", "int8": "int8"}


@dataclass(frozen=True)
class BlocksCase:
    """Sizes of the measured products.

    Attributes:
        shape: [n, k] of weights.
        held: bytes of different matrices that successive calls use; one matrix if there are fewer.
    """

    name: str
    shape: tuple[int, int]
    held: int
    threads: int


def encoded(kind: str, n: int, k: int) -> torch.Tensor:
    """Return a random matrix. Any two bytes of blocks form an fp16 number from 0 to 1, so scales are ordinary; likewise
    those of formats of several tensors, whose other bytes are from 60 to 63: 0.01 to 1 in fp32, bf16 and fp16."""
    form = make_form(kind, n, k)
    if isinstance(form, OfCheckpoint):
        codes, more = torch.randint(1, 60, (form.sizes[0],)), torch.randint(60, 64, (form.nbytes - form.sizes[0],))
        return torch.cat([codes, more]).to(torch.uint8)
    if kind not in BLOCKS:
        return form.encode(torch.randn(n, k) / k**0.5)
    return torch.randint(1, 60, (form.nbytes,), dtype=torch.uint8)


def calls(kind: str, rows: int, compute: Any, case: BlocksCase) -> Callable[[], Any]:
    """Return a function that computes the next product."""
    n, k = case.shape
    form, kernel, x = make_form(kind, n, k), kernels.load(), torch.randn(rows, k)
    first = encoded(kind, n, k)
    weights = cycle([first, *(first.clone() for _ in range(case.held // first.nbytes))])
    return lambda: kernel.product(x, next(weights), form, None, compute)


def best(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each function. They take turns, for at least 2 ms each."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            count, start = 0, time.perf_counter()
            while (spent := time.perf_counter() - start) < 0.002 or not count:
                run()
                count += 1
            found[name] = min(found[name], spent / count)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description="products with block types of GGUF files")
    parser.add_argument("--kinds", nargs="+", default=["int4", *NATIVE])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--computes", nargs="+", choices=[*COMPUTES], default=[*COMPUTES])
    parser.add_argument("--shape", nargs=2, type=int, default=[2048, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=harness.at_least_one, default=15)
    parser.add_argument("--held", type=int, default=0)
    parser.add_argument("--out", help="append the record to this file under bench/results/")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    n, k = args.shape
    case, rates = BlocksCase("blocks", (n, k), args.held, args.threads), dict[str, dict[str, float]]()
    for name in args.computes:
        for rows in args.rows:
            make = partial(calls, rows=rows, compute=COMPUTES[name], case=case)
            seconds = best({kind: make(kind) for kind in args.kinds}, args.rounds)
            rates[f"{name}, {rows} rows"] = found = {kind: 2e-9 * rows * n * k / s for kind, s in seconds.items()}
            shown = "  ".join(f"{kind} {rate:.0f}" for kind, rate in found.items())
            print(f"{name}, {rows} rows: {shown} GOP/s", file=sys.stderr, flush=True)
    header = harness.header("kernels blocks", case, [{"versions": harness.versions()}])
    harness.emit({**header, "rates": rates}, args.out)


if __name__ == "__main__":
    main()
