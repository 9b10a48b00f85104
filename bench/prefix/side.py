"""One job, run in a process of its own: reads it as JSON from stdin, and prints what it took as JSON.

This file imports nothing of bench, so that it also runs beside an older version of flexengine.
"""

import hashlib
import json
import random
import sys
import time
from typing import Any

VOCABULARY = (100, 40000)  # token ids to draw from, of the demo model


def ids(rng: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(*VOCABULARY) for _ in range(count)]


def generate(job: dict[str, Any], engine: Any) -> tuple[Any, float]:
    """Return the tokens of rows with a common prefix, and seconds."""
    from flexengine import SamplingParams

    rng = random.Random(1)
    common = ids(rng, job["common"])
    rows = [{"prompt_token_ids": common + ids(rng, job["own"])} for _ in range(job["rows"])]
    began = time.perf_counter()
    results = engine.generate(rows, SamplingParams(job["new"], ignore_eos=True))
    return [result.token_ids for result in results], time.perf_counter() - began


def score(job: dict[str, Any], engine: Any) -> tuple[Any, float]:
    """Return the sums of log probabilities, rounded, of several continuations for each context, and seconds."""
    rng = random.Random(2)
    contexts = [ids(rng, job["common"]) for _ in range(job["rows"])]
    pairs = [(context, ids(rng, job["new"])) for context in contexts for _ in range(job["choices"])]
    began = time.perf_counter()
    results = engine.score(*map(list, zip(*pairs, strict=True)))
    return [round(result.cumulative_logprob, 3) for result in results], time.perf_counter() - began


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    from flexengine import Engine, SamplingParams

    options = {"device_mem": job["device_mem"], "progress": False, **job["options"]}
    with Engine(job["model"], **options) as engine:
        engine.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(2, ignore_eos=True))  # reads the weights
        answer, seconds = (score if job["kind"] == "score" else generate)(job, engine)
        summary = engine.summary.to_json()
    json.dump({
        "answer": answer, "digest": hashlib.sha256(json.dumps(answer).encode()).hexdigest(), "seconds": seconds,
        **{name: summary.get(name)
           for name in ("computed_prompt_tokens", "prefill_seconds", "decode_seconds", "sweeps")},
        "predicted_seconds": summary["plan"]["predicted_seconds"], "sweep_seconds": summary["total_seconds"],
        "policy": summary["policy"],
    }, sys.stdout)  # fmt: skip


if __name__ == "__main__":
    main()
