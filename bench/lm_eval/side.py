"""One side of bench.lm_eval: a process that runs tasks with one model class, and prints metrics and seconds.

stdin: {"side": "hf" or "flexengine", "model": DIR, "tasks": [NAME, ...], "folder": DIR, "batch": N,
"options": {NAME: VALUE}}
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import harness


def main() -> None:
    """Run the tasks of the job on stdin."""
    harness.needs("lm-eval", "lm_eval")
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    job = json.loads(sys.stdin.read())
    logging.disable(logging.WARNING)
    manager = TaskManager(include_path=job["folder"], include_defaults=False)
    evaluator.add_env_info = lambda storage: None  # it takes seconds
    make = _hf(job) if job["side"] == "hf" else _flexengine(job)
    began = time.perf_counter()
    model = make()
    loaded = time.perf_counter()
    found = evaluator.simple_evaluate(
        model, tasks=job["tasks"], task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    ended = time.perf_counter()
    metrics = {f"{task}/{name.split(',')[0]}": value for task, values in found["results"].items()
               for name, value in values.items() if isinstance(value, float)}  # fmt: skip
    line = {"seconds": ended - began, "load_seconds": loaded - began, "metrics": metrics,
            "peak_rss": harness.peak_rss(), "versions": harness.versions()}  # fmt: skip
    print(json.dumps(line), flush=True)


def _hf(job: dict[str, Any]) -> Callable[[], Any]:
    """Import the class, and return a function that opens the model."""
    from lm_eval.models.huggingface import HFLM

    return lambda: HFLM(job["model"], device="cpu", dtype="float32", batch_size=job["batch"])


def _flexengine(job: dict[str, Any]) -> Callable[[], Any]:
    """Import the class, and return a function that opens the model."""
    from flexengine.apps.lm_eval.model import FlexLM

    return lambda: FlexLM(job["model"], device="cpu", progress=False, **job["options"])


if __name__ == "__main__":
    main()
