"""The least time a streamed case can take here: reading its weights against multiplying by them.

Measures, as a process of its own (Question on stdin, one JSON line out), the best cold sequential read rate of the
model's own files and the seconds of the case's GEMMs at the numbers of rows (M) they really have. Attention, norms and
activations are not counted, so the bound is a little lower than what is possible.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.models import shard_files

MICRO_BATCH = 2048  # tokens of a prefill GEMM at most
HALF, BF16 = "16-bit weights", "bf16"
CHUNKS = {"buffered": 4 * 2**20, "direct": 8 * 2**20}


@dataclass(frozen=True)
class Question:
    """A model directory and the M of the layer GEMMs and of the head's, for each sweep in order.

    lossy: the switches of the run; with encoded weights the engine's own product of that kind is what is timed."""

    model: str
    layer_ms: tuple[tuple[int, ...], ...]
    head_ms: tuple[int, ...]
    lossy: dict[str, Any] | None = None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def question(model: str, lengths: Sequence[tuple[int, int]]) -> Question:
    """All rows enter in sweep 0, which also gives their first tokens; sweep i has one row per live sequence."""
    prompt = sum(n for n, _ in lengths)
    prefill = [MICRO_BATCH] * (prompt // MICRO_BATCH) + ([prompt % MICRO_BATCH] if prompt % MICRO_BATCH else [])
    live = [sum(out > i for _, out in lengths) for i in range(max(out for _, out in lengths))]
    return Question(model, (tuple(prefill), *((m,) for m in live[1:])), tuple(live))


def bounds(disk_seconds: float, compute_seconds: Sequence[float]) -> dict[str, float]:
    """Seconds from those of reading one sweep's weights and those of computing each sweep.

    per_sweep: sum of max(disk, compute), what two overlapping lanes reach if a sweep may not run ahead of the last.
    overall: max of the sums, if they could.
    """
    return {
        "disk": disk_seconds * len(compute_seconds),
        "compute": sum(compute_seconds),
        "per_sweep": sum(max(disk_seconds, c) for c in compute_seconds),
        "overall": max(disk_seconds * len(compute_seconds), sum(compute_seconds)),
    }


# ---- disk


def evict(paths: Sequence[Path]) -> None:
    """Drops these files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_rate(paths: Sequence[Path], chunk: int, direct: bool) -> float:
    """Bytes/s of reading the files from end to end, cold, into one buffer. Raises OSError where O_DIRECT is refused."""
    evict(paths)
    total, start = 0, time.perf_counter()
    with mmap.mmap(-1, chunk) as buffer:
        for path in paths:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            try:
                offset = 0
                while n := os.preadv(fd, [buffer], offset):
                    if not direct:
                        os.posix_fadvise(fd, offset, n, os.POSIX_FADV_DONTNEED)
                    offset += n
                    if n % 4096:  # the unaligned end of the file
                        break
                total += offset
            finally:
                os.close(fd)
    return total / (time.perf_counter() - start)


def read_rates(paths: Sequence[Path], repeats: int = 2) -> dict[str, float]:
    """The best rate of each way to read."""
    rates: dict[str, float] = {}
    for _ in range(repeats):
        for way, chunk in CHUNKS.items():
            with suppress(OSError):
                rates[way] = max(rates.get(way, 0.0), read_rate(paths, chunk, way == "direct"))
    return rates


# ---- compute


def kernels() -> dict[str, Callable[[Any, Any], Any]]:
    """The GEMMs of fp32 accuracy there are here, x [M, k] and w [n, k] to [M, n]: torch's two with w in fp32, and the
    engine's with w in fp16."""
    import torch

    import flexengine.kernels

    found: dict[str, Callable[[Any, Any], Any]] = {"linear": torch.nn.functional.linear}
    with suppress(AttributeError, RuntimeError):
        op = torch.ops.mkldnn._linear_pointwise
        op(torch.ones(2, 4), torch.ones(4, 4), None, "none", [], "")
        found["mkldnn"] = lambda x, w: op(x, w, None, "none", [], "")
    found[HALF] = flexengine.kernels.load().linear
    return found


def bf16_kernels() -> dict[str, Callable[[Any, Any], Any]]:
    """Products of bf16."""
    import flexengine.kernels

    return {BF16: partial(flexengine.kernels.load().linear, compute="bf16")}


def encoded_seconds(m: int, shapes: Sequence[tuple[int, int]], codec: str, compute: Any, repeats: int = 3) -> float:
    """The same with encoded weights."""
    import torch

    import flexengine.kernels
    from flexengine.codec.named import WEIGHTS
    from flexengine.codec.packed import Packed

    forms = [Packed(WEIGHTS[codec], n, k) for n, k in shapes]
    weights = [torch.randint(0, 60, (form.nbytes,), dtype=torch.uint8) for form in forms]
    kernel, best = flexengine.kernels.load(), float("inf")
    for attempt in range(repeats + 1):
        inputs = {k: torch.randn(m, k) for _, k in shapes}
        start = time.perf_counter()
        for form, w in zip(forms, weights, strict=True):
            kernel.product(inputs[form.columns], w, form, None, compute)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def gemm_seconds(
    m: int, shapes: Sequence[tuple[int, int]], lossy: dict[str, Any] | None, head: bool = False, repeats: int = 3
) -> dict[str, float]:
    """Seconds of multiplying by one weight [n, k] of each shape, by kernel; the least of the repeats.

    Each shape has its own weight, so between repeats most of them leave the CPU's caches, as streamed weights do.
    """
    import torch

    from flexengine.lossy import Lossy

    coded, compute = Lossy(**(lossy or {})).coded, (lossy or {}).get("compute")
    if coded:
        return {"encoded": encoded_seconds(m, shapes, "int8" if head else coded, compute, repeats)}
    inputs = {k: torch.randn(m, k) for _, k in shapes}
    best: dict[str, float] = {}
    dtypes = {HALF: torch.float16, BF16: torch.bfloat16}
    for name, kernel in (kernels() if compute is None else bf16_kernels()).items():
        weights = [torch.randn(n, k).to(dtypes.get(name, torch.float32)) for n, k in shapes]
        for attempt in range(repeats + 1):
            start = time.perf_counter()
            for w in weights:
                kernel(inputs[w.shape[1]], w)
            if attempt:  # the first is a warm-up
                best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
    return best


def layer_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """[n, k] of an OPT layer's linears."""
    h, f = config["hidden_size"], config["ffn_dim"]
    return [(h, h)] * 4 + [(f, h), (h, f)]


def answer(asked: Question) -> dict[str, Any]:
    """Read rates and compute seconds of every sweep."""
    import torch

    model = Path(asked.model)
    config = json.loads((model / "config.json").read_text())
    files = shard_files(model)
    rates = read_rates(files)
    with torch.inference_mode():
        sizes = {m for ms in asked.layer_ms for m in ms}
        layer = {m: gemm_seconds(m, layer_shapes(config), asked.lossy) for m in sizes}
        shape = (config["vocab_size"], config["hidden_size"])
        head = {m: gemm_seconds(m, [shape], asked.lossy, head=True) for m in set(asked.head_ms)}
    compute = [
        config["num_hidden_layers"] * sum(min(layer[m].values()) for m in ms) + min(head[h].values())
        for ms, h in zip(asked.layer_ms, asked.head_ms, strict=True)
    ]
    return {
        "model_bytes": sum(f.stat().st_size for f in files),
        "read_rate": rates,
        "compute_seconds": compute,
        "layer_seconds": {str(m): s for m, s in layer.items()},
        "head_seconds": {str(m): s for m, s in head.items()},
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """The question on stdin, the answer on stdout."""
    fields = json.loads(sys.stdin.read())
    ms = tuple(tuple(sweep) for sweep in fields["layer_ms"])
    asked = Question(fields["model"], ms, tuple(fields["head_ms"]), fields["lossy"])
    print(json.dumps(answer(asked)))


if __name__ == "__main__":
    main()
