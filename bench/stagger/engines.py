"""Two engine processes on one attention worker: the fixed order of n = 3.

Each engine has one gpu_batch and one weight slot, and its weights come through a throttled link, so a slice takes as
long as the load of a layer. The worker sleeps until its attention has taken t_a. An engine alone shows what its slice
takes, loads and messages included: the seconds of a layer less t_a. The virtual clock gives those of two engines.
"""

import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench import harness
from bench.harness import Record
from bench.models import LlamaShape, make
from bench.simulate import simulate
from bench.stagger.orders import fixed, steady
from flexengine.schedule.tasks import Op

SHAPE = LlamaShape(6, 320, 880, 4, vocab=64, positions=256, dtype="float32", kv_heads=2)
ATTENTION = (0.02, 0.04, 0.08)  # seconds
SLICE = 0.04  # seconds in which the link brings a layer
ROWS, PROMPT, TOKENS = 2, 16, 30
LIMIT = 0.1  # most relative error


def start(job: Record, directory: Path) -> "subprocess.Popen[str]":
    """Start a side. Its messages go to a file for `answer`."""
    (path := directory / f"{job['name']}.json").write_text(json.dumps(job))
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen([sys.executable, "-m", "bench.stagger.side", str(path)], stdout=subprocess.PIPE,
                                text=True, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


def answer(process: "subprocess.Popen[str]", name: str, directory: Path) -> Record:
    """Return what a side printed when it ended. Raise RuntimeError, with its last messages, if it failed."""
    printed = process.communicate()[0].splitlines()
    if process.returncode or not printed:
        said = (directory / f"{name}.log").read_text().splitlines()[-5:]
        raise RuntimeError("\n".join([f"{name} ended with code {process.returncode}:", *said]))
    record: Record = json.loads(printed[-1])
    return record


@contextmanager
def pool(seconds: float, directory: Path) -> Iterator[str]:
    """Run an attention worker. Yield its address. The worker ends also if an engine fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with start({"name": "pool", "address": address, "seconds": seconds}, directory) as process:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        answer(process, "pool", directory)
                    time.sleep(0.2)
            yield address
        finally:
            process.terminate()


def layer_seconds(count: int, job: Record, directory: Path) -> tuple[float, list[list[int]]]:
    """Run engines at the same time. Return the median seconds of a layer of one of them, in the sweeps in which all of
    them decode, and their tokens."""
    names = [f"engine {number}" for number in range(count)]
    processes = [start({**job, "name": name}, directory) for name in names]
    runs = [answer(process, name, directory) for process, name in zip(processes, names, strict=True)]
    first, last = max(run["times"][1] for run in runs), min(run["times"][-1] for run in runs)
    sweeps = [b - a for run in runs for a, b in pairwise(run["times"]) if first <= a and b <= last]
    return median(sweeps) / SHAPE.layers, [run["tokens"] for run in runs]


def predicted(alone: float, attention: float) -> float:
    """Return the seconds of a layer of two engines. alone: of one engine."""
    seconds = {Op.COMPUTE: alone - attention, Op.ATTEND: attention}
    return steady(simulate(fixed(3).program(60), lambda task: seconds[task.op]).spans, 20, 40).period


def engines(turns: int, directory: Path) -> Record:
    """Return the record."""
    model, rng = make(SHAPE, directory / "model"), random.Random(1)
    layer = sum(4 * math.prod(size) for size in SHAPE.layer_shapes(0).values())
    policy = {"gpu_batch_size": ROWS, "num_gpu_batches": 1, "weights": [0, 1, 0], "cache": {"workers": 1}, "slots": 1}
    job = {"model": str(model), "link": layer / SLICE, "tokens": TOKENS, "policy": policy,
           "rows": [[rng.randrange(3, SHAPE.vocab) for _ in range(PROMPT)] for _ in range(ROWS)]}  # fmt: skip
    points, tokens = list[Record](), list[list[int]]()
    for attention in ATTENTION:
        runs: dict[int, list[float]] = {1: [], 2: []}
        with pool(attention, directory) as address:
            for _ in range(turns):
                for count, times in runs.items():
                    seconds, found = layer_seconds(count, {**job, "address": address}, directory)
                    times.append(seconds)
                    tokens += found
        alone, both = (min(times) for times in runs.values())  # other programs of the machine only delay
        expected = predicted(alone, attention)
        points.append({"attention": attention, "alone": alone, "both": both, "predicted": expected,
                       "ratio": both / expected, "throughput": 2 * alone / both, "runs": runs})  # fmt: skip
        print(f"  attention {attention:g} s: a layer {alone:.4f} s alone, {both:.4f} s with two engines,"
              f" predicted {expected:.4f} s", file=sys.stderr)  # fmt: skip
    case = {"name": "engines", "slice": SLICE, "layers": SHAPE.layers, "rows": ROWS, "tokens": TOKENS, "turns": turns}
    same = all(each == tokens[0] for each in tokens)
    worst = max((point["ratio"] for point in points), key=lambda ratio: abs(ratio - 1))
    return harness.header("stagger", case, [{"versions": harness.versions()}]) | {
        "points": points, "worst_ratio": worst, "same": same, "good": same and abs(worst - 1) <= LIMIT,
    }  # fmt: skip
