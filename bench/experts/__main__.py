"""Experts on demand: bytes of experts read, and seconds of a decode sweep, against loading whole layers.

python -m bench.experts [--folder DIR] [--shapes mixtral qwen3-moe] [--sequences 1 2 4 8] [--turns 3] [--out FILE]

Random weights with the number of experts, and of active ones, of Mixtral 8x7B (8, 2) and of Qwen3-30B-A3B (128, 8).
All weights are on disk. One JSON line per shape and number of sequences: both ways take turns, the tokens must be
equal, and each way's median counts. Decode sweeps load experts on demand although the engine's rule may be against it:
`by_rule` says what it would do. The prompts' sweep loads whole layers, and the first layer of the next sweep with them.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from bench import harness
from bench.harness import Record
from bench.models import MixtralShape, make

SHAPES = {
    "mixtral": MixtralShape(layers=6, hidden=1024, ffn=3584, heads=16, vocab=8192, kv_heads=4),
    "qwen3-moe": MixtralShape(layers=6, hidden=1024, ffn=384, heads=16, vocab=8192, kv_heads=4, experts=128, active=8),
}
PROMPT, NEW = 32, 12  # tokens of each sequence


@dataclass(frozen=True)
class Case:
    """shape: a name of SHAPES; sequences: in one gpu_batch."""

    shape: str
    sequences: int


def generate(model: Path, sequences: int, share: float) -> tuple[list[list[int]], Record]:
    """Return the tokens of a job and what its decode sweeps took. share: of experts, up to which they are loaded on
    demand."""
    from flexengine import Engine, Policy, SamplingParams
    from flexengine.plan import neurons

    policy = Policy(sequences, 1, weights=(0.0, 0.0, 1.0), schedule="zigzag", slots=2)
    rows = [{"prompt_token_ids": [(97 * i + 31 * s + 5) % 8000 + 3 for i in range(PROMPT)]} for s in range(sequences)]
    with patch.object(neurons, "MAX_CHOSEN_SHARE", share), Engine(model, policy=policy, device="cpu") as engine:
        results = engine.generate(rows, SamplingParams(NEW, ignore_eos=True))
        made = engine.summary
        found = {"disk_read": made.bytes["disk_read"], "decode_seconds": made.decode_seconds / (NEW - 1)}
        layers = engine.facts.layers
        found["all_experts"] = sum(t.stored_bytes for layer in layers for t in layer if t.experts)
        return [r.token_ids for r in results], found


def measure(model: Path, case: Case, turns: int) -> Record:
    """Return both ways' medians, and the bytes of experts that a decode sweep reads."""
    from flexengine.plan import neurons

    shape, runs, tokens = SHAPES[case.shape], dict[str, list[Record]](), []
    expected = float(neurons.experts_share(shape.active, shape.experts, case.sequences))
    for _ in range(turns):
        for way, share in {"whole": 0.0, "on demand": expected}.items():  # so sweeps of more tokens load whole layers
            answer, found = generate(model, case.sequences, share)
            tokens.append(answer)
            runs.setdefault(way, []).append(found)
    every = runs["whole"][0]["all_experts"]
    saved = median(r["disk_read"] for r in runs["whole"]) - median(r["disk_read"] for r in runs["on demand"])
    seconds = {way: median(r["decode_seconds"] for r in made) for way, made in runs.items()}
    return {
        "tokens_equal": all(answer == tokens[0] for answer in tokens),
        "expert_bytes": {"whole": every, "on demand": every - saved / (NEW - 1)},
        "read_share": 1 - saved / (NEW - 1) / every,
        "expected_share": expected, "by_rule": "on demand" if expected <= neurons.MAX_CHOSEN_SHARE else "whole",
        "decode_sweep_seconds": seconds, "speedup": seconds["whole"] / seconds["on demand"],
    }  # fmt: skip


def main() -> None:
    """Measure and print the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", metavar="DIR", help="where checkpoints are kept (default: a temporary directory)")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sequences", nargs="+", type=harness.at_least_one, default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.shapes:
            model = make(SHAPES[name], Path(args.folder or temporary) / name)
            for case in (Case(name, n) for n in args.sequences):
                line = measure(model, case, args.turns)
                harness.emit({**harness.header("experts", case, [{"versions": harness.versions()}]), **line}, args.out)


if __name__ == "__main__":
    main()
