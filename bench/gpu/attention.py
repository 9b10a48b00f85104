"""Attention workers on GPUs beside KV cache on the engine's own: tokens, rates and links. Run by bench.gpu, or alone:

python -m bench.gpu.attention DIR [--out FILE] [--smoke]     (DIR: where the model is made or reused)

Every job is a process of its own (bench.workers.side). The workers listen at addresses of the loopback interface, or
are started by the engine (shared memory); each has a GPU that the engine does not use, if there are several. Kernels
and blocks are the same, so tokens must be equal. --smoke: a toy model on simulated devices.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record
from bench.models import SHAPES, make
from bench.workers.grid import serve

SECONDS = 240.0  # of a job at most


@dataclass(frozen=True)
class AttentionCase:
    """Rows with long contexts, whose KV cache is on the engine's device, or on workers.

    Attributes:
        device: of the engine and of the workers; sim for both without a GPU.
        prompt, tokens: of each row.
        block: gpu_batch_size and num_gpu_batches.
        memory: --worker-mem.
    """

    shape: str = "opt-1.3b"
    device: str = "cuda"
    prompt: int = 1024
    tokens: int = 48
    block: tuple[int, int] = (16, 4)
    memory: str = "16G"
    dtype: str = "bfloat16"


SMOKE = AttentionCase("opt-tiny", "sim", 40, 8, (2, 2), "16M", "float32")


def devices_of(case: AttentionCase) -> list[str]:
    """Return the devices of workers: GPUs from the second on; the engine's, if there is no other."""
    if case.device == "sim":
        return ["sim", "sim"]
    from flexengine.tier.cuda import visible_gpus

    return [f"cuda:{number}" for number in range(1, visible_gpus())][:4] or ["cuda:0"]


def jobs_of(case: AttentionCase, model: Path, devices: list[str], addresses: list[str]) -> dict[str, Record]:
    """Return the jobs by their names."""
    vocabulary, (size, batches) = harness.vocab_size(model), case.block
    rows = [[(7 * row + 13 * at) % (vocabulary - 5) + 5 for at in range(case.prompt)] for row in range(size * batches)]
    common: Record = {"model": str(model), "device": case.device, "rows": rows, "tokens": case.tokens,
                      "dtype": case.dtype}  # fmt: skip
    policy: Record = {"gpu_batch_size": size, "num_gpu_batches": batches, "weights": [1, 0, 0]}
    on_workers = {**policy, "cache": {"workers": 1}}
    return {
        "KV on the device": {**common, "policy": {**policy, "cache": [1, 0, 0]}},
        "workers at addresses": {**common, "policy": on_workers, "workers": addresses},
        "workers of the engine": {**common, "policy": on_workers, "workers": devices, "worker_mem": case.memory},
    }


def side(job: Record) -> Record:
    """Return what a job measures in a process of its own, or its error."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        words = [sys.executable, "-m", "bench.workers.side", file.name]
        try:
            out = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": f"it took over {SECONDS:g} s"}
    if out.returncode:
        return {"error": out.stderr.strip()[-500:]}
    found: Record = json.loads(out.stdout.splitlines()[-1])
    return found


def run(case: AttentionCase, directory: Path, out: str | None) -> bool:
    """Run all jobs, print a line for each, and append a record of each to a file. Return whether tokens are equal."""
    model = make(SHAPES[case.shape], directory.resolve() / case.shape)
    devices, expected, right = devices_of(case), None, True
    with ExitStack() as stack:
        addresses = [serve(1, stack, case.memory, device)[0] for device in devices]
        for name, job in jobs_of(case, model, devices, addresses).items():
            made: Record = side(job)
            tokens = made.pop("tokens", None)
            expected = expected or tokens
            made |= {"name": name, "devices": devices, "tokens_equal": tokens is not None and tokens == expected}
            right = right and made["tokens_equal"]
            harness.emit({**harness.header("gpu attention", case, []), "run": made}, out)
            print(line_of(made), file=sys.stderr, flush=True)
    return right


def line_of(made: Record) -> str:
    """Return a record as a line."""
    if "error" in made:
        return f"{made['name']:24} {made['error']}"
    rates: dict[str, Any] = made["rates"]
    told = "; ".join(
        f"{worker}: attention {rates['worker_attention'][worker] / 1e9:.1f} GB/s, link {link / 1e9:.2f} GB/s"
        for worker, link in rates["worker_links"].items()
    )
    equal = "tokens equal" if made["tokens_equal"] else "TOKENS DIFFER"
    asking = f", a question {1e3 * rates['worker_seconds']:.2f} ms" if told else ""
    return f"{made['name']:24} {made['decode_tok_s']:8.1f} tok/s in decode sweeps, {equal}{asking}; {told}".rstrip("; ")


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a job failed, or tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", help="append records to this file")
    parser.add_argument("--smoke", action="store_true", help="a toy model on simulated devices")
    args = parser.parse_args()
    return int(not run(SMOKE if args.smoke else AttentionCase(), args.directory, args.out))


if __name__ == "__main__":
    sys.exit(main())
