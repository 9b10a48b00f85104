"""transformers' generate() on padded batches in input order: reads a Job on stdin, prints one JSON line.

Every batch generates as many tokens as its longest row requests; only the requested tokens of each row count as useful.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.cases import Request
from bench.harness import Job, needs, report, report_loaded


class Steps:
    """A streamer of `generate`: seconds until the first token of a batch, and of each token after it."""

    def __init__(self) -> None:
        self.seconds, self.before = list[float](), 0.0

    def put(self, value: Any) -> None:
        """The prompts come first, then the tokens of each step."""
        now = time.perf_counter()
        self.seconds += [now - self.before] if self.before else []
        self.before = now

    def end(self) -> None:
        self.before = 0.0


def generate_batch(
    model: Any, rows: Sequence[Request], pad: int, device: str | None = None, steps: Steps | None = None
) -> list[list[int]]:
    """Generate greedily from left-padded prompts, ignoring EOS. Return the token ids of each row, cut to its requested
    number."""
    import torch

    width, most = max(len(r.prompt_token_ids) for r in rows), max(r.max_tokens for r in rows)
    ids = torch.full((len(rows), width), pad, device=device)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        ids[b, width - len(row.prompt_token_ids) :] = torch.tensor(row.prompt_token_ids, device=ids.device)
        mask[b, width - len(row.prompt_token_ids) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=pad,
            streamer=steps,
        )
    return [out[b, width : width + row.max_tokens].tolist() for b, row in enumerate(rows)]


def run(job: Job, **load_options: Any) -> None:
    """Load, generate and report. The offloading peer calls this function, too."""
    needs("transformers", "transformers", job.device)
    start = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, job.dtype or "float32")
    device = "cuda" if job.device == "cuda" else None
    if device:
        load_options = {"device_map": "cuda"} | load_options
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, **load_options).eval()
    model.generation_config.eos_token_id = None
    if job.warm:
        generate_batch(model, job.first().requests, 0, device)
    report_loaded()
    loaded = time.perf_counter()
    tokens, steps = list[list[int]](), Steps()
    for first in range(0, len(job.requests), job.batch):
        tokens += generate_batch(model, job.requests[first : first + job.batch], 0, device, steps)
    seconds = time.perf_counter() - loaded
    report(tokens, seconds, loaded - start, threads=torch.get_num_threads(), steps=steps.seconds)


if __name__ == "__main__":
    run(Job.from_json(sys.stdin.read()))
