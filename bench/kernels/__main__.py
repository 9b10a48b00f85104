"""Kernels against torch's implementations of the same operations, in turns in one process.

python -m bench.kernels [--runs 5] [--only products prompts passes model] [--out FILE]

products: GFLOP/s of x @ w.T by the number of rows, with weights in fp32, fp16, bf16, 8 and 4 bits, multiplied in
    fp32, bf16 and integers; plain weights packed, as resident ones are, and as they are streamed; torch's fp32 linear,
    oneDNN's and torch's int4 product beside them. Also the bound, as a share of the
    measured time: the least time of the cores' fastest products of that kind, and of reading the weights.
prompts: causal attention of prompts, GFLOP/s, against torch's scaled_dot_product_attention.
passes: norms, rotary positions and gates in one pass each, and as transformers computes them: GB/s of operands read
    once and results written once (a gate's operand is also filled again). With few tokens the data stays in the CPU's
    caches.
model: tokens/s of SmolLM2 with the fused modules and without, with all else equal.
Successive calls of a product use different weights, more of them than a CPU's caches hold.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

from bench import harness
from bench.harness import Record
from bench.kernels import peak

Call = Callable[[], Any]
PARTS = ("products", "prompts", "passes", "model")


@dataclass(frozen=True)
class KernelCase:
    """Shapes of the measured kernels.

    Attributes:
        shapes: [n, k] of weights.
        rows: rows of x.
        prompts: (prompts, tokens, heads, kv_heads, head_dim).
        passes: (tokens, hidden, heads, head_dim).
        held: bytes of different operands that successive calls use.
        model: (rows, prompt tokens, generated tokens).
    """

    name: str
    shapes: tuple[tuple[int, int], ...] = ((1536, 576), (8192, 2048))
    rows: tuple[int, ...] = (1, 16, 64, 512, 2048)
    prompts: tuple[tuple[int, int, int, int, int], ...] = (
        (64, 128, 9, 3, 64), (16, 128, 32, 32, 64), (1, 2048, 32, 8, 128)
    )  # fmt: skip
    passes: tuple[tuple[int, int, int, int], ...] = ((64, 576, 9, 64), (2048, 2048, 32, 64))
    held: int = 1 << 28
    model: tuple[int, int, int] = (64, 128, 32)
    lossy: dict[str, Any] = field(default_factory=lambda: {"weights": "int4", "compute": "int8"})


CASES = {
    case.name: case
    for case in (
        KernelCase("all"),
        KernelCase("opt-1.3b", ((2048, 2048), (8192, 2048), (2048, 8192)), (16, 32, 512, 1024)),
        KernelCase("opt-1.3b head", ((50272, 2048),), (16, 32)),
        KernelCase("smoke", ((48, 64),), (1, 20), ((2, 9, 4, 2, 32),), ((3, 64, 2, 32),), 1 << 12, (2, 4, 2)),
    )
}


def in_turns(calls: Mapping[str, Call], runs: int) -> dict[str, float]:
    """Return the least seconds of one call of each side. The sides take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for attempt in range(runs + 1):
        for name, call in calls.items():
            repeats = 0
            start = now = time.perf_counter()
            while now - start < 0.03 or not repeats:
                call()
                repeats, now = repeats + 1, time.perf_counter()
            if attempt:  # the first is a warm-up
                best[name] = min(best[name], (now - start) / repeats)
    return best


def _rotating(make: Callable[[], Any], nbytes: int, held: int) -> Iterator[Any]:
    """Return an iterator over operands of `nbytes` bytes each, which together have more than `held` bytes."""
    return cycle([make() for _ in range(max(2, min(64, -(-held // nbytes))))])


def _encoded(kernel: Any, x: Any, form: Any, compute: Any, w: Any) -> None:
    kernel.product(x, w, form, None, compute)


def _random(n: int, k: int, dtype: Any) -> Any:
    import torch

    return torch.randn(n, k).to(dtype)


def _packed(kernel: Any, w: Any) -> Any:
    kernel.pack(w)
    return w


def _plain(kernel: Any, x: Any, compute: Any, w: Any, packed: bool = False) -> None:
    kernel.linear(x, w, None, compute, packed)


def _pass(function: Any, operands: tuple[Any, ...]) -> None:
    if function.__name__ == "gate":
        operands[0].fill_(1.0)
    function(*operands)


def _products(n: int, k: int, m: int, held: int) -> tuple[dict[str, Call], dict[str, float]]:
    """Return the product of each kind, and the least seconds it can take."""
    import torch

    from flexengine import kernels
    from flexengine.codec.packed import CODECS, Packed
    from flexengine.kernels.onednn import linear_fp32

    kernel, x = kernels.load(), torch.randn(m, k)
    calls: dict[str, Call] = {}
    least: dict[str, float] = {}

    def with_weights(
        name: str, make: Callable[[], torch.Tensor], product: Callable[[torch.Tensor], Any], compute: Any = None
    ) -> None:
        nbytes = make().nbytes
        weights = _rotating(make, nbytes, held)
        calls[name] = lambda: product(next(weights))
        least[name] = peak.measure().seconds(2.0 * m * n * k, nbytes, compute or "fp32")

    with_weights("torch fp32", lambda: torch.randn(n, k), lambda w: torch.nn.functional.linear(x, w))
    with_weights("oneDNN fp32", lambda: torch.randn(n, k), lambda w: linear_fp32(x, w))
    plain: tuple[tuple[str, torch.dtype, Any], ...] = (
        ("fp32 weights", torch.float32, None), ("fp16 weights", torch.float16, None),
        ("bf16 weights, bf16 compute", torch.bfloat16, "bf16"),
    )  # fmt: skip
    for name, dtype, compute in plain:
        packs = kernel.pack(torch.empty(n, k, dtype=dtype))
        with_weights(f"{name}, streamed", partial(_random, n, k, dtype), partial(_plain, kernel, x, compute), compute)
        if packs:
            with_weights(name, lambda dtype=dtype: _packed(kernel, _random(n, k, dtype)),  # type: ignore[misc]
                         partial(_plain, kernel, x, compute, packed=True), compute)  # fmt: skip
    for bits, compute in ((bits, compute) for bits in (8, 4) for compute in (None, "bf16", "int8")):
        form = Packed(CODECS[f"int{bits}"], n, k)
        data = form.encode(torch.randn(n, k))
        with_weights(f"{bits} bits{f', {compute} compute' if compute else ''}", data.clone,
                     partial(_encoded, kernel, x, form, compute), compute)  # fmt: skip
    narrow = x.bfloat16()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (n, k), dtype=torch.int32), 2)
    scales = torch.rand(k // 64, n, 2).bfloat16()
    with_weights("torch int4, bf16 x", packed.clone,
                 lambda w: torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, w, 64, scales))  # fmt: skip
    return calls, least


def products(case: KernelCase, runs: int) -> Record:
    """Return GFLOP/s by shape, rows and kind, and the least time's share of the measured time."""
    found: Record = {"peak": asdict(peak.measure())}
    _show("peak", {name: rate * 1e-9 for name, rate in found["peak"].items()}, "GFLOP/s, GB/s")
    for n, k in case.shapes:
        for m in case.rows:
            calls, least = _products(n, k, m, case.held)
            seconds, what = in_turns(calls, runs), f"{n} x {k}, {m} rows"
            found[what] = {name: 2e-9 * m * n * k / s for name, s in seconds.items()}
            found[f"{what}, share of the bound"] = shares = {name: least[name] / s for name, s in seconds.items()}
            _show(what, found[what], "GFLOP/s")
            _show("  share of the bound", shares, "")
    return found


def prompts(case: KernelCase, runs: int) -> Record:
    """Return the GFLOP/s of the products that a causal mask leaves."""
    import torch

    from flexengine.kernels import load
    from flexengine.kernels.base import AttentionOptions
    from flexengine.kernels.reference import ReferenceKernels

    found: Record = {}
    for count, tokens, heads, kv_heads, dim in case.prompts:
        q = torch.randn(count, tokens, heads, dim)
        k, v = torch.randn(2, count, tokens, kv_heads, dim)
        sides = {"torch SDPA": ReferenceKernels(), "native": load()}
        calls = {n: partial(s.attend_prompt, q, k, v, AttentionOptions(dim**-0.5)) for n, s in sides.items()}
        work = 4e-9 * count * heads * dim * tokens * (tokens + 1) / 2
        name = f"{count} x {tokens} tokens, {heads} heads over {kv_heads} of {dim}"
        found[name] = {side: work / s for side, s in in_turns(calls, runs).items()}
        _show(name, found[name], "GFLOP/s")
    return found


def passes(case: KernelCase, runs: int) -> Record:
    """Return GB/s: operands read once and results written once, divided by the seconds."""
    import torch

    from flexengine.kernels import load
    from flexengine.kernels.reference import ReferenceKernels

    found: Record = {}
    for tokens, hidden, heads, dim in case.passes:
        x, y, weight = torch.randn(tokens, hidden), torch.randn(tokens, hidden), torch.randn(hidden)
        ones = torch.ones(tokens, hidden)  # gates repeat in place: values must stay ordinary
        q, (cos, sin) = torch.randn(1, tokens, heads, dim).transpose(1, 2), torch.randn(2, 1, tokens, dim)
        for name, moved, operands in (
            ("rms_norm", 2 * x.nbytes, (x, weight, 1e-5)),
            ("rotate", 2 * q.nbytes, (q, cos, sin)),
            ("gate", 3 * x.nbytes, (ones, y, "silu")),
        ):
            sides = {"torch": ReferenceKernels(), "native": load()}
            calls = {n: partial(_pass, getattr(s, name), operands) for n, s in sides.items()}
            named = f"{name} of {tokens} x {hidden}"
            found[named] = {side: 1e-9 * moved / s for side, s in in_turns(calls, runs).items()}
            _show(named, found[named], "GB/s")
    return found


def model(case: KernelCase, runs: int) -> Record:
    """Return the tokens/s of alternating runs with and without the fused modules."""
    import torch

    import flexengine
    from flexengine.model import build
    from flexengine.model.native import fused

    rows, length, out = case.model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40_000, (rows, length), generator=generator).tolist()
    prompts = [{"prompt_token_ids": row} for row in ids]
    sides: dict[str, Any] = {}
    place: Any = build  # the module in which the function is looked up
    for name, used in (("as transformers has them", lambda _: None), ("fused", fused.use_fused)):
        place.use_fused = used
        sides[name] = flexengine.Engine(device="cpu", lossy=flexengine.Lossy(**case.lossy))
    place.use_fused = fused.use_fused
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for attempt in range(min(runs, 3) + 1):
        for name, engine in sides.items():
            start = time.perf_counter()
            list(engine.generate(prompts, flexengine.SamplingParams(max_tokens=out, ignore_eos=True)))
            if attempt:
                rates[name].append(rows * out / (time.perf_counter() - start))
    for engine in sides.values():
        engine.close()
    found = {name: harness.stats(measured) for name, measured in rates.items()}
    _show("SmolLM2", {name: s["median"] for name, s in found.items() if s}, "tokens/s")
    return found


def _show(what: str, rates: dict[str, float], unit: str) -> None:
    print(f"{what:44s}" + "  ".join(f"{name} {rate:.4g}" for name, rate in rates.items()) + f"  {unit}",
          file=sys.stderr, flush=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description="kernels against torch's")
    parser.add_argument("--case", choices=sorted(CASES), default="all")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=harness.at_least_one, default=5, help="rounds of each side (default 5)")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    case = CASES[args.case]
    for part in args.only:
        with contextlib.nullcontext() if part == "model" else torch.inference_mode():
            found = {"products": products, "prompts": prompts, "passes": passes, "model": model}[part](case, args.runs)
        header = harness.header(f"kernels {part}", case, [{"versions": harness.versions()}])
        harness.emit({**header, "rates": found}, args.out)


if __name__ == "__main__":
    main()
