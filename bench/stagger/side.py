"""Processes of the case engines: python -m bench.stagger.side JOB.json.

A job with the field `seconds` is a pool: an attention worker at `address` whose attention takes at least so long. Any
other job is an engine: it generates beside the pool and prints the times of the ends of its sweeps, in seconds since
1970, and its tokens.
"""

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from flexengine import Engine, Links, Policy, SamplingParams
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer, PendingQuestion
from flexengine.guests.attention_workers.workers import address_of, serve_forever
from flexengine.guests.wire.secret import secret_for


def pool(job: dict[str, Any]) -> None:
    """Serve engines until the process is ended."""
    attend = AttentionServer._attend

    def slowed(self: AttentionServer, asked: PendingQuestion) -> tuple[Tensor, ...]:
        end = time.perf_counter() + job["seconds"]
        answer = attend(self, asked)
        time.sleep(max(0.0, end - time.perf_counter()))
        return answer

    AttentionServer._attend = slowed  # type: ignore[method-assign]
    with socket.create_server(address_of(job["address"])) as server:
        say = lambda text: print(text, file=sys.stderr)  # noqa: E731
        serve_forever(server, WorkerPool(1 << 26), say, secret_for("127.0.0.1"))


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


def main() -> None:
    """Run the job in the file that the command line names."""
    job = json.loads(Path(sys.argv[1]).read_text())
    if "seconds" in job:
        pool(job)
    else:
        print(json.dumps(engine(job)))


if __name__ == "__main__":
    main()
