"""CTranslate2: reads a Job, prints one JSON line. options["compute_type"]: dtype of its weights and products.

Its converter reads the checkpoint once, into a directory in job.scratch. Batches are formed of rows sorted by length.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Job, needs, report, report_loaded


def tokens_of(directory: Path) -> list[str]:
    """Return the text of each token, by its id."""
    vocabulary: dict[str, int] = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocabulary, key=lambda token: vocabulary[token])


def generated(generator: Any, job: Job) -> list[list[int]]:
    """Return the tokens of each row. A batch generates as many as its longest row."""
    texts = tokens_of(Path(job.model))
    order = sorted(range(len(job.requests)), key=lambda i: len(job.requests[i].prompt_token_ids))
    found: list[list[int]] = [[] for _ in job.requests]
    for first in range(0, len(order), job.batch):
        some = order[first : first + job.batch]
        prompts = [[texts[token] for token in job.requests[i].prompt_token_ids] for i in some]
        most = max(job.requests[i].max_tokens for i in some)
        results = generator.generate_batch(
            prompts, max_length=most, min_length=most, beam_size=1, sampling_topk=1, include_prompt_in_result=False,
            end_token=[],
        )  # fmt: skip
        for i, result in zip(some, results, strict=True):
            found[i] = list(result.sequences_ids[0][: job.requests[i].max_tokens])
    return found


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("ctranslate2", "ctranslate2")
    import ctranslate2

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
        kind = job.options.get("compute_type", "float32")
        converter = ctranslate2.converters.TransformersConverter(job.model)
        made = converter.convert(str(Path(folder) / "model"), quantization=kind)
        generator = ctranslate2.Generator(made, compute_type=kind)
    if job.warm:
        generated(generator, job.first())
    report_loaded()
    loaded = time.perf_counter()
    tokens = generated(generator, job)
    report(tokens, time.perf_counter() - loaded, loaded - start)


if __name__ == "__main__":
    main()
