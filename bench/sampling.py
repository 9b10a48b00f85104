"""What sampling costs: jobs with each option against greedy ones, and milliseconds per token of `sample` alone.

python -m bench.sampling jobs [--model demo|wide] [--runs 1] [--only TEXT ...] [--out FILE]
python -m bench.sampling steps [--words 49152 131072 262144] [--out FILE]

jobs: ROWS rows of PROMPT tokens with NEW new ones, int8 weights and products, on one engine; greedy jobs before,
between and after. demo: SmolLM2, 49,152 words, prompts from the shipped texts. wide: a random model with 262,144 words.
A ratio is the seconds of a job over the mean of the greedy jobs before and after it. steps: rows of random logits:
sharp ones (few likely tokens, as a trained model's), flat ones (top-p keeps half of the words), also rounded to bf16.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import emit, header
from bench.models import LlamaShape, demo_model, make

ROWS, PROMPT, NEW, SEED = 64, 128, 32, 1
WIDE = LlamaShape(layers=18, hidden=640, ffn=2048, heads=10, vocab=262_144, kv_heads=2)
HOT: dict[str, Any] = {"temperature": 0.8}
EDITS: dict[str, Any] = {"logit_bias": {11: 3.0, 12: -3.0}, "bad_words": [[17, 18], [19]], "min_tokens": 16}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.2}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": HOT,
    "top_k": HOT | {"top_k": 50},
    "top_p": HOT | {"top_p": 0.95},
    "min_p": HOT | {"min_p": 0.05},
    "repetition": HOT | {"repetition_penalty": 1.2},
    "penalties": HOT | PENALTIES,
    "edits": HOT | EDITS,
    "logprobs": {"logprobs": 5},
    "top_p and logprobs": HOT | {"top_p": 0.95, "logprobs": 5},
    "all": HOT
    | EDITS
    | PENALTIES
    | {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2, "logprobs": 5},
}
EVERY = 2  # jobs between two greedy ones


def prompts(engine: Any, demo: bool) -> list[list[int]]:
    """Return the prompts: pieces of a text, or random tokens."""
    import torch

    if not demo:
        noise = torch.Generator().manual_seed(SEED)
        return [torch.randint(3, WIDE.vocab, (PROMPT,), generator=noise).tolist() for _ in range(ROWS)]
    from flexengine.texts import text

    ids = engine.tokenizer(text("moby_dick"))["input_ids"]
    return [ids[row * PROMPT : (row + 1) * PROMPT] for row in range(ROWS)]


def jobs(model: str, runs: int, only: list[str], work: Path) -> dict[str, Any]:
    """Return seconds by option, and their ratios to greedy jobs."""
    from flexengine import Engine, Lossy, SamplingParams

    names = [name for name in OPTIONS if not only or any(text in name for text in only)]
    directory = demo_model() if model == "demo" else make(WIDE, work / "wide")
    seconds: dict[str, list[float]] = {name: [] for name in ("greedy", *names)}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    with Engine(str(directory), lossy=Lossy(weights="int8", compute="int8")) as engine:
        rows = [{"prompt_token_ids": ids} for ids in prompts(engine, model == "demo")]

        def run(name: str) -> float:
            params = SamplingParams(max_tokens=NEW, ignore_eos=True, seed=SEED, **OPTIONS.get(name, {}))
            began = time.perf_counter()
            results = engine.generate(rows, params)
            took = time.perf_counter() - began
            assert all(len(r.token_ids) == NEW for r in results)
            seconds[name].append(took)
            print(f"{name}: {took:.2f} s", file=sys.stderr, flush=True)
            return took

        engine.generate(rows, SamplingParams(max_tokens=4))  # reads the weights
        for _ in range(runs):
            before = run("greedy")
            for first in range(0, len(names), EVERY):
                found = {name: run(name) for name in names[first : first + EVERY]}
                after = run("greedy")
                for name, took in found.items():
                    ratios[name].append(2 * took / (before + after))
                before = after
    return {"model": model, "seconds": seconds, "ratios": {name: statistics.median(x) for name, x in ratios.items()}}


def logits_of(kind: str, words: int) -> Any:
    """Return random logits, fp32 [ROWS, words]."""
    import torch

    x = torch.randn(ROWS, words, generator=torch.Generator().manual_seed(SEED))
    if kind == "sharp":
        return torch.where(x > 3, x * 4, x * 2)
    return x.bfloat16().float() if kind == "flat bf16" else x


def steps(words: int) -> dict[str, Any]:
    """Return milliseconds per token of `sample`, by kind of logits and option."""
    from flexengine import SamplingParams
    from flexengine.model.sample import Draw, sample

    found: dict[str, dict[str, float]] = {}
    for kind in ("sharp", "flat", "flat bf16"):
        logits = logits_of(kind, words)
        for name, options in {"greedy": {}, **OPTIONS}.items():
            params = SamplingParams(max_tokens=NEW, seed=SEED, **options)
            draws = [Draw(params, row, 0, [*range(row, row + PROMPT)], [*range(NEW // 2)]) for row in range(ROWS)]
            times = list[float]()
            for _ in range(6):
                began = time.perf_counter()
                sample(logits, draws)
                times.append(time.perf_counter() - began)
            found.setdefault(kind, {})[name] = min(times) / ROWS * 1000
    return {"words": words, "rows": ROWS, "ms_per_token": found}


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description="what sampling costs")
    parser.add_argument("part", choices=("jobs", "steps"))
    parser.add_argument("--model", choices=("demo", "wide"), default="demo")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="options with one of these texts in their names")
    parser.add_argument("--words", nargs="+", type=int, default=[49_152, 131_072, 262_144])
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/flexengine-bench-sampling"), help="for the random model"
    )
    parser.add_argument("--out", help="append records to this file under bench/results/")
    args = parser.parse_args()
    if args.part == "jobs":
        records = iter([jobs(args.model, args.runs, args.only, args.work)])
    else:
        records = (steps(words) for words in args.words)
    for record in records:
        emit(header("sampling", {"name": args.part}, []) | record, args.out)


if __name__ == "__main__":
    main()
