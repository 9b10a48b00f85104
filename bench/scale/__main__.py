"""Growth of time and memory with rows, prompt length, layers and gpu_batches, for models so small that overhead
dominates.

python -m bench.scale [--parts rows prompt layers batches sweep] [--rows 1 1000 100000] [--smoke] [--out FILE]
python -m bench.scale --soak 50000     exits with 1 if memory, open files or threads of the job grow while it runs

Tiny OPT models of random weights. Every point of `rows` is one process of the command line. One JSON line per part: its
points, and seconds = a + b * x by least squares with the standard error of b: the cost of a row, of a prompt token, of
a layer, of a gpu_batch's task. `sweep` records when each task of one sweep ran, with weights streamed over slow links.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record
from bench.models import SHAPES, make

TOKENS = 8  # tokens generated per row
SEED = 1
TINY = replace(SHAPES["opt-tiny"], positions=1024)
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """Sizes of the measurements.

    Attributes:
        repeats: runs of each point; the least seconds count.
    """

    rows: tuple[int, ...] = (1, 1000, 10000, 100000)
    prompts: tuple[int, ...] = (16, 64, 256, 512)
    layers: tuple[int, ...] = (1, 2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokens: int = 32
    repeats: int = 3


SMOKE = Size(rows=(1, 20), prompts=(8, 16, 32), layers=(1, 2, 3), batches=(1, 2, 4), tokens=4, repeats=1)


@dataclass(frozen=True)
class Fit:
    """A line y = a + b * x by least squares.

    Attributes:
        error: standard error of b; 0 for two points.
    """

    a: float
    b: float
    error: float


def fit(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """Return the fitted line. At least two xs must differ."""
    n, mean_x, mean_y = len(xs), sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    b = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    a = mean_y - b * mean_x
    left = sum((y - a - b * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Fit(a, b, sqrt(left / (n - 2) / spread) if n > 2 else 0.0)


# ---- whole jobs, as processes of the command line


def prompts(folder: Path, rows: int) -> Path:
    """Write a file of `rows` prompts of 4 to 12 token ids, and return its path."""
    rng = random.Random(SEED)
    path = folder / f"{rows}.jsonl"
    with path.open("w") as file:
        for _ in range(rows):
            ids = [rng.randrange(3, 512) for _ in range(rng.randint(4, 12))]
            file.write(json.dumps({"prompt_token_ids": ids}) + "\n")
    return path


def usage(pid: int) -> dict[str, int]:
    """Return the present resident bytes, open files and threads of a process; nothing if it has ended."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(os.listdir(f"/proc/{pid}/fd"))
        return {"rss": int(status["VmRSS"].split()[0]) * 1024, "fds": files, "threads": int(status["Threads"])}
    except (OSError, KeyError):
        return {}


def job(model: Path, source: Path, rows: int, every: float = 0.0) -> Record:
    """Run one job from start to end of its process, and sample its usage `every` so many seconds."""
    output = source.with_suffix(".out.jsonl")
    command = [sys.executable, "-m", "flexengine.run", str(source), "--model", str(model), "--output", str(output),
               "--max-tokens", str(TOKENS), "--ignore-eos", "--device", "cpu"]  # fmt: skip
    samples: list[Record] = []
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            if found := usage(process.pid):
                samples.append({"seconds": time.perf_counter() - began, **found})

    sampler = threading.Thread(target=sample, daemon=True)
    if every:
        sampler.start()
    assert process.stderr is not None
    log = process.stderr.read()
    done.set()
    _, status, spent = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(log[-2000:])
    with output.open("rb") as lines:
        found = sum(1 for _ in lines)
    if found != rows:
        raise SystemExit(f"{found} rows came out of {rows}")
    computed = sum(float(x) for x in re.findall(r"(?:prefill|decode) ([\d.]+) s", log.splitlines()[-1]))
    point = {"rows": rows, "seconds": seconds, "sweeps_seconds": computed, "peak_rss": spent.ru_maxrss * 1024}
    return {**point, "samples": samples} if every else point


def by_rows(folder: Path, size: Size) -> Record:
    """Measure seconds and peak memory by number of rows."""
    model = make(TINY, folder / "model")
    points = [job(model, prompts(folder, rows), rows) for rows in sorted(size.rows)]
    xs = [float(p["rows"]) for p in points]
    memory = fit(xs, [float(p["peak_rss"]) for p in points])
    return {"points": points, "seconds": fit(xs, [p["seconds"] for p in points]).__dict__,
            "rss": memory.__dict__, "per": "row", "tokens": TOKENS}  # fmt: skip


def grown(samples: Sequence[Record], allowed: dict[str, int] | None = None) -> dict[str, tuple[int, int]]:
    """Return what was larger in the last quarter of the samples than ever in the second quarter, by more than is
    allowed: {name: (then, last)}. The first quarter warms up."""
    allowed = allowed or {"rss": 16 * MIB, "fds": 2, "threads": 1}
    n = len(samples)
    if n < 8:
        raise ValueError(f"{n} samples are too few")
    then, last = samples[n // 4 : n // 2], samples[3 * n // 4 :]
    found = {name: (max(x[name] for x in then), max(x[name] for x in last)) for name in allowed}
    return {name: (a, b) for name, (a, b) in found.items() if b > a + allowed[name]}


def soak(folder: Path, rows: int, every: float) -> Record:
    """Run one long job and sample its usage."""
    found = job(make(TINY, folder / "model"), prompts(folder, rows), rows, every)
    samples = found.pop("samples")
    values = {name: [x[name] for x in samples] for name in ("rss", "fds", "threads")}
    ranges = {name: [min(x), max(x)] for name, x in values.items()}
    kept = samples[:: max(1, len(samples) // 50)]
    return {**found, "every": every, "ranges": ranges, "grown": grown(samples), "samples": kept}


# ---- the engine in this process


def timed(model: Path, lengths: Sequence[int], tokens: int, policy: Record, repeats: int, **options: Any) -> Record:
    """Run rows of these prompt lengths. Return the least seconds of the runs, with that run's sweeps."""
    from flexengine import Engine, Policy, SamplingParams

    rng = random.Random(SEED)
    rows = [{"prompt_token_ids": [rng.randrange(3, 512) for _ in range(n)]} for n in lengths]
    best: Record = {}
    with Engine(model, policy=Policy(**policy), **{"device": "cpu", **options}) as engine:
        for _ in range(repeats + 1):  # the first run warms up, and reads the weights that stay in memory
            results = engine.generate(rows, SamplingParams(max_tokens=tokens, ignore_eos=True))
            if errors := [r.error for r in results if r.error]:
                raise SystemExit(errors[0])
            kept = ("total_seconds", "prefill_seconds", "decode_seconds", "sweeps")
            found = {name: getattr(engine.summary, name) for name in kept}
            best = found if not best or found["total_seconds"] < best["total_seconds"] else best
    return best


def points(xs: Sequence[int], measure: Callable[[int], Record], value: Callable[[Record], float], per: str) -> Record:
    """Measure a point for each x, and fit the line."""
    found = [{"x": x, **measure(x)} for x in xs]
    return {"points": found, "seconds": fit([float(x) for x in xs], [value(p) for p in found]).__dict__, "per": per}


def one(batch: int, batches: int = 1) -> Record:
    """Return a policy with everything on the device."""
    return {"gpu_batch_size": batch, "num_gpu_batches": batches, "schedule": "zigzag"}


def by_prompt(folder: Path, size: Size) -> Record:
    """Measure the seconds of the first sweep by prompt length, for four rows."""
    model = make(TINY, folder / "model")
    return points(size.prompts, lambda n: timed(model, [n] * 4, 2, one(4), size.repeats),
                  lambda p: float(p["prefill_seconds"]), "prompt token of 4 rows")  # fmt: skip


def by_layers(folder: Path, size: Size) -> Record:
    """Measure the seconds of a decode sweep by layers, for one row: the cost of a layer's task."""

    def measure(n: int) -> Record:
        return timed(make(replace(TINY, layers=n), folder / f"layers{n}"), [8], size.tokens, one(1), size.repeats)

    return points(size.layers, measure, sweep_seconds, "layer and sweep")


def by_batches(folder: Path, size: Size) -> Record:
    """Measure the seconds of a decode sweep by gpu_batches of four rows: latency against throughput."""
    model = make(TINY, folder / "model")

    def measure(n: int) -> Record:
        return timed(model, [8] * 4 * n, size.tokens, one(4, n), size.repeats)

    found = points(size.batches, measure, sweep_seconds, "gpu_batch and sweep")
    for point in found["points"]:
        point["sweep_seconds"] = sweep_seconds(point)
        point["tok_s"] = 4 * point["x"] / point["sweep_seconds"]
    return {**found, "rows_per_batch": 4, "per_task": found["seconds"]["b"] / TINY.layers}


def sweep_seconds(point: Record) -> float:
    """Return the seconds of a decode sweep."""
    seconds, sweeps = float(point["decode_seconds"]), int(point["sweeps"])
    return seconds / max(1, sweeps - 1)


def one_sweep(folder: Path, size: Size) -> Record:
    """Record when each task of a decode sweep ran, with weights and cache in host RAM behind links of 20 MB/s."""
    from flexengine.tier.machine import Links

    trace = folder / "trace.json"
    policy = {"gpu_batch_size": 8, "num_gpu_batches": 2, "weights": (0.0, 1.0, 0.0), "cache": (0.0, 1.0, 0.0)}
    links = Links(h2d=2e7, d2h=2e7)
    shape = replace(TINY, hidden=128, ffn=512)
    timed(make(shape, folder / "sweep"), [32] * 16, 6, policy, 0, device="sim", links=links, trace=trace)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X" and e["args"]["sweep"] == 3]
    zero = min(e["ts"] for e in spans)
    rows = [(names[e["tid"]], e["name"], e["ts"] - zero, e["dur"]) for e in spans]
    return {
        "policy": policy,
        "links": 2e7,
        "spans": [[lane, what, start / 1e3, (start + took) / 1e3] for lane, what, start, took in rows],
    }


PARTS: dict[str, Callable[[Path, Size], Record]] = {
    "rows": by_rows, "prompt": by_prompt, "layers": by_layers, "batches": by_batches, "sweep": one_sweep
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Case of a record."""

    name: str
    size: Size | None = None


def said(line: Record) -> str:
    """Return a record as a line of text."""
    if "seconds" not in line or "per" not in line:
        return f"{line['case']['name']}: {len(line.get('spans', []))} tasks"
    law = line["seconds"]
    return f"{line['case']['name']}: {1e3 * law['b']:.4g} +- {1e3 * law['error']:.2g} ms per {line['per']}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows (default 1 1000 10000 100000)")
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes: that it works, not how fast")
    parser.add_argument("--soak", type=int, metavar="N", help="instead of the parts, one job of N rows, watched")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between samples of the soak (default 0.25)")
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args(words)
    import flexengine  # noqa: F401 - before torch: it sets how threads wait

    size = SMOKE if args.smoke else Size()
    size = replace(size, rows=tuple(args.rows)) if args.rows else size
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        made = [{"versions": harness.versions()}]
        if args.soak:
            found = soak(folder, args.soak, args.every)
            harness.emit({**harness.header("scale", Part("soak"), made), **found}, args.out)
            for what, (then, last) in found["grown"].items():
                print(f"{what} grew from {then} to {last}", file=sys.stderr)
            return int(bool(found["grown"]))
        for part in args.parts:
            line = {**harness.header("scale", Part(part, size), made), **PARTS[part](folder, size)}
            harness.emit(line, args.out)
            print(said(line), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
