"""Processes of the cases engines and turns: python -m bench.stagger.side JOB.json.

A job with the field `seconds` is a pool: an attention worker at `address` whose attention takes at least so long. A job
with `slice` has engines that take turns. Any other job is an engine: it generates beside the pool and prints the times
of the ends of its sweeps, in seconds since 1970, and its tokens.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bench.stagger.slow_replica import SECONDS
from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.guests.attention_workers.answers import Answers, PendingQuestion
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.workers import address_of, serve_forever
from flexengine.guests.replicas.client import Replica
from flexengine.guests.replicas.worker import TurnsWorker
from flexengine.guests.wire.secret import secret_for
from flexengine.schedule.tasks import Op, Task


def pool(job: dict[str, Any]) -> None:
    """Serve engines until the process is ended."""
    attend = Answers.attend

    def slowed(self: Answers, asked: PendingQuestion) -> tuple[Tensor, ...]:
        end = time.perf_counter() + job["seconds"]
        answer = attend(self, asked)
        time.sleep(max(0.0, end - time.perf_counter()))
        return answer

    Answers.attend = slowed  # type: ignore[method-assign]
    memory, say = WorkerPool(1 << 26), lambda text: print(text, file=sys.stderr)
    with socket.create_server(address_of(job["address"])) as server:  # from now on engines are answered
        serve_forever(server, memory, say, secret_for("127.0.0.1"))


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Return the times of the ends of sweeps, and tokens."""
    times = list[float]()
    with Engine(
        job["model"], device="sim", device_mem="1G", host_mem="1G", links=Links(h2d=job["link"]),
        policy=Policy(**job["policy"]), attention_workers=[job["address"]], progress=False,
        on_sweep=lambda _: times.append(time.time()),
    ) as made:  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in job["rows"]]
        results = made.generate(prompts, SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
    return {"times": times, "tokens": [result.token_ids for result in results]}


def turns(job: dict[str, Any]) -> dict[str, Any]:
    """Return the periods of decode sweeps, in seconds per layer of all gpu_batches, and tokens, of engines that take
    turns and whose slices take at least `slice` seconds. Links to the worker and back take `crossing` seconds."""
    first, last = job["window"]
    operations, sleep = dict(TurnsWorker.operations), job["slice"] / 2

    def slowed(perform: Any) -> Any:
        def call(worker: TurnsWorker, task: Task) -> None:
            end = time.perf_counter() + sleep
            perform(worker, task)
            time.sleep(max(0.0, end - time.perf_counter()))

        return call

    for op in (Op.PROJECT, Op.FINISH):
        operations[op] = slowed(operations[op])
    TurnsWorker.operations = operations
    Replica.module, os.environ[SECONDS] = "bench.stagger.slow_replica", str(job["slice"])
    spans = list[tuple[Task, float, float]]()
    with Engine(
        job["model"], device="sim", device_mem="1G", host_mem="1G", links=Links(latency=job["crossing"]),
        policy=Policy(**job["policy"]), attention_workers=[job["address"]], engines=job["engines"], progress=False,
    ) as made:  # fmt: skip
        made.core.sample = SimpleNamespace(add=lambda *span: spans.append(span))
        prompts = [{"prompt_token_ids": ids} for ids in job["rows"]]
        results = made.generate(prompts, SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
    ends = {(task.cell.sweep, task.cell.layer): end for task, _, end in spans
            if task.op is Op.ATTEND and task.cell.batch == 0}  # fmt: skip
    sweeps = sorted({sweep for sweep, _ in ends})
    periods = [(ends[sweep, last] - ends[sweep, first]) / (last - first) for sweep in sweeps]
    return {"periods": periods, "tokens": [result.token_ids for result in results]}


def main() -> None:
    """Run the job in the file that the command line names."""
    job = json.loads(Path(sys.argv[1]).read_text())
    if "seconds" in job:
        pool(job)
    elif "slice" in job:
        print(json.dumps(turns(job)))
    else:
        print(json.dumps(engine(job)))


if __name__ == "__main__":
    main()
