"""One side of a case: a process that generates, with or without attention workers.

python -m bench.workers.side JOB.json, with the fields: model, device, memory, host, links, policy (null lets the
planner choose), workers (a number, devices or addresses), worker_mem, dtype, lossy, rows (token ids), tokens, measure
(whether the machine's rates are measured first), force (use workers, under the best policy with them that the search
finds), kills (number of workers to kill while the rows are generated again and again), kill_seconds (most seconds
between two kills).
Prints one JSON object.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.guests.attention_workers.workers import LocalWorker, WorkerTier
from flexengine.lossy import Lossy
from flexengine.plan.refinement import split_of
from flexengine.plan.workload import Workload


class Killer(threading.Thread):
    """Kills a random worker again and again, after a random time each.

    Attributes:
        killed: number of workers killed so far.
    """

    def __init__(self, engine: Engine, most_seconds: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.engine, self.most, self.rng, self.killed = engine, most_seconds, random.Random(seed), 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.rng.uniform(0.2, self.most)):
            tier = self.rng.choice(self.engine.core.machine.workers)
            assert isinstance(tier, WorkerTier)
            client = tier.client
            if isinstance(client, LocalWorker) and client.process.poll() is None:
                os.kill(client.process.pid, signal.SIGKILL)
                self.killed += 1


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds, tokens and bytes of a job."""
    prompts = [{"prompt_token_ids": ids} for ids in job["rows"]]
    policy = job.get("policy")
    options: dict[str, Any] = {"links": Links(**job["links"])} if job.get("links") else {}
    if job.get("workers"):
        options |= {"attention_workers": job["workers"], "worker_mem": job.get("worker_mem")}
    if job.get("dtype"):
        options["dtype"] = job["dtype"]
    with tempfile.TemporaryDirectory(dir=job.get("folder")) as folder, Engine(
        job["model"], device=job["device"], device_mem=job.get("memory"), host_mem=job.get("host"), offload_dir=folder,
        policy=Policy(**policy) if policy else None, lossy=Lossy(**job.get("lossy", {})), progress=False, **options,
    ) as engine:  # fmt: skip
        if job.get("measure"):
            engine.planner.rates.measured()  # so that predictions use this machine's rates
        if job.get("force"):
            engine.planner.policy = _with_workers(engine, job)
        if job.get("kills"):
            return _killed(engine, job, prompts)
        results = engine.generate(prompts, SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
        summary, known = engine.summary, engine.planner.rates.known()
    plan, first = summary.plan, len(results)  # the first token of each row is computed with its prompt
    assert plan is not None
    assert summary.policy is not None
    return {
        "tokens": [result.token_ids for result in results], "prefill_seconds": summary.prefill_seconds,
        "decode_seconds": summary.decode_seconds, "sweeps": summary.sweeps,
        "tok_s": summary.generated_tokens / (summary.prefill_seconds + summary.decode_seconds),
        "decode_tok_s": (summary.generated_tokens - first) / max(1e-9, summary.decode_seconds),
        "predicted_seconds": plan.predicted_seconds, "measured_seconds": plan.measured_seconds,
        "policy": summary.policy.to_json(), "busy": summary.busy, "bytes": summary.bytes,
        "peak_bytes": dict(summary.peak_bytes),
        "rates": {name: getattr(known, name) for name in ("worker_attention", "worker_links", "worker_seconds")},
    }  # fmt: skip


def _with_workers(engine: Engine, job: dict[str, Any]) -> Policy:
    """Return the best policy with workers that the search tries; if it tries none, the best policy with all KV cache on
    workers."""
    searched = engine.planner.search(Workload.of((len(ids), job["tokens"]) for ids in job["rows"]))
    tried = [p for p in searched.tried if p.policy.works]
    if tried:
        return min(tried, key=lambda p: p.total_seconds).policy
    batches = min(4, len(job["rows"]))
    return replace(searched.best.policy, gpu_batch_size=-(-len(job["rows"]) // batches), num_gpu_batches=batches,
                   cache=split_of(1.0), activations=(1, 0, 0), slots=2)  # fmt: skip


def _killed(engine: Engine, job: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Generate the rows again and again while workers are killed. Return the different results, and counts."""
    killer, results, losses, runs = Killer(engine, job["kill_seconds"], job["seed"]), list[Any](), 0, 0
    killer.start()
    while killer.killed < job["kills"]:
        made = engine.generate(prompts, SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
        if (tokens := [result.token_ids for result in made]) not in results:
            results.append(tokens)
        losses, runs = losses + len(engine.summary.replanned), runs + 1
    killer.ended.set()
    killer.join()
    return {"results": results, "killed": killer.killed, "losses": losses, "runs": runs}


def main() -> None:
    """Run the job in the file that the command line names."""
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
