"""Side process of bench.resident: runs jobs on one engine and reports the process's memory after each.

Reads a `bench.resident.Setting` as JSON on stdin; prints one JSON line.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from bench.harness import peak_rss, report_loaded, restart_peak, rss


def import_all(model: str) -> None:
    """Import the modules that a job imports, so that they count in the base and not in the growth."""
    import highspy  # noqa: F401
    import psutil  # noqa: F401
    import torch

    from flexengine.model.build import build

    build(Path(model), torch.float32)


class Shortages:
    """Makes one compute task of the second sweep fail for lack of memory, in the jobs of these numbers."""

    def __init__(self, jobs: list[int]) -> None:
        from flexengine.schedule.tasks import Compute
        from flexengine.worker.worker import Worker

        self.jobs, self.armed = jobs, False
        perform = Worker.perform

        def failing(worker: Any, task: Any) -> None:
            layers = range(task.cell.layer, task.cell.layer + getattr(task, "layers", 1))
            if self.armed and isinstance(task, Compute) and task.cell.sweep == 1 and 1 in layers:
                self.armed = False
                raise MemoryError
            perform(worker, task)

        Worker.perform = failing  # type: ignore[method-assign, assignment]

    def begin(self, job: int) -> None:
        """Arm the failure if it is planned for job number `job`."""
        self.armed = job in self.jobs


def main() -> None:
    """Run the setting on stdin."""
    setting = json.load(sys.stdin)
    if not setting["collector"]:
        gc.disable()
    import_all(setting["model"])
    from flexengine import Engine, Policy, SamplingParams
    from flexengine.lossy import Lossy

    if setting["tiny"]:
        with Engine(setting["tiny"], device=setting["device"], lossy=Lossy(**setting["lossy"])) as engine:
            engine.generate([{"prompt_token_ids": list(range(5, 45))}], SamplingParams(4, ignore_eos=True))
    base, private, found = rss(), rss("RssAnon"), []
    if not setting["jobs"]:
        print(json.dumps({"base": base, "private": private, "jobs": []}), flush=True)
        return
    shortages = Shortages(setting["short"])
    options = {"device": setting["device"], "device_mem": setting["device_mem"], "host_mem": setting["host_mem"]}
    policy = Policy(**setting["policy"]) if setting["policy"] else None
    with Engine(setting["model"], policy=policy, **options, lossy=Lossy(**setting["lossy"])) as engine:
        report_loaded()
        for number, (prompts, tokens) in enumerate(setting["jobs"]):
            restart_peak()
            shortages.begin(number)
            rows = [{"prompt_token_ids": [5 + (i + j) % 900 for j in range(n)]} for i, n in enumerate(prompts)]
            results = engine.generate(rows, SamplingParams(tokens, ignore_eos=True))
            summary = engine.summary
            found.append({
                "job": [len(rows), max(prompts), tokens], "peak": peak_rss() - base, "after": rss() - base,
                "ledger": sum(n for tier, n in summary.peak_bytes.items() if tier != "disk"),
                "replanned": len(summary.replanned), "failed": sum(r.error is not None for r in results),
                "seconds": summary.total_seconds,
            })  # fmt: skip
    print(json.dumps({"base": base, "private": private, "jobs": found, "closed": rss() - base}), flush=True)


if __name__ == "__main__":
    main()
