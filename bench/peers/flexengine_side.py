"""flexengine: reads a Job on stdin, prints one JSON line. flexengine is imported first, as it sets the wait policy."""

import contextlib
import sys
import time
from typing import Any

from bench.harness import Job, Record, report


def cuda_peak() -> dict[str, Any]:
    """Return the most bytes that torch's allocator reserved, and the GPU's name."""
    import torch

    return {"cuda_peak_bytes": torch.cuda.max_memory_reserved(), "gpu": torch.cuda.get_device_name()}


def options_of(job: Job) -> dict[str, Any]:
    """Return the options of the engine that runs a job."""
    from flexengine import Lossy, Policy

    options: dict[str, Any] = {"device": job.device, "dtype": job.dtype, "offload_dir": job.scratch}
    options |= {"device_mem": job.device_mem, "policy": Policy(**job.policy) if job.policy else None}
    options |= {"lossy": Lossy(**job.lossy) if job.lossy else None}
    return {k: v for k, v in options.items() if v is not None}


def generated(engine: Any, job: Job) -> list[Any]:
    """Return the results of a job's rows, after as many tokens as each asks for."""
    from flexengine import SamplingParams

    rows = [{"prompt_token_ids": list(r.prompt_token_ids), "max_tokens": r.max_tokens} for r in job.requests]
    most = max(r.max_tokens for r in job.requests)
    results: list[Any] = engine.generate(rows, SamplingParams(max_tokens=most, ignore_eos=True))
    return results


def run(job: Job) -> Record:
    """Run a job, and return what `report` takes. Exit if a row failed."""
    start = time.perf_counter()
    from flexengine import Engine

    with contextlib.redirect_stdout(sys.stderr), Engine(job.model, **options_of(job)) as engine:
        engine.prepare()  # encodes weights, once per model
        if job.warm and (error := generated(engine, job.first())[0].error):
            raise SystemExit(f"the first row failed: {error}")
        loaded = time.perf_counter()
        results = generated(engine, job)
        seconds = time.perf_counter() - loaded
        summary = engine.summary.to_json()
    if errors := [r.error for r in results if r.error]:
        raise SystemExit(f"{len(errors)} rows failed; the first: {errors[0]}")
    return {"token_ids": [list(r.token_ids) for r in results], "seconds": seconds, "load_seconds": loaded - start,
            "summary": summary}  # fmt: skip


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    ran = run(job)
    report(**ran, **(cuda_peak() if job.device == "cuda" else {}))


if __name__ == "__main__":
    main()
