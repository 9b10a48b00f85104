"""DeepSpeed ZeRO-Inference (stage 3, weights in host RAM) on one CUDA GPU: reads a Job, prints one JSON line."""

import contextlib
import os
import sys
import time

from bench.harness import Job, needs, report, report_loaded
from bench.peers.transformers_generate import generate_batch


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("deepspeed", "deepspeed", "cuda")
    start = time.perf_counter()
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    os.environ.update(single)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        settings = {
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
            "train_micro_batch_size_per_gpu": 1,
        }
        kept = HfDeepSpeedConfig(settings)  # while this object exists, from_pretrained loads in pieces
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float16).eval()
        model.generation_config.eos_token_id = None
        engine = deepspeed.initialize(model=model, config=settings)[0]
        engine.module.eval()
        with contextlib.redirect_stdout(sys.__stdout__):
            report_loaded()
        loaded, tokens = time.perf_counter(), []
        for first in range(0, len(job.requests), job.batch):
            tokens += generate_batch(engine.module, job.requests[first : first + job.batch], pad=0, device="cuda")
        seconds = time.perf_counter() - loaded
        del kept
    report(tokens, seconds, loaded - start)


if __name__ == "__main__":
    main()
