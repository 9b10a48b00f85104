"""Pipelines of stages in processes of one machine, beside one process with the same memory per device.

python -m bench.pipeline [--cases decode simulated grid kills] [--turns 3] [--kills 40] [--out pipeline.jsonl]

decode: a model of eight layers on simulated accelerators that each hold a quarter of it, behind throttled links. One
process streams three quarters of the weights in every sweep; four stages keep their layers. The record has decode
tokens per second of both, which take turns. simulated: three stages that stream all their weights through a throttled
link, beside the same pipeline in virtual time, whose stages take bytes / rate. unequal: four stages of a model whose
head has the bytes of three layers, behind throttled links, with the layers that the planner chooses and evenly divided
ones. grid: the outputs of one to four stages
under ten policies, by `--stages` and by torchrun, beside that of one process. kills: `flexengine run --stages 3`, of
which a stage is killed by SIGKILL at a random moment and which is run again, until it has been killed so often; its
output must be that of one process. Exit code: 1 if tokens or outputs differ.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Record
from bench.pipeline.grid import grid
from bench.pipeline.models import VOCABULARY, make_model

LAYERS, HIDDEN, ROWS, PROMPT, TOKENS = 8, 1024, 16, 16, 24
LINK = 200e6  # bytes per second between host and device
STAGES = 4


def side(job: Record, directory: Path) -> Record:
    """Return the record of one side."""
    path = directory / f"{job['stages']}.json"
    path.write_text(json.dumps(job))
    made = subprocess.run([sys.executable, "-m", "bench.pipeline.side", str(path)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    if made.returncode:
        raise SystemExit(f"{job['stages']} stages failed:\n{made.stderr[-3000:]}")
    found: Record = json.loads(made.stdout.splitlines()[-1])
    return found


def header(fields: Record) -> Record:
    """Return the first fields of a record. fields: of the case."""
    return harness.header("pipeline", fields, [{"versions": harness.versions()}])


def decode(turns: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case decode, and whether tokens are equal."""
    layer = make_model(directory / "model", LAYERS, HIDDEN)
    rng = random.Random(1)
    policy: dict[str, Any] = {"gpu_batch_size": ROWS // STAGES, "num_gpu_batches": STAGES, "slots": 2}
    job = {"model": str(directory / "model"), "host": "4G", "links": {"h2d": LINK, "d2h": LINK}, "tokens": TOKENS,
           "rows": [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(ROWS)]}  # fmt: skip
    memory = (LAYERS // STAGES + 2) * layer + (64 << 20)  # two slots beside a quarter of the layers, KV and buffers
    job["memory"] = memory
    share = 1 / STAGES
    sides = {
        "one process": {**job, "stages": 1, "policy": {**policy, "weights": [share, 1 - share, 0]}},
        "stages": {**job, "stages": STAGES, "policy": policy},
    }
    runs: dict[str, list[Record]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, given in sides.items():
            runs[name].append(side(given, directory))
            print(f"  {name}: {runs[name][-1]['decode_tok_s']:.2f} decode tok/s", file=sys.stderr)
    rates = {name: median(run["decode_tok_s"] for run in each) for name, each in runs.items()}
    same = all(run["tokens"] == runs["one process"][0]["tokens"] for each in runs.values() for run in each)
    case = {
        "name": "decode",
        "layers": LAYERS,
        "hidden": HIDDEN,
        "rows": ROWS,
        "stages": STAGES,
        "layer_bytes": layer,
        "device_bytes": memory,
        "h2d": LINK,
    }
    record = header(case)
    record |= {"decode_tok_s": rates, "ratio": rates["stages"] / rates["one process"], "same": same,
               "runs": {name: [{k: v for k, v in run.items() if k != "tokens"} for run in each]
                        for name, each in runs.items()}}  # fmt: skip
    return record, same


def simulated(turns: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case simulated, and whether tokens are those of one process."""
    from bench.cluster.events import Pipeline

    stages, layers, hidden, link, new = 3, 6, 512, 100e6, 12
    layer, rng = make_model(directory / "model", layers, hidden), random.Random(1)
    head = 4 * VOCABULARY * hidden
    policy = {"gpu_batch_size": 2, "num_gpu_batches": stages, "slots": 2, "weights": [0, 1, 0]}
    job = {"model": str(directory / "model"), "memory": "1G", "host": "1G", "links": {"h2d": link}, "tokens": new,
           "rows": [[rng.randrange(VOCABULARY) for _ in range(4)] for _ in range(2 * stages)], "policy": policy,
           "stages": stages}  # fmt: skip
    runs = [side(job, directory) for _ in range(turns)]
    alone = side({**job, "stages": 1}, directory)
    each = [layers // stages * layer / link + (head / link if rank == stages - 1 else 0) for rank in range(stages)]
    expected = Pipeline(each, each, cohorts=stages, steps=new - 1).simulate().seconds
    seconds = median(run["prefill_seconds"] + run["decode_seconds"] for run in runs)
    same = all(run["tokens"] == alone["tokens"] for run in runs)
    case = {"name": "simulated", "layers": layers, "hidden": hidden, "stages": stages, "layer_bytes": layer,
            "h2d": link, "tokens": new}  # fmt: skip
    record = header(case)
    record |= {"seconds": seconds, "simulated_seconds": expected, "ratio": seconds / expected, "same": same,
               "all_seconds": [run["prefill_seconds"] + run["decode_seconds"] for run in runs]}  # fmt: skip
    return record, same


def unequal(turns: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case unequal, and whether tokens are those of one process."""
    layers, hidden, vocabulary, new, link = 16, 512, 20_000, 8, 100e6
    per = layers // STAGES
    layer, rng = make_model(directory / "model", layers, hidden, vocabulary), random.Random(1)
    rows = [[rng.randrange(vocabulary) for _ in range(4)] for _ in range(16)]
    job: Record = {"model": str(directory / "model"), "memory": "56M", "host": "2G", "tokens": new, "rows": rows}
    job["links"] = {"h2d": link, "d2h": link}
    planned = {**job, "stages": STAGES}
    alone = side({**job, "stages": 1}, directory)
    chosen = side(planned, directory)
    same_for_all = {"weights": [None] * per, "policy": chosen["policy"]}
    stages = [{"device": f"{k}", "layers": [per * k, per * k + per], **same_for_all} for k in range(STAGES)]
    shape = f"llama, {layers} layers of {hidden}, 8 heads of {hidden // 8}, vocabulary {vocabulary}"
    block = chosen["policy"]["gpu_batch_size"] * chosen["policy"]["num_gpu_batches"]
    strategy = {"model": shape, "num_layers": layers, "stages": stages, "prefill_batch": 1, "decode_batch": block,
                "cohorts": STAGES}  # fmt: skip
    sides = {"planned": planned, "even": {**planned, "strategy": strategy}}
    runs: dict[str, list[Record]] = {"planned": [chosen], "even": []}
    for turn in range(turns):
        for name, given in sides.items():
            if turn or name == "even":
                runs[name].append(side(given, directory))
    spent = {name: [run["prefill_seconds"] + run["decode_seconds"] for run in each] for name, each in runs.items()}
    seconds = {name: median(each) for name, each in spent.items()}
    same = all(run["tokens"] == alone["tokens"] for each in runs.values() for run in each)
    record = header({"name": "unequal", "layers": layers, "hidden": hidden, "vocabulary": vocabulary, "stages": STAGES,
                     "layer_bytes": layer, "h2d": link, "tokens": new})  # fmt: skip
    record |= {"seconds": seconds, "ratio": seconds["even"] / seconds["planned"], "same": same,
               "predicted_seconds": {name: each[-1]["predicted_seconds"] for name, each in runs.items()},
               "predicted_job_seconds": {name: each[-1]["predicted_job_seconds"] for name, each in runs.items()},
               "layers_by_stage": {name: each[-1]["layers"] for name, each in runs.items()},
               "policies": {name: each[-1]["policy"] for name, each in runs.items()}}  # fmt: skip
    return record, same


def all_policies(_: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case grid, and whether all outputs are that of one process."""
    found, same = grid(directory)
    return {**header({"name": "grid"}), **found}, same


def kills(count: int, directory: Path) -> tuple[Record, bool]:
    """Return the record of case kills, and whether the output is that of one process."""
    make_model(directory / "model", 6, 64)
    rng = random.Random(2)
    rows = [{"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]} for _ in range(400)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", "in.jsonl", "-m", "model", "--max-tokens", "40", "--ignore-eos", "--device-mem", "300M",
             "--temperature", "0.7", "--seed", "3"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(harness.REPO)}

    def command(output: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "flexengine", *words, "-o", output, *more]

    subprocess.run([*command("one.jsonl"), "-q"], cwd=directory, env=environment, check=True)
    made, noticed, done = list[int](), list[float](), 0
    journal = directory / "out.jsonl.journal"
    while len(made) < count:
        if (directory / "out.jsonl").exists():  # the job ended before it was killed so often: begin again
            if (directory / "out.jsonl").read_bytes() != (directory / "one.jsonl").read_bytes():
                break
            for name in ("out.jsonl", "out.jsonl.journal"):
                (directory / name).unlink(missing_ok=True)
            done += 1
        driver = subprocess.Popen(command("out.jsonl", "--stages", "3"), cwd=directory, env=environment,
                                  stderr=subprocess.PIPE, text=True)  # fmt: skip
        size = journal.stat().st_size if journal.exists() else 0
        if rng.random() < 0.7:  # in the middle of the job, else somewhere in the start
            while driver.poll() is None and (not journal.exists() or journal.stat().st_size <= size):
                time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3) if rng.random() < 0.7 else rng.uniform(0, 8))
        path = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
        processes = [driver.pid, *map(int, path.read_text().split())] if path.exists() else []
        victim = len(made) % 3
        if victim >= len(processes) or driver.poll() is not None:
            driver.wait()
            continue
        os.kill(processes[victim], signal.SIGKILL)
        began = time.monotonic()
        driver.wait()
        noticed.append(time.monotonic() - began)
        made.append(victim)
        print(f"  {len(made)} of {count}: stage {victim}, code {driver.returncode}", file=sys.stderr)
    subprocess.run([*command("out.jsonl", "--stages", "3"), "-q"], cwd=directory, env=environment, check=True)
    same = (directory / "out.jsonl").read_bytes() == (directory / "one.jsonl").read_bytes()
    case = {"name": "kills", "stages": 3, "rows": len(rows)}
    record = header(case)
    record |= {"kills": len(made), "by_stage": [made.count(stage) for stage in range(3)], "jobs": done + 1,
               "slowest_end_seconds": max(noticed, default=0.0), "same": same}  # fmt: skip
    return record, same and len(made) == count


MAKERS = {"decode": decode, "simulated": simulated, "unequal": unequal, "grid": all_policies, "kills": kills}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=MAKERS, default=[*MAKERS])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--out", metavar="FILE", default="pipeline.jsonl", help="also append to bench/results/FILE")
    args = parser.parse_args()
    right = True
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            record, equal = MAKERS[name](args.kills if name == "kills" else args.turns, Path(folder))
        right = right and equal
        harness.emit(record, args.out)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
