"""Resident memory of jobs with long prompts, against what --device-mem gave them.

python -m bench.residence [--cases NAME ...] [--out residence.jsonl]

Every case is a model with random weights and a few prompts of 2k to 8k tokens, which are computed in pieces. It runs
twice, in a process of its own each time: with the least accepted memory, and with a quarter more. Growth is the most
resident memory during the job less that before it, when everything is imported and the kernels are loaded. It may
exceed what was given (on `sim`: to the device, and what the host's ledger booked) by a tenth.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record
from bench.models import LlamaShape, Shapes, make

MIB = 1 << 20
ALLOWED = 1.10  # growth per byte given
MORE = 1.25  # times the least accepted memory
NEW = 4  # tokens generated
STEP = MIB // 4  # to which the least accepted memory is found
SECONDS = 600.0


@dataclass(frozen=True)
class HeadShape(LlamaShape):
    """A LLaMA decoder whose heads have a width of their own."""

    dim: int = 128

    def layer_shapes(self, j: int) -> Shapes:
        p, h = f"model.layers.{j}.self_attn.", self.hidden
        own = {"q_proj": (self.heads * self.dim, h), "k_proj": (self.kv_heads * self.dim, h),
               "v_proj": (self.kv_heads * self.dim, h), "o_proj": (h, self.heads * self.dim)}  # fmt: skip
        return super().layer_shapes(j) | {f"{p}{name}.weight": size for name, size in own.items()}

    def config(self) -> dict[str, object]:
        return super().config() | {"head_dim": self.dim}


@dataclass(frozen=True)
class Case:
    """A job. heads: query heads, key/value heads, width of a head; prompts: their tokens; cache, weights: as the
    switches of these names."""

    heads: tuple[int, int, int]
    prompts: tuple[int, ...]
    layers: int = 2
    cache: str | None = None
    weights: str | None = None
    device: str = "cpu"
    hidden: int = 1024
    ffn: int = 2816
    vocab: int = 8192

    @property
    def name(self) -> str:
        """A short one that tells cases apart."""
        heads, prompts = "x".join(map(str, self.heads)), "+".join(map(str, self.prompts))
        return f"{heads}-l{self.layers}-p{prompts}-{self.cache or 'plain'}-{self.weights or 'plain'}-{self.device}"

    @property
    def shape(self) -> HeadShape:
        """Of the model."""
        heads, kv_heads, dim = self.heads
        return HeadShape(self.layers, self.hidden, self.ffn, heads, self.vocab, 8192 + 64, kv_heads=kv_heads, dim=dim)

    def rows(self) -> list[Record]:
        """The job's prompts."""
        draw = random.Random(0)
        return [{"prompt_token_ids": [draw.randrange(3, self.vocab) for _ in range(n)]} for n in self.prompts]


CASES = (
    Case((32, 32, 128), (4095,)),
    Case((32, 32, 128), (4095,), layers=3, hidden=2048, ffn=5632),
    Case((32, 32, 128), (4095,), cache="bf16"),
    Case((32, 32, 128), (6000,), cache="int8"),
    Case((32, 32, 128), (4095,), cache="int4", weights="int4"),
    Case((32, 32, 128), (4095, 2100), device="sim"),
    Case((32, 32, 64), (8000,), layers=3),
    Case((32, 32, 64), (4095, 2500), cache="int4"),
    Case((32, 8, 128), (8000,)),
    Case((32, 8, 128), (8000,), cache="int8", weights="int4"),
    Case((32, 8, 128), (4095, 3000, 2100), layers=3, device="sim"),
    Case((32, 4, 128), (8000,), cache="bf16"),
    Case((32, 4, 64), (8000, 8000), layers=3, weights="int4"),
    Case((16, 2, 128), (8000,)),
    Case((16, 2, 256), (6000,), cache="int8", device="sim"),
    Case((16, 16, 64), (8000,), cache="int4", device="sim"),
    Case((8, 8, 64), (8000, 4000), layers=3),
    Case((8, 8, 128), (8000,), weights="int4"),
    Case((8, 8, 256), (6000,)),
    Case((8, 8, 256), (4095,), cache="bf16", weights="int4", device="sim"),
)


def engine(case: Case, model: Path, work: Path, given: int) -> Any:
    """An engine with that many bytes of device memory."""
    from flexengine import Engine
    from flexengine.lossy import Lossy

    lossy = Lossy(weights=case.weights, cache=case.cache)
    return Engine(model, device=case.device, device_mem=given, offload_dir=work / "offload", lossy=lossy)


def least(case: Case, model: Path, work: Path) -> Record:
    """The least bytes of device memory with which the engine accepts the job."""
    from flexengine.config import SamplingParams
    from flexengine.errors import OutOfMemory

    with engine(case, model, work, 64 * MIB) as asked:
        workload = asked.reader.survey(case.rows(), SamplingParams(max_tokens=NEW, ignore_eos=True))
        low, high = STEP, 8192 * MIB
        while high - low > STEP:
            middle = (low + high) // 2 // STEP * STEP
            asked.machine.capacity = replace(asked.machine.capacity, device=middle)
            try:
                asked.check(workload)
                high = middle
            except OutOfMemory:
                low = middle
        return {"least": high}


def grown(case: Case, model: Path, work: Path, given: int) -> Record:
    """How much this process grows while it does the job."""
    from flexengine import engine as _  # noqa: F401  # imports what a job needs
    from flexengine import kernels
    from flexengine.config import SamplingParams

    kernels.load()
    before = harness.rss()
    harness.restart_peak()
    with engine(case, model, work, given) as ours:
        results = ours.generate(case.rows(), SamplingParams(max_tokens=NEW, ignore_eos=True))
        growth, summary = harness.peak_rss() - before, ours.summary
        layout = ours.layout
    booked = summary["peak_bytes"]
    memory = given + (booked.get("host", 0) if case.device == "sim" else 0)
    return {"given": given, "memory": memory, "growth": growth, "over": growth / memory - 1, "before": before,
            "booked": booked, "policy": summary["policy"], "account": layout.account["device"],
            "errors": [r.error for r in results if r.error]}  # fmt: skip


def child(case: Case, model: Path, work: Path, given: int) -> Record:
    """What `grown` (or, with given 0, `least`) finds in a process of its own."""
    job = json.dumps({"case": asdict(case), "model": str(model), "work": str(work), "given": given})
    command = [sys.executable, "-m", "bench.residence", "--child"]
    ended = subprocess.run(command, input=job, text=True, capture_output=True, timeout=SECONDS, check=False)
    found = harness.last_json(ended.stdout)
    return found or {"failed": ended.stderr.strip()[-800:]}


def answer(job: Record) -> Record:
    """The child's side."""
    fields = job["case"]
    case = Case(**{**fields, "heads": tuple(fields["heads"]), "prompts": tuple(fields["prompts"])})
    model, work = Path(job["model"]), Path(job["work"])
    return grown(case, model, work, job["given"]) if job["given"] else least(case, model, work)


def run_case(case: Case, work: Path) -> Record:
    """The record of one case."""
    model = make(case.shape, work / f"model-{'-'.join(map(str, (*case.heads, case.layers, case.hidden)))}")
    found = child(case, model, work, 0)
    runs = [found]
    if "least" in found:
        runs = [child(case, model, work, given) for given in (found["least"], int(found["least"] * MORE))]
    return {**harness.header("residence", case, []), "name": case.name, "runs": runs,
            "good": all(run.get("over", 1) <= ALLOWED - 1 and not run.get("errors") for run in runs)}  # fmt: skip


def line(record: Record) -> str:
    """A record, to read."""
    runs = [
        run["failed"] if "failed" in run else
        f"{run['growth'] / 1e6:,.0f} of {run['memory'] / 1e6:,.0f} MB ({100 * run['over']:+.0f} %)"
        for run in record["runs"]
    ]  # fmt: skip
    return f"{record['name']:44} {'; '.join(runs)}"


def run(cases: Iterable[Case], out: str | None) -> bool:
    """Runs the cases; returns whether all stayed within what was allowed."""
    good = True
    with tempfile.TemporaryDirectory(prefix="flexengine-residence-") as folder:
        for case in cases:
            record = run_case(case, Path(folder))
            harness.emit(record, out)
            print(line(record), file=sys.stderr, flush=True)
            good &= record["good"]
    return good


def main() -> None:
    """The command of the module's docstring."""
    if "--child" in sys.argv:
        print(json.dumps(answer(json.load(sys.stdin))), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(case.name for case in CASES), metavar="NAME")
    parser.add_argument("--out", metavar="FILE", help="append records to this file under bench/results/")
    arguments = parser.parse_args()
    wanted = arguments.cases or [case.name for case in CASES]
    sys.exit(0 if run([case for case in CASES if case.name in wanted], arguments.out) else 1)


if __name__ == "__main__":
    main()
