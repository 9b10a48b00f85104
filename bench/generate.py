"""Resident generation against transformers' generate(): case a (uniform lengths) and case b (mixed lengths).

python -m bench.generate [--cases a b] [--runs 3] [--model DIR] [--out generate.jsonl]

Each side runs in its own process, alternating; both read the same fp32 weights. The peer first tries its batch sizes
once each and keeps the fastest. One JSON line per case: tokens/s of both sides and ratios per round (load excluded).
"""

import argparse
import subprocess
import sys
import tempfile
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


def run_case(case: Case, job: Job, rounds: int) -> Record:
    """Best batch of the peer, then alternating rounds; the record."""
    print(f"case {case.name}: {case.rows} rows, {case.prompt_tokens} in, {case.output_tokens} out", file=sys.stderr)
    peer_job, by_batch = harness.best_batch(PEER, job, case.peer_batches)
    ours, peer = [], []
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}", file=sys.stderr)
        ours.append(harness.run_side(OURS, job))
        peer.append(harness.run_side(PEER, peer_job))
    ratios = [a["tok_s"] / b["tok_s"] for a, b in zip(ours, peer, strict=True) if "error" not in a and "error" not in b]
    return {
        **harness.header("generate", case, [*ours, *peer]),
        "model": Path(job.model).name,
        "tokens": [case.prompt_tokens, case.output_tokens],
        "ratio": harness.stats(ratios),
        "ours_tok_s": harness.stats(harness.good(ours)),
        "peer_tok_s": harness.stats(harness.good(peer)),
        "peer_batch": peer_job.batch,
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
            record = run_case(case, job, args.runs)
        harness.emit(record, args.out)
        failed |= record["ratio"] is None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
