"""llama.cpp (llama-cpp-python) with all sequences of a batch in one llama_decode: reads a Job, prints one JSON line.

options["gguf"]: the model's file. Prompts are packed without padding; a sequence that has all its tokens leaves the
batch; sampling is greedy.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.cases import Request
from bench.harness import Job, needs, report, report_loaded, skip

MICRO_BATCH = 512  # tokens of one llama_decode
Entry = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are needed


def chunks(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the entries of one call after the other."""
    for first in range(0, len(entries), MICRO_BATCH):
        yield entries[first : first + MICRO_BATCH]


class Decoder:
    """A context of llama.cpp for `sequences` sequences of `tokens` tokens together."""

    def __init__(self, path: str, sequences: int, tokens: int) -> None:
        import llama_cpp
        import numpy

        self.lib, self.numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = tokens, sequences
        context.n_batch = context.n_ubatch = MICRO_BATCH
        context.kv_unified = True
        context.n_threads = context.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(MICRO_BATCH, 0, 1)

    def step(self, entries: Sequence[Entry]) -> dict[int, int]:
        """Compute the entries. Return the likeliest next token of each sequence whose logits are requested."""
        found: dict[int, int] = {}
        for part in chunks(entries):
            self.batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wanted
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = sequence
            if self.lib.llama_decode(self.context, self.batch):
                raise SystemExit("llama_decode failed")
            for i, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    logits = self.lib.llama_get_logits_ith(self.context, i)
                    found[sequence] = int(self.numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax())
        return found

    def forget(self) -> None:
        """Empty the cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)


def generate_batch(decoder: Any, rows: Sequence[Request]) -> list[list[int]]:
    """Generate greedily, without stopping at end tokens: first the prompts, then one token of every live sequence per
    step."""
    decoder.forget()
    entries: list[Entry] = []
    for s, row in enumerate(rows):
        last = len(row.prompt_token_ids) - 1
        entries += [(token, i, s, i == last) for i, token in enumerate(row.prompt_token_ids)]
    tokens: list[list[int]] = [[] for _ in rows]
    while entries:
        for s, token in decoder.step(entries).items():
            tokens[s].append(token)
        entries = [(tokens[s][-1], len(row.prompt_token_ids) + len(tokens[s]) - 1, s, True)
                   for s, row in enumerate(rows) if len(tokens[s]) < row.max_tokens]  # fmt: skip
    return tokens


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    needs("llama-cpp-python", "llama_cpp")
    path = job.options.get("gguf")
    if not path:
        skip("llama.cpp needs the model as GGUF; the demo model and LLaMA shapes have one")
    start = time.perf_counter()
    blocks = [job.requests[i : i + job.batch] for i in range(0, len(job.requests), job.batch)]
    most = max(sum(len(r.prompt_token_ids) + r.max_tokens for r in block) for block in blocks)
    decoder = Decoder(path, min(job.batch, len(job.requests)), most)
    if job.warm:
        generate_batch(decoder, job.first().requests)
    report_loaded()
    loaded = time.perf_counter()
    tokens = [row for block in blocks for row in generate_batch(decoder, block)]
    report(tokens, time.perf_counter() - loaded, loaded - start)


if __name__ == "__main__":
    main()
