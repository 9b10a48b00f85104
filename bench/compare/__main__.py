"""flexengine against its peers on the frozen cases of bench/cases.py, under the same memory limit, in turns.

python -m bench.compare CASE... [--peers NAME...] [--runs 3] [--peer-runs N] [--lossy exact weights=int4 ...]
    [--peer-python NAME=PATH] [--limit 2.0G | --no-limit] [--dir DIR] [--out compare.jsonl]

Every side is a process of its own. If the case has a memory limit, the process has a cgroup of its own. The checkpoint
is dropped from the page cache first. Peers with batches try the case's batch sizes once and use the fastest; of cases
that would take them too long they compute one batch and its first tokens, and their rate follows. With each
run of flexengine the bound is measured (bench/compare/bound.py). A peer that cannot run is skipped; the reason is
printed and recorded. On a CPU without a memory limit, sides that keep weights in memory compute one token of the first
row before their time begins: all weights are read then, and flexengine has planned once. One JSON line per case and
choice of switches: tokens/s (loading excluded), ratios, rows whose tokens are equal.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import harness, limit
from bench.cases import COMPARISONS, Case, Comparison
from bench.compare import gguf_files
from bench.compare.bound import bounds, evict, question, read_rates
from bench.harness import Job, Limits, Record
from bench.models import SHAPES, LlamaShape, demo_model, make, shard_files
from bench.peers import CLASSES, PEERS, own_class

OURS = "flexengine_side"


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Attributes:
        our_rounds: rounds of flexengine; 0 skips it.
        peer_rounds: rounds of each peer.
        ours: limits of flexengine's processes.
        peer: limits of the peers' processes.
        variants: lossy switches of flexengine, one record per variant.
        pythons: interpreters of the peers that are not installed beside flexengine, by name.
    """

    our_rounds: int
    peer_rounds: int
    ours: Limits
    peer: Limits
    variants: tuple[Record, ...] = ({},)
    pythons: dict[str, str] = field(default_factory=dict)


@dataclass
class Peered:
    """The runs of a peer.

    Attributes:
        versions: versions of its packages.
        by_batch: tokens/s of each batch size that was tried.
        runs: records of its runs.
        skipped: why the peer does not run; None if it runs.
        part: the case, if the peer computes one batch and few tokens of it (`harness.whole_case`).
    """

    name: str
    job: Job
    part: Case | None = None
    versions: Record = field(default_factory=dict)
    by_batch: dict[str, float] = field(default_factory=dict)
    runs: list[Record] = field(default_factory=list)
    skipped: str | None = None

    def run(self, plan: Plan, job: Job | None = None) -> Record:
        """Run the peer once, and return the record."""
        module, python = PEERS[self.name].module, plan.pythons.get(self.name, sys.executable)
        job = job or self.job
        if self.part:
            part = replace(job, requests=job.requests[: job.batch])
            found = harness.whole_case(harness.run_side(module, part, plan.peer, python), self.part, job.batch)
        else:
            found = harness.run_side(module, job, plan.peer, python)
        self.skipped = found.get("skipped")
        return found

    def choose(self, plan: Plan, batches: Sequence[int]) -> None:
        """Try the batch sizes and use the fastest one."""
        for batch in batches if len(batches) > 1 else ():
            found = self.run(plan, replace(self.job, batch=batch))
            if self.skipped:
                return
            self.by_batch[str(batch)] = found.get("tok_s", 0.0)
        best = max(self.by_batch, key=lambda b: self.by_batch[b]) if self.by_batch else batches[0]
        self.job = replace(self.job, batch=int(best))


@dataclass
class Ours:
    """The runs of flexengine with some switches, and the bound of each run."""

    job: Job
    runs: list[Record] = field(default_factory=list)
    bounds: list[Record] = field(default_factory=list)


def measure_bound(job: Job, case: Case, ours: Record, reads: Sequence[Mapping[str, float]]) -> Record:
    """Measure the bound of a run. Return its seconds and the run's share of it.

    Args:
        reads: `read_rates` before and after the run.
    """
    asked = replace(question(job.model, case.lengths()), lossy=job.lossy, device=job.device)
    measured = harness.run_module("bench.compare.bound", asked.to_json())
    if "error" in measured:
        return measured
    summary, sweeps = ours["summary"], len(measured["compute_seconds"])

    def per_sweep(lane: str) -> float:  # without bytes that are moved once and stay
        moved, most, times = summary["bytes"].get(lane, 0), measured["model_bytes"], max(1, summary["sweeps"])
        return float(min(moved / times, most))

    read, link = per_sweep("disk_read"), measured["rates"]["link"]
    read_rate = max(statistics.fmean(rates[way] for rates in reads) for way in reads[0])
    by_sweep = {"disk": [read / read_rate] * sweeps, "memory": measured["memory_seconds"]}
    by_sweep |= {"link": [per_sweep("h2d") / link if link else 0.0] * sweeps, "compute": measured["compute_seconds"]}
    best = bounds(by_sweep)
    return {
        **measured,
        **{name: [measured[name][0], measured[name][-1]] for name in ("compute_seconds", "memory_seconds")},
        "read_rates": reads,
        "disk_bytes_per_sweep": read,
        "seconds": best,
        "slowest": max(by_sweep, key=lambda name: best[name]),
        "share": {"share": best["per_sweep"] / ours["seconds"], "overall": best["overall"] / ours["seconds"]},
    }


def run_case(case: Case, job: Job, peers: Sequence[Peered], plan: Plan, batches: Sequence[int]) -> list[Ours]:
    """Choose the peers' batch sizes, then run all variants of flexengine and the peers in alternating rounds."""
    ours = [Ours(replace(job, lossy=switches)) for switches in plan.variants]
    files = shard_files(Path(job.model))
    for peer in peers if plan.peer_rounds else ():
        peer.choose(plan, batches or (case.rows,))
    for i in range(max(plan.our_rounds, plan.peer_rounds)):
        print(f"round {i + 1}", file=sys.stderr)
        for variant in ours if i < plan.our_rounds else ():
            reads = [read_rates(files)]
            evict([*files, *harness.prepared_files()])
            variant.runs.append(harness.run_side(OURS, variant.job, plan.ours))
            if "error" not in variant.runs[-1]:
                reads.append(read_rates(files))
                variant.bounds.append(measure_bound(variant.job, case, variant.runs[-1], reads))
        for peer in peers if i < plan.peer_rounds else ():
            if not peer.skipped:
                evict(files)
                found = peer.run(plan)
                peer.runs += [] if peer.skipped else [found]
    return ours


def ratios(ours: list[Record], peer: list[Record]) -> list[float]:
    """Return flexengine's rate over the peer's, by round. A round without a run of the peer uses the median of its
    other runs."""
    known = harness.stats(harness.good(peer))
    if known is None:
        return []
    pairs = [(run, peer[i] if i < len(peer) else None) for i, run in enumerate(ours)]
    return [
        run["tok_s"] / (other["tok_s"] if other and "error" not in other else known["median"])
        for run, other in pairs
        if "error" not in run
    ]


def peer_record(case: Case, ours: list[Record], peer: Peered) -> Record:
    """Return the record of a peer. ratio_at_least: the ratio if the peer was stopped while generating. error: why there
    is no ratio."""
    rates = harness.stats(harness.good(ours))
    stopped = max((r.get("seconds_at_least", 0.0) for r in peer.runs), default=0.0)
    versions = dict(peer.versions)
    for run in peer.runs:
        versions |= run.get("versions", {})
    return {
        "tok_s": harness.stats(harness.good(peer.runs)),
        "ratio": harness.stats(ratios(ours, peer.runs)),
        "ratio_at_least": rates["median"] * stopped / case.output_tokens if rates and stopped else None,
        "rows_equal": harness.rows_equal(ours[-1], peer.runs[-1]) if ours and peer.runs else None,
        "batch": peer.job.batch,
        "tok_s_by_batch": peer.by_batch,
        "dtype": peer.job.dtype,
        "class": CLASSES[peer.job.dtype or "float32"],
        "error": next((run["error"] for run in peer.runs if "error" in run), None),
        "versions": versions,
        "runs": [harness.brief(r) for r in peer.runs],
    }


def record(case: Case, compared: Comparison, plan: Plan, ours: Ours, peers: Sequence[Peered]) -> Record:
    """Return the JSON record of a case and variant."""
    found = [b for b in ours.bounds if "error" not in b]
    shares = {k: harness.stats([b["share"][k] for b in found]) for k in ("share", "overall")}
    return {
        **harness.header("compare", case, ours.runs),
        "model": compared.model,
        "device": compared.device,
        "lossy": harness.named(ours.job.lossy or {}),
        "class": own_class(ours.job.lossy or {}),
        "limit_bytes": plan.ours.memory,
        "warm": ours.job.warm,
        "tokens": [case.prompt_tokens, case.output_tokens],
        "ours_tok_s": harness.stats(harness.good(ours.runs)),
        "bound": {**shares, "runs": ours.bounds} if found else None,
        "ours": [harness.brief(r) for r in ours.runs],
        "peers": {peer.name: peer_record(case, ours.runs, peer) for peer in peers if peer.runs},
        "skipped": {peer.name: peer.skipped for peer in peers if peer.skipped},
    }


def interpreter(text: str) -> tuple[str, str]:
    """Return name and path of NAME=PATH. Raise ArgumentTypeError if the peer or the file does not exist."""
    name, _, path = text.partition("=")
    if name not in PEERS or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text}: NAME=PATH with one of {', '.join(PEERS)} and its python")
    return name, path


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=sorted(COMPARISONS), metavar="CASE", help=", ".join(COMPARISONS))
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), help="instead of the case's own")
    parser.add_argument(
        "--peer-python",
        action="append",
        type=interpreter,
        default=[],
        metavar="NAME=PATH",
        help="interpreter that has this peer installed (default: ours)",
    )
    parser.add_argument("--peer-batches", type=harness.at_least_one, nargs="+", help="instead of the case's own")
    parser.add_argument("--peer-runs", type=harness.at_least_one, help="rounds of the peers (default: --runs)")
    parser.add_argument("--peer-timeout", type=float, help="seconds after which a peer is stopped, its load included")
    parser.add_argument(
        "--peer-dtype",
        choices=("float16", "bfloat16", "float32"),
        help="instead of the case's own, of peers that leave the choice",
    )
    parser.add_argument("--model", type=directory, help="checkpoint directory (default: the case's, made where needed)")
    parser.add_argument("--dir", type=Path, help="where checkpoints are made or reused (default: the engine's cache)")
    parser.add_argument(
        "--limit",
        type=limit_bytes,
        metavar="BYTES",
        help="memory limit of each side, e.g. 2.0G (default: the case's own)",
    )
    parser.add_argument("--no-limit", action="store_true", help="run all sides without a memory limit")
    harness.common_arguments(parser)
    return parser.parse_args(words)


def limit_bytes(text: str) -> int:
    """Return the bytes of 2.0G, 800M or a plain number."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    size = int(float(text[:-1]) * units[text[-1].upper()]) if text[-1:].upper() in units else int(text)
    if size <= 0:
        raise ValueError(text)
    return size


def directory(text: str) -> Path:
    """Return the path of an existing directory."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return Path(text)


def checkpoint(compared: Comparison, args: argparse.Namespace) -> Path:
    """Return the directory of the case's model. Make the model if it is a shape of bench.models."""
    if args.model or compared.model == "demo":
        return Path(args.model or demo_model()).resolve()
    return make(SHAPES[compared.model], (args.dir or harness.cache() / "bench").resolve() / compared.model, workers=2)


def peer_job(name: str, job: Job, compared: Comparison, args: argparse.Namespace) -> Job:
    """Return the Job of a peer."""
    peer, demo = PEERS[name], compared.model == "demo"
    options = dict(peer.options)
    if peer.gguf and not args.model:
        if demo:
            wide = peer.gguf == "f32"
            options["gguf"] = str(gguf_files.widened(harness.cache() / "bench") if wide else gguf_files.demo())
        elif peer.gguf == "own" and isinstance(SHAPES[compared.model], LlamaShape):
            options["gguf"] = str(gguf_files.of_llama(Path(job.model)))
    dtype = peer.dtype or args.peer_dtype or compared.dtype
    if peer.gguf in ("own", "f32") and not demo:
        dtype = SHAPES[compared.model].dtype  # the file's dtype, for any requested dtype
    requests = job.requests
    if compared.peer_tokens:
        requests = tuple(replace(each, max_tokens=min(each.max_tokens, compared.peer_tokens)) for each in requests)
    return replace(job, dtype=dtype, options=options, policy=None, lossy=None, requests=requests)


def compare(compared: Comparison, args: argparse.Namespace) -> list[Record]:
    """Return the records of a case."""
    case = compared.case
    memory = None if args.no_limit else args.limit or compared.memory
    if memory is not None and (reason := limit.why_not()):
        print(f"SKIPPED: {case.name}: {reason}; --no-limit runs without a memory limit", file=sys.stderr)
        return []
    print(f"case {case.name}: {case.rows} rows, {case.prompt_tokens} in, {case.output_tokens} out", file=sys.stderr)
    model = checkpoint(compared, args)
    names = compared.peers if args.peers is None else args.peers
    peer_rounds = args.runs if args.peer_runs is None else args.peer_runs
    plan = Plan(args.runs, peer_rounds, Limits(memory), Limits(memory, args.peer_timeout), tuple(args.lossy),
                dict(args.peer_python))  # fmt: skip
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="bench-") as scratch:
        job = Job(
            str(model), tuple(case.requests(harness.vocab_size(model))), device=compared.device, scratch=scratch,
            device_mem=args.device_mem or compared.device_mem, policy=harness.load_policy(args.policy),
            warm=memory is None and compared.device == "cpu",
        )  # fmt: skip
        part = case if compared.peer_tokens else None
        peers = [Peered(name, peer_job(name, job, compared, args), part,
                        harness.installed(plan.pythons.get(name, sys.executable))) for name in names]  # fmt: skip
        ours = run_case(case, job, peers, plan, args.peer_batches or case.peer_batches)
        return [record(case, compared, plan, variant, peers) for variant in ours]


def bad(line: Record) -> bool:
    """Return whether a side failed. A side that was skipped or stopped by its time limit has not failed."""
    runs = [*line["ours"], *(run for peer in line["peers"].values() for run in peer["runs"])]
    return any("error" in run and "seconds_at_least" not in run for run in runs)


def why_not(compared: Comparison) -> str | None:
    """Return why a case cannot run on this machine, or None."""
    if compared.device == "cuda":
        code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        if subprocess.run([sys.executable, "-c", code], check=False).returncode:
            return "there is no CUDA GPU"
    return None


def given(words: Sequence[str]) -> str:
    """Return the command without the options of a single machine, such as interpreters and directories."""
    kept, rest = ["python", "-m", "bench.compare"], list(words)
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0] in ("--peer-python", "--out", "--dir", "--model"):
            if "=" not in word:
                rest.pop(0)
        else:
            kept.append(word)
    return shlex.join(kept)


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a side failed; a case that cannot run here is no
    failure."""
    args, failed = parse(), False
    for compared in (COMPARISONS[name] for name in args.cases):
        if reason := why_not(compared):
            print(f"SKIPPED: {compared.case.name}: {reason}", file=sys.stderr)
            continue
        for line in compare(compared, args):
            harness.emit({**line, "command": given(sys.argv[1:])}, args.out)
            failed |= bad(line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
