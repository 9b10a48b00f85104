"""All experts of a layer in one call, against a plain read of the chosen experts' bytes and against dense products.

python -m bench.kernels.experts [--shapes qwen3-moe ...] [--kinds bfloat16 ...] [--rows 1 4 ...] [--plain]
                                [--rounds 12] [--out experts-kernel.jsonl]

Every round has other tokens, whose experts are drawn evenly. A layer's experts are more bytes than the caches hold. The
dense side multiplies as many rows as an expert has on average by a matrix as large as all experts together. Matrices
are reordered as resident weights are; with --plain, those of the experts are not, as streamed ones. All sides alternate
in one process; the least time of all rounds counts. Prints one JSON line and one table per shape and kind.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench import harness
from bench.harness import Record
from bench.kernels.attention import Run, held, reading, timed
from flexengine import kernels
from flexengine.codec.forms import make_form
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.experts import ExpertCall, ExpertGate, Stacked

import torch  # isort: skip  # after flexengine, which sets the threads' wait policy

SEED = 0
KINDS: dict[str, tuple[Any, Any]] = {
    "float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "bfloat16 by bf16": (torch.bfloat16, "bf16"),
    "float16": (torch.float16, None), **{kind: (kind.split()[0], kind.partition(" by ")[2] or None) for kind in (
        "int8", "int8 by bf16", "int8 by int8", "int4", "int4 by bf16", "int4 by int8")},
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Experts of a layer. across: whether matrices are [in, out]."""

    experts: int
    top: int
    hidden: int
    inner: int
    across: bool = False


SHAPES = {
    "qwen3-moe": Shape(64, 8, 1024, 384), "mixtral": Shape(8, 2, 1024, 3584), "gpt-oss": Shape(32, 4, 1440, 1440, True),
}  # fmt: skip


def stacked(shape: Shape, n: int, k: int, dtype: torch.dtype | str, kernel: NativeKernels, plain: bool) -> Stacked:
    """Return random matrices [n, k] of all experts."""
    if isinstance(dtype, str):
        form = make_form(dtype, n, k)
        one = form.encode(torch.randn(n, k) / k**0.5)
        return Stacked(held(one.expand(shape.experts, -1).contiguous()), None, form, False)
    size = (k, n) if shape.across else (n, k)
    weight = held((torch.randn(shape.experts, *size) / k**0.5).to(dtype))
    packed = not shape.across and not plain and all(kernel.pack(w, 2) for w in weight)
    return Stacked(weight, None, None, shape.across, packed)


def sides(shape: Shape, kind: str, rows: Sequence[int], kernel: NativeKernels, plain: bool) -> dict[str, Run]:
    """Return the sides of one kind: the call, a read and the dense products, by rows."""
    dtype, compute = KINDS[kind]
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    up, down = (stacked(shape, *size, dtype, kernel, plain) for size in sizes)
    call = ExpertCall(kernel, up, ExpertGate("sigmoid"), down, compute)
    dense = [_joined(matrix, kernel) for matrix in (up, down)]
    found = dict[str, Run]()
    for count in rows:
        x, out = torch.randn(count, shape.hidden), torch.empty(count, shape.hidden)
        shares = torch.full((count, shape.top), 1 / shape.top)
        drawn = [torch.rand(count, shape.experts).topk(shape.top).indices for _ in range(16)]
        found[f"call {count}"] = partial(_run, call, (up, down), x, drawn, shares, out)
        each = max(1, round(count * shape.top / shape.experts))
        if count * shape.top >= shape.experts:
            xs = [torch.randn(each, k) for k in (shape.hidden, shape.inner)]
            found[f"dense {count}"] = partial(_dense_pair, kernel, xs, dense, compute)
        else:
            used = min(shape.experts, count * shape.top) / shape.experts
            words = up.weight.view(-1).view(torch.uint8).view(torch.int64)
            found[f"read {count}"] = reading(int(used * words.nbytes) // 8 * 8, words)
    return found


def _run(call: ExpertCall, matrices: Any, x: Any, drawn: Any, shares: Any, out: Any, i: int) -> None:
    call.run(matrices, x, drawn[i % len(drawn)], shares, out)


def _dense_pair(kernel: NativeKernels, xs: Any, dense: Any, compute: Any, _: int) -> None:
    for x, (w, form, packed) in zip(xs, dense, strict=True):
        _dense(kernel, x, w, form, packed, compute)


def _joined(matrix: Stacked, kernel: NativeKernels) -> tuple[torch.Tensor, object, bool]:
    """Return all experts' matrices as one, its form, and whether it is reordered."""
    if matrix.form is not None:
        form = matrix.form.with_rows(matrix.form.rows * len(matrix.weight))
        return matrix.weight.view(-1), form, False
    w = matrix.weight.transpose(1, 2) if matrix.across else matrix.weight
    whole = held(w.reshape(-1, w.shape[2]))
    return whole, None, matrix.packed or kernel.pack(whole, 2)


def _dense(kernel: NativeKernels, x: Any, w: Any, form: Any, packed: bool, compute: Any) -> None:
    if form is not None:
        kernel.product(x, w, form, None, compute)
    else:
        kernel.linear(x, w, None, compute, packed)


def results(shape: Shape, kind: str, rows: Sequence[int], rounds: int, kernel: NativeKernels, plain: bool) -> Record:
    """Return by rows: microseconds, GB/s of chosen experts or GFLOP/s, and the share of the read's or dense rate."""
    least = {name: min(s) for name, s in timed(sides(shape, kind, rows, kernel, plain), rounds).items()}
    dtype, _ = KINDS[kind]
    elements = 3 * shape.hidden * shape.inner
    width = make_form(dtype, 1024, 1024).nbytes / 2**20 if isinstance(dtype, str) else dtype.itemsize
    found: Record = {}
    for count in rows:
        seconds, flops = least[f"call {count}"], 2 * count * shape.top * elements
        line: Record = {"us": seconds * 1e6, "gflop_s": flops / seconds / 1e9}
        if f"read {count}" in least:
            # Evenly drawn experts of `count` tokens; the read is of the first product's matrices only.
            chosen = shape.experts * (1 - (1 - shape.top / shape.experts) ** count)
            line["gb_s"] = chosen * elements * width / seconds / 1e9
            read = min(shape.experts, count * shape.top) * elements * 2 / 3 * width / least[f"read {count}"] / 1e9
            line["share_of_read"] = line["gb_s"] / read
        else:
            each = max(1, round(count * shape.top / shape.experts))
            line["share_of_dense"] = flops / seconds / (2 * each * shape.experts * elements / least[f"dense {count}"])
        found[str(count)] = line
    return found


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=harness.at_least_one, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--plain", action="store_true", help="do not reorder the experts' matrices")
    parser.add_argument("--rounds", type=int, default=12, help="how often the sides take turns (default 12)")
    parser.add_argument("--out", metavar="FILE", help="append records to this file under bench/results/")
    args = parser.parse_args()
    kernel = kernels.load()
    assert isinstance(kernel, NativeKernels)
    for name in args.shapes:
        for kind in args.kinds:
            torch.manual_seed(SEED)
            found = results(SHAPES[name], kind, args.rows, args.rounds, kernel, args.plain)
            head = harness.header("experts-kernel", SHAPES[name], [{"versions": harness.versions()}])
            how = {"simd": kernel.simd, "seed": SEED, "threads": torch.get_num_threads(), "rounds": args.rounds}
            line = {**head, "shape": name, "kind": kind, **asdict(SHAPES[name]), **how, "plain": args.plain}
            line["rows"] = found
            harness.emit(line, args.out)
            for count, figures in found.items():
                text = "  ".join(f"{key} {value:.2f}" for key, value in figures.items())
                print(f"{name:10} {kind:17} {count:>5} rows  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
