"""Rates of the kernels for a GPU: decode attention, and products with 4-bit weights beside cuBLAS's with bf16. Run by
bench.gpu, or alone: python -m bench.gpu.kernels [--out FILE] [--smoke]

attention: GB/s of KV read, in bf16 and in 4 bits, with the fused kernel and with plain torch. products: TFLOP/s of
x @ w.T by the number of rows. Successive calls read different memory, more than the GPU's caches hold.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench import harness
from bench.harness import Record
from flexengine.codec.cache import CacheFormat
from flexengine.codec.packed import Groupwise, Packed
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.cuda import CudaKernels

Call = Callable[[int], object]
PAGE_TOKENS, HELD, BITS, GROUP = 32, 1 << 28, 4, 64


@dataclass(frozen=True)
class GpuKernelCase:
    """Shapes of the measured kernels.

    Attributes:
        attention: (sequences, tokens, heads, kv_heads, head_dim).
        shape: [n, k] of the weights.
        rows: rows of x.
    """

    attention: tuple[tuple[int, int, int, int, int], ...] = (
        (16, 544, 32, 32, 128), (64, 2048, 32, 32, 128), (64, 2048, 32, 8, 128), (1, 32768, 32, 8, 128)
    )  # fmt: skip
    shape: tuple[int, int] = (8192, 8192)
    rows: tuple[int, ...] = (1, 16, 64, 256, 2048)
    held: int = HELD
    seconds: float = 0.2


SMOKE = GpuKernelCase(((2, 40, 4, 4, 64), (2, 40, 4, 2, 64)), (48, 128), (1, 20), 1 << 12, 0.001)


def seconds_of(call: Call, device: str, least: float) -> float:
    """Return the seconds of one call, from as many calls as fill `least` seconds. call(i) makes the i-th call."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    numbers = count()
    for _ in range(3):  # the first calls compile kernels
        call(next(numbers))
    repeats = 4
    while True:
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call(next(numbers))
        synchronize()
        if (spent := time.perf_counter() - start) >= least:
            return spent / repeats
        repeats *= 2


def attention(case: GpuKernelCase, device: str) -> list[Record]:
    found = []
    sets = {"fused": CudaKernels(), "torch": CudaKernels(fused=False)}
    for sequences, tokens, heads, kv_heads, dim in case.attention:
        pages = -(-tokens // PAGE_TOKENS)
        q = torch.randn(sequences, heads, dim, device=device).bfloat16()
        lengths = torch.full((sequences,), tokens, dtype=torch.int32, device=device)
        for bits in (16, BITS):
            form = None if bits == 16 else CacheFormat(bits, kv_heads, PAGE_TOKENS, dim)
            page = form.page_bytes if form else 2 * kv_heads * PAGE_TOKENS * dim * 2
            copies = max(2, -(-case.held // (sequences * pages * page)))
            pool = _pool(copies * sequences * pages, kv_heads, dim, form, device)
            places = torch.randperm(len(pool), device=device).int().view(copies, sequences, pages)
            rates = {}
            for name, kernels in sets.items():

                def call(
                    i: int, kernels: CudaKernels = kernels, q: Tensor = q, pool: Tensor = pool, at: Tensor = places,
                    held: Tensor = lengths, form: CacheFormat | None = form,
                ) -> object:  # fmt: skip
                    return kernels.decode_attention(
                        q, pool, at[i % len(at)], held, AttentionOptions(q.shape[-1] ** -0.5), form=form
                    )

                spent = seconds_of(call, device, case.seconds)
                rates[name] = sequences * tokens * page / PAGE_TOKENS / spent / 1e9
            shape = {"sequences": sequences, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
            found.append({"attention": shape, "bits": bits, "gb_s": rates})
    return found


def _pool(pages: int, kv_heads: int, dim: int, form: CacheFormat | None, device: str) -> Tensor:
    """Return random numbers. For codes, scales and minima are 1."""
    if form is None:
        return torch.randn(pages, 2, kv_heads, PAGE_TOKENS, dim, device=device, dtype=torch.bfloat16)
    pool = torch.randint(256, (pages, form.page_bytes), dtype=torch.uint8, device=device)
    panels = form.panels(pool)
    panels.scale.fill_(1)
    panels.minimum.fill_(1)
    return pool


def products(case: GpuKernelCase, device: str) -> list[Record]:
    (n, k), kernels = case.shape, CudaKernels()
    form = Packed(Groupwise("bench", BITS, GROUP), n, k)
    copies = max(2, -(-case.held // form.nbytes))
    dense = torch.randn(max(2, -(-case.held // (2 * n * k))), n, k, device=device, dtype=torch.bfloat16)
    packed = form.encode(dense[0].float()).repeat(copies, 1)
    found = []
    for rows in case.rows:
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        calls: dict[str, Call] = {
            "bf16": lambda i, x=x: linear(x, dense[i % len(dense)]),  # type: ignore[misc]
            "int4": lambda i, x=x: kernels.product(x, packed[i % copies], form),  # type: ignore[misc]
            "int4, int8": lambda i, x=x: kernels.product(x, packed[i % copies], form, None, "int8"),  # type: ignore[misc]
        }
        flop = 2.0 * rows * n * k
        rates = {name: flop / seconds_of(call, device, case.seconds) / 1e12 for name, call in calls.items()}
        found.append({"product": [n, k], "rows": rows, "tflop_s": rates})
    return found


@torch.no_grad()
def run(case: GpuKernelCase, device: str, out: str | None) -> None:
    """Emit one JSON line per figure."""
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "kernels": CudaKernels().numerics() if device == "cuda" else "cpu"}
    for part in (partial(attention, case, device), partial(products, case, device)):
        for figures in part():
            harness.emit({**harness.header("gpu_kernels", case, [{"versions": versions}]), "device": device, **figures},
                         out)  # fmt: skip
    if device == "cuda":
        torch.cuda.empty_cache()  # free memory for the processes that are measured next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="append records to this file")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    args = parser.parse_args()
    run(*((SMOKE, "cpu") if args.smoke else (GpuKernelCase(), "cuda")), args.out)


if __name__ == "__main__":
    main()
