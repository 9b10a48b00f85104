"""A random LLaMA in Q4_K_M under a memory limit: bytes read in each sweep, memory, tokens per second.

python -m bench.compare.own_bits [--shape llama-7b] [--limit 6.0G] [--rows 4] [--lengths 64 16] [--disk] [--dir DIR]
                                 [--lossy compute=bf16] [--out own_bits.jsonl]

The file is made once, and dropped from the page cache first. `--disk` leaves layers and head on disk, so that each
sweep reads them: these bytes, of the engine and of the kernel (/proc/self/io), are divided by those in the file. One
JSON line. The kernel reads less where the page cache has room. Exit code: 1 if the job fails, or with `--disk` the
engine's quotient differs from 1 by more than MOST, or the kernel's is higher.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import harness
from bench.cases import Case, Lengths
from bench.compare.__main__ import limit_bytes
from bench.compare.bound import evict
from bench.compare.gguf_files import random_q4_k_m
from bench.harness import Job, Limits, Record, report
from bench.models import SHAPES, LlamaShape
from bench.peers import flexengine_side

MOST = 0.005
LLAMAS = [name for name, shape in SHAPES.items() if type(shape) is LlamaShape]


def read_bytes() -> int:
    """Return the bytes that this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))


def side(job: Job) -> None:
    """Run a job as a process of its own, after one token of its first row, and print its record."""
    from flexengine import Engine

    with contextlib.redirect_stdout(sys.stderr), Engine(job.model, **flexengine_side.options_of(job)) as engine:
        begin = time.perf_counter()
        flexengine_side.generated(engine, job.first())
        before, loaded = read_bytes(), time.perf_counter()
        results = flexengine_side.generated(engine, job)
        ended, read, summary = time.perf_counter(), read_bytes() - before, engine.summary.to_json()
    if errors := [row.error for row in results if row.error]:
        raise SystemExit(f"{len(errors)} rows failed; the first: {errors[0]}")
    ids = [list(row.token_ids) for row in results]
    report(ids, ended - loaded, loaded - begin, summary=summary, read_bytes=read)


def ratios(path: Path, found: Mapping[str, Any]) -> Record:
    """Return the bytes of the file's layers and head, and bytes read per sweep divided by them."""
    from flexengine.model.gguf_header import read_header

    swept = ("blk.", "output.")
    layers = sum(tensor.nbytes for tensor in read_header(path).tensors if tensor.name.startswith(swept))
    sweeps, counted = found["summary"]["sweeps"], found["summary"]["bytes"].get("disk_read", 0)
    return {"layer_bytes": layers, "engine": counted / sweeps / layers, "kernel": found["read_bytes"] / sweeps / layers}


def main() -> int:
    """Run the command of the module's docstring, or a side without arguments. Return the exit code."""
    if len(sys.argv) == 1 and not sys.stdin.isatty():
        side(Job.from_json(sys.stdin.read()))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LLAMAS, default="llama-7b")
    parser.add_argument("--limit", type=limit_bytes, default=limit_bytes("6.0G"), help="memory, page cache included")
    parser.add_argument("--rows", type=harness.at_least_one, default=4)
    parser.add_argument("--lengths", type=harness.at_least_one, nargs=2, default=[64, 16], metavar=("IN", "OUT"))
    parser.add_argument("--disk", action="store_true", help="leave layers and head on disk")
    parser.add_argument("--lossy", type=harness.lossy, default={}, metavar="NAME=VALUE,...")
    parser.add_argument("--dir", type=Path, default=harness.cache() / "bench", help="for the file, which is kept")
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    shape: LlamaShape = SHAPES[args.shape]  # type: ignore[assignment]
    path = random_q4_k_m(shape, args.dir / f"{args.shape}.Q4_K_M.gguf")
    each, out = (Lengths(n, n) for n in args.lengths)
    case = Case("own bits", args.rows, each, out)
    policy = {"gpu_batch_size": args.rows, "num_gpu_batches": 1, "weights": (0.0, 0.0, 1.0)} if args.disk else None
    job = Job(str(path), tuple(case.requests(shape.vocab)), policy=policy, lossy=args.lossy)
    evict([path])
    found = harness.run_module("bench.compare.own_bits", job.to_json(), Limits(args.limit))
    if "error" in found:
        raise SystemExit(f"{found['error']}\n{found.get('stderr', '')}")
    read = ratios(path, found)
    head = harness.header(
        "own-bits", {name: x for name, x in vars(args).items() if name not in ("dir", "out")}, [found]
    )
    line = {"file_bytes": path.stat().st_size, "tok_s": found["generated_tokens"] / found["seconds"], **read}
    harness.emit({**head, **line, "run": harness.brief(found)}, args.out)
    return int(args.disk and (abs(read["engine"] - 1) > MOST or read["kernel"] > 1 + MOST))


if __name__ == "__main__":
    sys.exit(main())
