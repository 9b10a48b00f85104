"""The least time of a case on this machine: reading the streamed weights, crossing the link, reading memory,
multiplying.

The module runs as a process of its own, with a Question on stdin and one JSON line on stdout. It measures the rates of
memory and of the link to a GPU, and the seconds of the case's GEMMs with their real numbers of rows (M). Of prompts,
the last layer needs keys and values of all tokens, and the rest of the last tokens only. Memory reads each weight, and
the cache of each live sequence, once per sweep. The arithmetic of attention, norms and activations is not counted, so
the bound is a little lower than the possible time.

`read_rates` measures the disk: sequential reads of the model's own files without page cache. A shared disk changes its
rate by a tenth from minute to minute, so bench.compare measures it before and after each job, and takes the mean of the
way to read that was the fastest.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.compare.matrices import Layer, Shapes, active_of, cache_bytes, layers_of, used, weight_bytes
from bench.models import shard_files

MICRO_BATCH = 2048  # most tokens of a prefill GEMM
HALF, BF16 = "16-bit weights", "bf16"


@dataclass(frozen=True)
class Way:
    """A way to read files. chunk: bytes of a read. threads: reads under way at the same time."""

    chunk: int
    direct: bool
    threads: int = 1


WAYS = {"buffered": Way(4 * 2**20, False), "direct": Way(64 * 2**20, True), "two direct": Way(64 * 2**20, True, 2)}


@dataclass(frozen=True)
class Question:
    """The input of the measurement.

    Attributes:
        lossy: switches of the run. With encoded weights the engine's own product of that format is timed.
        cached: tokens in all caches that each sweep reads.
        device: device that computes, "cpu" or "cuda".
    """

    model: str
    layer_ms: tuple[tuple[int, ...], ...]
    head_ms: tuple[int, ...]
    lossy: dict[str, Any] | None = None
    cached: tuple[int, ...] = ()
    device: str = "cpu"

    def to_json(self) -> str:
        """Return the question as one line of JSON."""
        return json.dumps(asdict(self))


def question(model: str, lengths: Sequence[tuple[int, int]]) -> Question:
    """Return the question of a case. All rows enter in sweep 0, which also computes their first tokens; sweep i
    computes one row per live sequence."""
    prompt = sum(n for n, _ in lengths)
    prefill = [MICRO_BATCH] * (prompt // MICRO_BATCH) + ([prompt % MICRO_BATCH] if prompt % MICRO_BATCH else [])
    live = [sum(out > i for _, out in lengths) for i in range(max(out for _, out in lengths))]
    cached = [sum(prompt + i for prompt, out in lengths if out > i) for i in range(1, len(live))]
    return Question(model, (tuple(prefill), *((m,) for m in live[1:])), tuple(live), cached=(0, *cached))


def bounds(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return two bounds in seconds, from the seconds of each sweep by resource.

    per_sweep is the sum of the slowest resource of each sweep: the time of overlapping lanes if a sweep cannot start
    before the last one ends. overall is the slowest of the sums over all sweeps.
    """
    sums = {name: sum(sweeps) for name, sweeps in seconds.items()}
    per_sweep = sum(max(sweep) for sweep in zip(*seconds.values(), strict=True))
    return {**sums, "per_sweep": per_sweep, "overall": max(sums.values())}


# ---- disk


def evict(paths: Sequence[Path]) -> None:
    """Drop these files from the page cache.

    A file that has vanished since it was listed is skipped: other processes rename and remove prepared weights.
    """
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_rate(paths: Sequence[Path], way: Way) -> float:
    """Return the bytes/s of reading the files completely, without page cache, into a buffer per thread. Raise OSError
    if O_DIRECT is refused."""
    evict(paths)
    with ExitStack() as opened:
        files = list[tuple[int, int]]()
        for path in paths:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way.direct else 0))
            opened.callback(os.close, fd)
            files.append((fd, os.fstat(fd).st_size))
        pieces = iter([(fd, at) for fd, size in files for at in range(0, size, way.chunk)])
        pool = opened.enter_context(ThreadPoolExecutor(way.threads))
        start = time.perf_counter()
        for reader in [pool.submit(_read, pieces, way) for _ in range(way.threads)]:
            reader.result()
        return sum(size for _, size in files) / (time.perf_counter() - start)


def _read(pieces: Iterator[tuple[int, int]], way: Way) -> None:
    """Read pieces, (file, first byte), until none is left. A list's iterator gives each one to one thread."""
    with mmap.mmap(-1, way.chunk, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
        with suppress(OSError):  # kernels without huge pages; in small ones direct reads had less than half the rate
            buffer.madvise(mmap.MADV_HUGEPAGE)
        for fd, at in pieces:
            n = os.preadv(fd, [buffer], at)
            if n < min(way.chunk, os.fstat(fd).st_size - at):
                raise OSError(f"a read of {way.chunk:,} bytes at byte {at:,} ended after {n:,}")
            if not way.direct:
                os.posix_fadvise(fd, at, n, os.POSIX_FADV_DONTNEED)


def read_rates(paths: Sequence[Path]) -> dict[str, float]:
    """Return the rate of each way to read. Ways that the file system refuses are left out."""
    rates = dict[str, float]()
    for name, way in WAYS.items():
        with suppress(OSError):
            rates[name] = read_rate(paths, way)
    return rates


# ---- compute


def kernels() -> dict[str, Callable[[Any, Any], Any]]:
    """Return the GEMMs of fp32 accuracy by name, from x [M, k] and w [n, k] to [M, n]: torch's two with w in fp32, and
    the engine's with w in fp16."""
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
    """Return the GEMMs of bf16 by name."""
    import flexengine.kernels

    return {BF16: partial(flexengine.kernels.load().linear, compute="bf16")}


def encoded_seconds(m: int, shapes: Sequence[tuple[int, int]], codec: str, compute: Any, repeats: int = 3) -> float:
    """Return the seconds of the GEMMs with encoded weights, as `gemm_seconds`."""
    import torch

    import flexengine.kernels
    from flexengine.codec.packed import CODECS, Packed

    forms = [Packed(CODECS[codec], n, k) for n, k in shapes]
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
    """Return the least seconds, over repeats, of multiplying by one weight [n, k] of each shape, by kernel.

    Each shape has its own weight, so most weights leave the CPU's caches between repeats, as streamed weights do.
    """
    import torch

    from flexengine.lossy import Lossy

    coded, compute = Lossy(**(lossy or {})).coded, (lossy or {}).get("compute")
    if isinstance(coded, str):
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


def on_gpu(m: int, shapes: Sequence[tuple[int, int]], repeats: int = 3) -> dict[str, float]:
    """Return the same as `gemm_seconds`, in fp16 on the GPU."""
    import torch

    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) for n, k in shapes]
    inputs = {k: torch.randn(m, k, device="cuda", dtype=torch.float16) for _, k in shapes}
    best = float("inf")
    for attempt in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for w in weights:
            torch.nn.functional.linear(inputs[w.shape[1]], w)
        torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return {"linear": best}


def gpu_rates(nbytes: int = 2**28, repeats: int = 5) -> dict[str, float]:
    """Return the rates in bytes/s: `link`, from pinned host memory to the GPU; `memory`, the GPU's own, read and
    written by a copy."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    one, two = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    best = {"link": 0.0, "memory": 0.0}
    for _ in range(repeats):
        for name, source, moved in (("link", host, nbytes), ("memory", one, 2 * nbytes)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            two.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best[name] = max(best[name], moved / (time.perf_counter() - start))
    return best


class Products:
    """The least seconds of products, each measured once."""

    def __init__(self, asked: Question, active: int) -> None:
        """active: experts that a token uses."""
        self.asked, self.active = asked, active
        self.measured: dict[tuple[int, Shapes, bool], dict[str, float]] = {}

    def every(self, m: int, shapes: Shapes, head: bool = False) -> dict[str, float]:
        """Return the seconds of m tokens by kernel."""
        if not shapes:
            return {"none": 0.0}
        if (key := (m, shapes, head)) not in self.measured:
            on_cuda = self.asked.device == "cuda"
            self.measured[key] = (
                on_gpu(m, list(shapes)) if on_cuda else gemm_seconds(m, list(shapes), self.asked.lossy or {}, head)
            )
        return self.measured[key]

    def experts(self, m: int, layer: Layer) -> float:
        """Return the seconds of the experts that m tokens use, from those of a few of them."""
        if not layer.experts:
            return 0.0
        touched = used(layer.experts, self.active, m)
        few = min(layer.experts, 8)
        seconds = min(self.every(max(1, int(m * self.active / touched)), layer.expert * few).values())
        return seconds * touched / few

    def layer(self, m: int, layer: Layer) -> float:
        """Return the seconds of m tokens in a layer."""
        return min(self.every(m, layer.kept + layer.others).values()) + self.experts(m, layer)

    def last(self, ms: Sequence[int], rows: int, layer: Layer) -> float:
        """Return the seconds of prompts in the last layer: all tokens where they leave something in a cache, and the
        last ones of `rows` prompts."""
        kept = sum(min(self.every(m, layer.kept).values()) for m in ms)
        return kept + min(self.every(rows, layer.others).values()) + self.experts(rows, layer)


def answer(asked: Question) -> dict[str, Any]:
    """Return the rates of memory and link, and the seconds of memory and of compute of every sweep."""
    import torch

    from bench.kernels import peak

    model, lossy = Path(asked.model), asked.lossy or {}
    config = json.loads((model / "config.json").read_text())
    files = shard_files(model)
    layers, head_shape = layers_of(files), (config["vocab_size"], config["hidden_size"])
    products = Products(asked, active_of(config))
    with torch.inference_mode():
        compute = list[float]()
        for ms, rows in zip(asked.layer_ms, asked.head_ms, strict=True):
            seconds = sum(products.layer(m, layer) for m in ms for layer in layers[:-1])
            prompts = ms != (rows,)
            seconds += products.last(ms, rows, layers[-1]) if prompts else products.layer(rows, layers[-1])
            compute.append(seconds + min(products.every(rows, (head_shape,), head=True).values()))
        if asked.device == "cuda":
            machine: dict[str, Any] = gpu_rates()
        else:
            measured = asdict(peak.measure())
            machine = {"link": None, "memory": measured.pop("read"), **measured}
    token = cache_bytes(config, lossy, sum(layer.cached for layer in layers))
    sweeps = zip(asked.layer_ms, asked.cached or (0,) * len(compute), strict=True)
    return {
        "model_bytes": sum(f.stat().st_size for f in files),
        "rates": machine,
        "memory_seconds": [
            (weight_bytes(layers, config, lossy, sum(ms)) + token * n) / machine["memory"] for ms, n in sweeps
        ],
        "compute_seconds": compute,
        "product_seconds": [
            {"tokens": m, "matrices": len(shapes), "head": head, **found}
            for (m, shapes, head), found in products.measured.items()
        ],
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Read the question on stdin and print the answer on stdout."""
    fields = json.loads(sys.stdin.read())
    ms = tuple(tuple(sweep) for sweep in fields["layer_ms"])
    rest = {name: fields[name] for name in ("lossy", "device")}
    asked = Question(fields["model"], ms, tuple(fields["head_ms"]), cached=tuple(fields["cached"]), **rest)
    print(json.dumps(answer(asked)))


if __name__ == "__main__":
    main()
