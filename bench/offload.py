"""A model bigger than the memory allowed, against accelerate's disk offload: cases c1 and c2 on the OPT-1.3B shape.

python -m bench.offload DIR [--cases c1 c2] [--runs 3] [--peer-runs 1] [--lossy exact weights=int4 ...]
    [--limit 2.0G | --no-limit] [--out offload.jsonl]

DIR is where the checkpoint is made (or reused). Both sides run under the same memory limit, each in its own cgroup and
with the checkpoint dropped from the page cache first. After each of our runs the bound is measured: see bench/bound.py.
The peer needs many minutes: --peer-runs, --peer-timeout and --sides ours say how much of that is wanted.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bench import harness, limit
from bench.bound import bounds, evict, question
from bench.cases import OFFLOAD, Case
from bench.harness import Job, Limits, Record
from bench.models import SHAPES, make, shard_files

OURS, PEER = "flexengine_side", "accelerate_offload"


@dataclass(frozen=True)
class Plan:
    """What is run: rounds of each side (0: not at all) and the limits of each."""

    our_rounds: int
    peer_rounds: int
    ours: Limits
    peer: Limits
    peer_dtype: str
    variants: tuple[Record, ...] = ({},)


def measure_bound(job: Job, case: Case, ours: Record) -> Record:
    """The bound in seconds of one of our runs, measured now, and our share of it."""
    asked = replace(question(job.model, case.lengths()), lossy=job.lossy)
    measured = harness.run_module("bench.bound", asked.to_json())
    if "error" in measured:
        return measured
    summary = ours["summary"]
    read, sweeps = summary["bytes"].get("disk_read", 0), max(1, summary["sweeps"])
    per_sweep = min(read / sweeps, measured["model_bytes"])  # what was read once, to stay, counts for nothing here
    best = bounds(per_sweep / max(measured["read_rate"].values()), measured["compute_seconds"])
    return {
        **measured,
        "compute_seconds": [measured["compute_seconds"][0], measured["compute_seconds"][-1]],
        "disk_bytes_per_sweep": per_sweep,
        "seconds": best,
        "share": {k: best[k] / ours["seconds"] for k in ("per_sweep", "overall")},
    }


Runs = tuple[list[Record], list[Record], list[Record]]  # ours, the peer's, bounds of ours


def run_case(case: Case, job: Job, plan: Plan) -> list[tuple[Job, Runs]]:
    """Alternating rounds of all variants of ours and the peer."""
    peer: list[Record] = []
    runs: list[tuple[Job, Runs]] = [(replace(job, lossy=switches), ([], peer, [])) for switches in plan.variants]
    files = shard_files(Path(job.model))
    peer_job = Job(job.model, job.requests, dtype=plan.peer_dtype, batch=case.rows, scratch=job.scratch)
    for i in range(max(plan.our_rounds, plan.peer_rounds)):
        for variant, (ours, _, found) in runs if i < plan.our_rounds else ():
            evict([*files, *harness.prepared_files()])
            ours.append(harness.run_side(OURS, variant, plan.ours))
            if "error" not in ours[-1]:
                found.append(measure_bound(variant, case, ours[-1]))
        if i < plan.peer_rounds:
            evict(files)
            peer.append(harness.run_side(PEER, peer_job, plan.peer))
    return runs


def ratios(ours: list[Record], peer: list[Record]) -> list[float]:
    """Our rate over the peer's, by round; rounds without a peer take the median of its other runs."""
    known = harness.stats(harness.good(peer))
    if known is None:
        return []
    pairs = [(run, peer[i] if i < len(peer) else None) for i, run in enumerate(ours)]
    return [
        run["tok_s"] / (other["tok_s"] if other and "error" not in other else known["median"])
        for run, other in pairs
        if "error" not in run
    ]


def record(case: Case, job: Job, plan: Plan, runs: Runs) -> Record:
    """The JSON line of a case and variant. ratio_at_least: where the peer was stopped while generating."""
    ours, peer, found = runs
    shares = [b["share"] for b in found if "error" not in b]
    ours_stats = harness.stats(harness.good(ours))
    stopped = max((r.get("seconds_at_least", 0.0) for r in peer), default=0.0)
    at_least = ours_stats["median"] * stopped / case.output_tokens if ours_stats and stopped else None
    return {
        **harness.header("offload", case, [*ours, *peer]),
        "model": Path(job.model).name,
        "lossy": harness.named(job.lossy or {}),
        "limit_bytes": plan.ours.memory,
        "peer_dtype": plan.peer_dtype,
        "tokens": [case.prompt_tokens, case.output_tokens],
        "ratio": harness.stats(ratios(ours, peer)),
        "ratio_at_least": at_least,
        "ours_tok_s": ours_stats,
        "peer_tok_s": harness.stats(harness.good(peer)),
        "share_of_bound_per_sweep": harness.stats([s["per_sweep"] for s in shares]),
        "share_of_bound_overall": harness.stats([s["overall"] for s in shares]),
        "rows_equal": harness.rows_equal(ours[-1], peer[-1]) if ours and peer else None,
        "bounds": found,
        "ours": [harness.brief(r) for r in ours],
        "peer": [harness.brief(r) for r in peer],
    }


def parse() -> argparse.Namespace:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the checkpoint is made or reused")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="opt-1.3b")
    parser.add_argument("--cases", nargs="+", choices=sorted(OFFLOAD), default=["c1", "c2"])
    parser.add_argument("--limit", default="2.0G", help="memory limit of each side (default 2.0G)")
    parser.add_argument("--no-limit", action="store_true", help="run both sides without a memory limit")
    parser.add_argument("--sides", choices=("both", "ours", "peer"), default="both")
    parser.add_argument("--peer-runs", type=int, help="rounds of the peer (default: --runs)")
    parser.add_argument("--peer-timeout", type=float, help="seconds after which the peer is stopped, its load included")
    parser.add_argument("--peer-dtype", choices=("float16", "float32"), default="float16")
    harness.common_arguments(parser)
    return parser.parse_args()


def limit_bytes(text: str) -> int:
    """Bytes of 2.0G, 800M or a plain number."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    return int(float(text[:-1]) * units[text[-1].upper()]) if text[-1].upper() in units else int(text)


def main() -> int:
    """The command of the module's docstring; 1 if a side failed, 0 also where the limit is not permitted."""
    args = parse()
    memory = None if args.no_limit else limit_bytes(args.limit)
    if memory is not None and (reason := limit.why_not()):
        print(f"SKIPPED: {reason}; --no-limit runs without a memory limit", file=sys.stderr)
        return 0
    model = make(SHAPES[args.shape], args.directory.resolve(), workers=2)
    peer_rounds = args.runs if args.peer_runs is None else args.peer_runs
    plan = Plan(
        our_rounds=0 if args.sides == "peer" else args.runs,
        peer_rounds=0 if args.sides == "ours" else peer_rounds,
        ours=Limits(memory),
        peer=Limits(memory, args.peer_timeout),
        peer_dtype=args.peer_dtype,
        variants=tuple(args.lossy),
    )
    failed = False
    for case in (OFFLOAD[name] for name in args.cases):
        print(f"case {case.name}: {case.rows} rows, {case.prompt_tokens} in, {case.output_tokens} out", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=model.parent, prefix="bench-") as scratch:
            job = Job(
                str(model), tuple(case.requests(harness.vocab_size(model))), device_mem=args.device_mem,
                policy=harness.load_policy(args.policy), scratch=scratch,
            )  # fmt: skip
            runs = run_case(case, job, plan)
        for variant, found in runs:
            harness.emit(record(case, variant, plan, found), args.out)
            failed |= any("error" in run and "seconds_at_least" not in run for run in (*found[0], *found[1]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
