"""An OPT-13B-shaped model under a 16 GiB device limit, with weights streamed from host memory. Run it by bench/gpu.sh.

python -m bench.gpu DIR [--out FILE] [--seconds 260]   (DIR: where the checkpoint is made or reused; 26 GB)

First the kernels by themselves (bench.gpu.kernels), one JSON line per figure, and attention workers on the GPU
(bench.gpu.attention), one per job; their tokens must be equal. Then one line per case, each run in its own process, as
many as fit in --seconds; then a table. `share_of_bound` is the time that the streamed bytes take at the measured pinned
host-to-device rate, divided by the run's time.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import harness
from bench.cases import GPU, GpuCase, fixed
from bench.gpu import attention as gpu_attention
from bench.gpu import kernels as gpu_kernels
from bench.harness import Job, Limits, Record
from bench.models import SHAPES, make

WORKERS_SECONDS = 100.0  # of bench.gpu.attention, about


def policy_of(case: GpuCase) -> Record | None:
    """Return the policy's fields, or None if the planner chooses."""
    if case.weights is None:
        return None
    return {
        "weights": list(case.weights),
        "gpu_batch_size": case.gpu_batch_size,
        "num_gpu_batches": case.num_gpu_batches,
    }


def h2d_rate(device: str, nbytes: int = 2**30) -> float:
    """Return the bytes/s of a pinned copy to the device, the best of five; 0 if there is no GPU."""
    import torch

    if device != "cuda":
        return 0.0
    source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, nbytes / (time.perf_counter() - start))
    return best


def run_case(case: GpuCase, model: Path, device: str, rate: float, seconds: float) -> Record:
    """Run one case once, and return its record."""
    requests = tuple(case.case.requests(harness.vocab_size(model)))
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="bench-") as scratch:
        job = Job(
            str(model), requests, device=device, device_mem=case.device_mem, policy=policy_of(case), scratch=scratch
        )
        run = harness.run_side("flexengine_side", job, Limits(seconds=seconds))
    moved = run.get("summary", {}).get("bytes", {}).get("h2d", 0)
    share = moved / rate / run["seconds"] if rate and "seconds" in run else None
    return {
        **harness.header("gpu", case, [run]),
        "model": model.name,
        "device": device,
        "h2d_rate": rate,
        "share_of_bound": share,
        "run": harness.brief(run),
    }


def table(records: list[Record]) -> str:
    """Return the records as a table."""
    lines = [f"{'case':46} {'tok/s':>8} {'seconds':>8} {'load s':>7} {'of bound':>8} {'GPU GB':>7}"]
    for record in records:
        run: dict[str, Any] = record["run"]
        if "error" in run:
            lines.append(f"{record['case']['case']['name']:46} {run['error']}")
            continue
        peak, share = run.get("cuda_peak_bytes", 0) / 1e9, record["share_of_bound"]
        lines.append(
            f"{record['case']['case']['name']:46} {run['tok_s']:8.1f} {run['seconds']:8.1f} {run['load_seconds']:7.1f}"
            f" {'-' if share is None else f'{share:.0%}':>8} {peak:7.1f}"
        )
    return "\n".join(lines)


def smoke_case() -> GpuCase:
    """Return a tiny case for machines without a GPU."""
    from bench.cases import Case

    return GpuCase(Case("toy", 4, fixed(8), fixed(3)), device_mem="64M", gpu_batch_size=2)


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", help="append records to this file")
    parser.add_argument("--seconds", type=float, default=260.0, help="stop starting runs after this (default 260)")
    parser.add_argument("--make-only", action="store_true", help="only make the checkpoint")
    parser.add_argument("--smoke", action="store_true", help="a toy model on the simulated device")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    shape, cases, device = ("opt-tiny", (smoke_case(),), "sim") if args.smoke else ("opt-13b", GPU, "cuda")
    start = time.monotonic()
    model = make(SHAPES[shape], args.directory.resolve() / shape)
    print(json.dumps({"checkpoint": shape, "seconds": round(time.monotonic() - start, 1)}), flush=True)
    if args.make_only:
        return 0
    if args.smoke:
        gpu_kernels.run(gpu_kernels.SMOKE, "cpu", args.out)
    else:
        gpu_kernels.run(gpu_kernels.GpuKernelCase(), device, args.out)
    equal = True
    if args.smoke or end - time.monotonic() > WORKERS_SECONDS:
        workers = gpu_attention.SMOKE if args.smoke else gpu_attention.AttentionCase()
        equal = gpu_attention.run(workers, args.directory, args.out)
    else:
        print("not run, no time left: attention workers", file=sys.stderr)
    rate = h2d_rate(device)
    records = []
    for case in cases:
        if (left := end - time.monotonic()) < 20:
            print(f"not run, no time left: {case.case.name}", file=sys.stderr)
            break
        records.append(run_case(case, model, device, rate, left))
        harness.emit(records[-1], args.out)
    print(table(records))
    return int(not equal or any("error" in record["run"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
