"""Resident generation against transformers' generate(): case a (uniform lengths) and case b (mixed lengths).

python -m bench.generate [--cases a b] [--runs 3] [--lossy exact compute=int8 ...] [--model DIR] [--out generate.jsonl]

Each side runs in its own process, alternating; both read the same fp32 weights. The peer first tries its batch sizes
once each and keeps the fastest. One JSON line per case: tokens/s of both sides and ratios per round (load excluded).
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import harness
from bench.cases import GENERATE, Case
from bench.harness import Job, Record

OURS, PEER = "flexengine_side", "transformers_generate"


def demo_model() -> Path:
    """The directory of the demo model, found in a process of its own (importing flexengine changes the environment)."""
    code = "from flexengine.model.source import resolve; print(resolve(None).directory)"
    argv = [sys.executable, "-c", code]
    found = subprocess.run(argv, cwd=harness.REPO, stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.splitlines()[-1])


def run_case(case: Case, job: Job, rounds: int, variants: Sequence[Record]) -> list[Record]:
    """Best batch of the peer, then alternating rounds of all variants and the peer; a record for each variant."""
    print(f"case {case.name}: {case.rows} rows, {case.prompt_tokens} in, {case.output_tokens} out", file=sys.stderr)
    peer_job, by_batch = harness.best_batch(PEER, job, case.peer_batches)
    runs: list[list[Record]] = [[] for _ in variants]
    peer: list[Record] = []
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr)
        for found, switches in zip(runs, variants, strict=True):
            found.append(harness.run_side(OURS, replace(job, lossy=switches)))
        peer.append(harness.run_side(PEER, peer_job))
    return [
        record(case, job, (switches, ours), (peer_job.batch, by_batch, peer))
        for switches, ours in zip(variants, runs, strict=True)
    ]


def record(
    case: Case, job: Job, run: tuple[Record, list[Record]], other: tuple[int, Record, list[Record]]
) -> Record:
    """The JSON line of one variant (its switches, its runs) against the peer (its batch, rates by batch, its runs)."""
    (switches, ours), (batch, by_batch, peer) = run, other
    ratios = [a["tok_s"] / b["tok_s"] for a, b in zip(ours, peer, strict=True) if "error" not in a and "error" not in b]
    return {
        **harness.header("generate", case, [*ours, *peer]),
        "model": Path(job.model).name,
        "lossy": harness.named(switches),
        "tokens": [case.prompt_tokens, case.output_tokens],
        "ratio": harness.stats(ratios),
        "ours_tok_s": harness.stats(harness.good(ours)),
        "peer_tok_s": harness.stats(harness.good(peer)),
        "peer_batch": batch,
        "peer_tok_s_by_batch": by_batch,
        "rows_equal": harness.rows_equal(ours[-1], peer[-1]),
        "ratios": ratios,
        "ours": [harness.brief(r) for r in ours],
        "peer": [harness.brief(r) for r in peer],
    }


def main() -> int:
    """The command of the module's docstring; 1 if a side failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(GENERATE), default=["a", "b"])
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the demo model)")
    parser.add_argument("--peer-batches", type=int, nargs="+", help="instead of the case's own list")
    harness.common_arguments(parser)
    args = parser.parse_args()
    model = (args.model or demo_model()).resolve()
    failed = False
    for name in args.cases:
        case = GENERATE[name]
        if args.peer_batches:
            case = replace(case, peer_batches=tuple(args.peer_batches))
        with tempfile.TemporaryDirectory() as scratch:
            job = Job(
                str(model), tuple(case.requests(harness.vocab_size(model))), dtype="float32",
                device_mem=args.device_mem, policy=harness.load_policy(args.policy), scratch=scratch,
            )  # fmt: skip
            found = run_case(case, job, args.runs, args.lossy)
        for line in found:
            harness.emit(line, args.out)
            failed |= line["ratio"] is None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
