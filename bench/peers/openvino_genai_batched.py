"""OpenVINO GenAI with continuous batching on a CPU: reads a Job, prints one JSON line.

options["gguf"]: the model's file; without it the checkpoint is converted (openvino_files.py). options["properties"]:
properties of the CPU plugin, which choose the dtype of products and of the cache. Without properties it keeps weights
of 4 bits, and rounds activations and the cache to 8.
"""

import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import Job, needs, report, report_loaded
from bench.peers.openvino_files import files_of

TOKENS = 2048  # most tokens of a step
GIB = 1 << 30


def pipeline(genai: Any, job: Job) -> Any:
    """Return a pipeline with room in its cache for all rows of a batch."""
    config = genai.SchedulerConfig()
    config.cache_size = 4  # GiB
    config.max_num_seqs, config.max_num_batched_tokens = job.batch, TOKENS
    config.enable_prefix_caching = False
    path = job.options.get("gguf") or str(files_of(Path(job.model), "Q4_1" if job.dtype == "Q4_1" else "float32"))
    return genai.ContinuousBatchingPipeline(path, config, "CPU", job.options.get("properties", {}))


def generated(pipe: Any, job: Job) -> list[list[int]]:
    """Return the tokens of each row."""
    import numpy
    import openvino
    import openvino_genai as genai

    prompts = [openvino.Tensor(numpy.array([row.prompt_token_ids], dtype=numpy.int64)) for row in job.requests]
    settings = [genai.GenerationConfig(max_new_tokens=row.max_tokens, ignore_eos=True, do_sample=False)
                for row in job.requests]  # fmt: skip
    return [list(result.m_generation_ids[0]) for result in pipe.generate(prompts, settings)]


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("openvino-genai", "openvino_genai")
    if not job.options.get("gguf"):
        needs("optimum-intel", "optimum.intel")
    import openvino_genai as genai

    start = time.perf_counter()
    pipe = pipeline(genai, job)
    if job.warm:
        generated(pipe, job.first())
    report_loaded()
    loaded = time.perf_counter()
    tokens = generated(pipe, job)
    report(tokens, time.perf_counter() - loaded, loaded - start)


if __name__ == "__main__":
    main()
