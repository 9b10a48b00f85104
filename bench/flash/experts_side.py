"""A side of bench.flash.experts: reads a Job on stdin, prints one JSON line with bytes and seconds of a decode sweep.

The job's options are `guessing` (whether experts of the next layer are read early) and `most_share` (share of a layer's
experts up to which they are loaded on demand into slots, where flash is off).
"""

import contextlib
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from bench.harness import Job, report
from bench.peers.flexengine_side import generated, options_of


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    start = time.perf_counter()
    from flexengine import Engine
    from flexengine.plan import experts
    from flexengine.worker.expert_blocks import ExpertBlocks
    from flexengine.worker.worker import Worker

    ExpertBlocks.guessing = job.options.get("guessing", True)
    experts.MAX_CHOSEN_SHARE = job.options.get("most_share", experts.MAX_CHOSEN_SHARE)
    begin, close = Worker.begin, ExpertBlocks.close
    sweeps, blocks = list[tuple[float, int]](), list[Any]()  # time and bytes read when each sweep begins

    def beginning(worker: Worker, *args: Any) -> None:
        sweeps.append((time.perf_counter(), worker.weights.machine.disk.bytes_read))
        begin(worker, *args)

    def closing(of_job: ExpertBlocks) -> None:
        blocks.extend(of_job.blocks)
        close(of_job)

    setattr(Worker, "begin", beginning)  # noqa: B010 - a method is replaced
    setattr(ExpertBlocks, "close", closing)  # noqa: B010
    with contextlib.redirect_stdout(sys.stderr), Engine(job.model, **options_of(job)) as engine:
        loaded = time.perf_counter()
        results = generated(engine, job)
        seconds = time.perf_counter() - loaded
        summary = engine.summary.to_json()
    if errors := [r.error for r in results if r.error]:
        raise SystemExit(f"{len(errors)} rows failed; the first: {errors[0]}")
    taken = [(now[0] - last[0], now[1] - last[1]) for last, now in pairwise(sweeps[1:])]
    more: dict[str, Any] = {"guesses": [block.guesses._asdict() for block in blocks],
                            "counts": [block.counts._asdict() for block in blocks]}  # fmt: skip
    if taken:
        more |= {"sweep_seconds": statistics.median(s for s, _ in taken),
                 "sweep_bytes": statistics.mean(n for _, n in taken)}  # fmt: skip
    report([list(r.token_ids) for r in results], seconds, loaded - start, summary=summary, **more)


if __name__ == "__main__":
    main()
