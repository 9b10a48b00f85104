"""Programs without the secret against an attention worker and against stages, each on one of two machines.

python -m bench.workers.siege [--connections 10000] [--seed 0] [--out FILE]

As root, in network namespaces of its own (`machines`), so that nothing else is reached. Connections send nothing,
random bytes, requests of other protocols, proofs with other secrets or of a wrong length, headers that announce much,
or a byte now and then; up to OPEN of them stay open, more than the files that worker and stages may open. Meanwhile a
job decodes with its KV cache at the worker, and other engines with the secret connect to it again and again. Then two
stages join under such an attack, and run a job. Good if

* all tokens are those of transformers, and every engine and stage with the secret comes in;
* no connection without it gets more than the 64 bytes of a nonce, and a refusal;
* the peaks of RAM grow by less than MOST_GROWN, and neither worker nor stage writes a byte to a disk;
* stages listen no more once they have joined.
"""

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench import harness
from bench.harness import Record
from bench.workers.grid import make_family
from bench.workers.machines import ADDRESSES, INTERFACE, TwoMachines, missing

WORKER, STAGES = 29600, 29500  # ports
MEMORY = 100_000_000  # bytes of --worker-mem
MOST_GROWN = 64_000_000  # bytes
FILES = 512  # that worker and stages may open
ROWS, TOKENS = 24, 24
STRANGERS = [sys.executable, "-m", "bench.workers.strangers"]
LIMITED = ["bash", "-c", f'ulimit -n {FILES}; exec "$@"', "-"]
# Jobs, until standard input ends; a line for each: seconds, and whether the tokens are right.
JOBS = """
import json, sys, threading, time
from flexengine import Engine, Policy, SamplingParams
job = json.load(open(sys.argv[1]))
rows = [{"prompt_token_ids": p} for p in job["prompts"]]
params, policy = SamplingParams(max_tokens=job["tokens"], ignore_eos=True), Policy(4, 2, cache={"workers": 1})
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
with Engine(job["model"], policy=policy, device="cpu", attention_workers=[sys.argv[2]]) as engine:
    while not ended.is_set():
        began = time.monotonic()
        good = [r.token_ids for r in engine.generate(rows, params)] == job["expected"]
        print(json.dumps([time.monotonic() - began, good]), flush=True)
"""


def peak(pid: int) -> int:
    """Return the most resident bytes of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def written(pid: int) -> int:
    """Return the bytes that a process has written to disks."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes:")).split()[1])


def listening(pid: int) -> set[int]:
    """Return the TCP ports at which processes of the machine of a process listen."""
    ports = set[int]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def until(done: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait until something is done. Raise TimeoutError."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.02)


def transformers_tokens(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy continuations by transformers, one prompt at a time."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                                 pad_token_id=0)  # fmt: skip
            found.append(out[0, len(prompt) :].tolist())
    return found


class Siege:
    """Worker, stages and strangers on two machines. folder: for all files; each process has a TMPDIR in it."""

    def __init__(self, machines: TwoMachines, folder: Path, count: int, seed: int) -> None:
        self.machines, self.folder, self.count, self.seed = machines, folder, count, seed
        self._logs = dict[str, int]()
        rng = random.Random(seed)
        self.model = make_family("llama", folder)
        prompts = [[rng.randrange(3, 601) for _ in range(rng.randrange(1, 60))] for _ in range(ROWS)]
        self.expected = transformers_tokens(self.model, prompts)
        job = {"model": str(self.model), "prompts": prompts, "tokens": TOKENS, "expected": self.expected}
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "in.jsonl").write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in prompts))
        (folder / "policy.json").write_text(json.dumps({"gpu_batch_size": 1, "num_gpu_batches": 2}))

    def start(self, machine: int, name: str, words: list[str], **environment: str) -> "subprocess.Popen[str]":
        """Start a process, with pipes, and a log of its messages, in memory."""
        (temporary := self.folder / f"{name} files").mkdir()
        self._logs[name] = log = os.memfd_create(name)
        return self.machines.start(machine, words, {**environment, "TMPDIR": str(temporary)}, text=True, stderr=log,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self.folder)  # fmt: skip

    def log(self, name: str) -> str:
        return os.pread(self._logs[name], 1 << 20, 0).decode()

    def strangers(self, machine: int, port: int) -> "subprocess.Popen[str]":
        """Start strangers against a port of the other machine."""
        words = [ADDRESSES[1 - machine], str(port), str(self.count), str(self.seed + port)]
        return self.start(machine, f"strangers {port}", [*STRANGERS, "attack", *words])

    def against_worker(self) -> Record:
        """Attack a worker while a job uses it, and engines connect to it."""
        address = f"{ADDRESSES[1]}:{WORKER}"
        words = [sys.executable, "-m", "flexengine", "serve-attention", address, "--worker-mem", str(MEMORY)]
        worker = self.start(1, "worker", LIMITED + words)
        until(lambda: "listening at" in self.log("worker"), "that the worker listens")
        job = self.start(0, "job", [sys.executable, "-c", JOBS, "job.json", address])
        visitor = self.start(0, "visitor", [*STRANGERS, "visit", address])
        assert visitor.stdout
        assert visitor.stdout.readline() == "ready\n", self.log("visitor")
        assert job.stdout
        quiet = [json.loads(job.stdout.readline()) for _ in range(4)][1:]
        before, began = (peak(worker.pid), written(worker.pid)), time.monotonic()
        attacking = self.strangers(0, WORKER)
        assert attacking.stdout
        assert attacking.stdout.readline() == "enough\n", self.log(f"strangers {WORKER}")
        seconds, after = time.monotonic() - began, (peak(worker.pid), written(worker.pid))
        jobs = [json.loads(line) for line in job.communicate(timeout=120)[0].splitlines()]
        (times, errors), attacked = (json.loads(each.communicate(timeout=60)[0]) for each in (visitor, attacking))
        lives = worker.poll() is None
        worker.terminate()
        worker.wait(60)
        said = self.log("worker").splitlines()
        return {
            **attacked, "seconds": seconds, "jobs": len(jobs), "wrong_jobs": sum(not good for _, good in quiet + jobs),
            "seconds_quiet": min(s for s, _ in quiet), "seconds_attacked": sorted(s for s, _ in jobs)[len(jobs) // 2],
            "visits": len(times), "errors": errors, "slowest_visit": max(times, default=0.0), "lives": lives,
            "peak_bytes": after[0], "grown_bytes": after[0] - before[0], "disk_bytes": after[1] - before[1],
            "files": len(list((self.folder / "worker files").iterdir())),
            "refusals_said": sum("refused" in line for line in said),
        }  # fmt: skip

    def against_stages(self) -> Record:
        """Attack the first stage before the second one joins, while it joins, and during their job."""
        words = [sys.executable, "-m", "flexengine.run", "in.jsonl", "-m", str(self.model), "-o", "out.jsonl",
                 "--policy", "policy.json", "--max-tokens", str(TOKENS), "--ignore-eos", "--device", "cpu",
                 "--interface", INTERFACE]  # fmt: skip
        common = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(STAGES), "WORLD_SIZE": "2",
                  "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # fmt: skip
        journal, began = self.folder / "out.jsonl.journal", time.monotonic()
        first = self.start(0, "stage 0", LIMITED + words, **common, RANK="0")
        until(lambda: STAGES in listening(first.pid), "that stage 0 listens")
        before = peak(first.pid), written(first.pid)
        attacking = self.strangers(1, STAGES)
        assert attacking.stdout
        assert attacking.stdout.readline() == "enough\n", self.log(f"strangers {STAGES}")
        after, joins = (peak(first.pid), written(first.pid)), time.monotonic()
        second = self.start(1, "stage 1", LIMITED + words, **common, RANK="1")
        until(lambda: (journal.exists() and b'"index"' in journal.read_bytes()) or first.poll() is not None, "a row")
        open_ports = sorted(listening(first.pid) | listening(second.pid)) if first.poll() is None else []
        codes, seconds = [each.wait(120) for each in (first, second)], time.monotonic()
        attacked = json.loads(attacking.communicate(timeout=60)[0])
        out = self.folder / "out.jsonl"
        tokens = [json.loads(line)["token_ids"] for line in out.read_text().splitlines()] if out.exists() else []
        return {
            **attacked, "seconds": joins - began, "seconds_after": seconds - joins, "codes": codes,
            "same": tokens == self.expected, "open_ports": open_ports, "grown_bytes": after[0] - before[0],
            "disk_bytes": after[1] - before[1], "files": len(list((self.folder / "stage 0 files").iterdir())),
        }  # fmt: skip


def well(worker: Record, stages: Record) -> bool:
    """Return whether nothing was read, nothing written, and no job disturbed."""
    both = all(not r["harmful"] and r["got"] <= 96 and r["grown_bytes"] < MOST_GROWN
               and not r["disk_bytes"] and not r["files"] for r in (worker, stages))  # fmt: skip
    served = (
        worker["lives"] and worker["jobs"] and worker["visits"] and not worker["wrong_jobs"] + len(worker["errors"])
    )
    return both and bool(served) and stages["codes"] == [0, 0] and stages["same"] and not stages["open_ports"]


def main() -> int:
    """Run on two machines and print the record. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=harness.at_least_one, default=10_000, help="against each of both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    os.environ["FLEXENGINE_SECRET"] = secrets.token_hex(32)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR"))))
        siege = Siege(stack.enter_context(TwoMachines()), folder, args.connections, args.seed)
        worker, stages = siege.against_worker(), siege.against_stages()
    good = well(worker, stages)
    case = {"name": "strangers", "connections": args.connections, "seed": args.seed, "memory": MEMORY}
    header = harness.header("workers", case, [{"versions": harness.versions()}])
    harness.emit(header | {**worker, "of_stages": stages, "good": good}, args.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
