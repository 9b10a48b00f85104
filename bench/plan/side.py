"""flexengine's side of bench.plan: reads an Asked on stdin and prints one JSON line with predicted and measured
seconds.

flexengine is imported inside the functions, so that the driver can import this module without it.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from bench.harness import Job, Record, peak_rss, versions

RUN, MEASURE, ASSUME = "run", "measure", "assume"


@dataclass(frozen=True)
class Asked:
    """The input of a side.

    Attributes:
        task: RUN the job, MEASURE its machine and model, or ASSUME their rates.
        links: bytes per second by link of a sim machine.
        hardware: fields of the rates to plan with; None for those that the engine finds or measures.
        score: as in `ErrorCase`.
    """

    job: Job
    task: str = RUN
    links: dict[str, float] | None = None
    hardware: Record | None = None
    score: bool = False

    def to_json(self) -> str:
        """Return the input as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Asked":
        """Return the input in a line that `to_json` returned."""
        fields = json.loads(text)
        return Asked(**fields | {"job": Job.from_json(json.dumps(fields["job"]))})


def engine_of(asked: Asked) -> Any:
    """Return the engine, open but with no weights loaded."""
    from flexengine import Engine, Policy
    from flexengine.lossy import Lossy
    from flexengine.plan.hardware import Hardware
    from flexengine.tier.machine import Links

    job = asked.job
    options: dict[str, Any] = {"device": job.device, "device_mem": job.device_mem, "offload_dir": job.scratch}
    options |= {"policy": Policy(**job.policy) if job.policy else None, "dtype": job.dtype}
    options |= {"lossy": Lossy(**job.lossy) if job.lossy else None}
    options |= {"links": Links(**cast(dict[str, Any], asked.links)) if asked.links else None}
    options |= {"hardware": Hardware.from_json(asked.hardware, "bench.plan") if asked.hardware else None}
    return Engine(job.model, **{k: v for k, v in options.items() if v is not None})


def rates(asked: Asked) -> Record:
    """Return the hardware with which all runs plan. It is marked as not measured, so that no run corrects stored
    rates."""
    from flexengine.plan.rates import assumed

    with engine_of(asked) as engine:
        began = time.perf_counter()
        if asked.task == MEASURE:
            hardware = engine.planner.rates.measured()
        else:
            hardware = assumed(engine.core.machine.kind, engine.core.machine.capacity)
        seconds = time.perf_counter() - began
    return {"hardware": {**hardware.to_json(), "measured": False}, "seconds": seconds, "versions": versions()}


def evict(paths: Iterable[Path]) -> None:
    """Drop files, such as encoded weights, from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def prepared(asked: Asked) -> tuple[list[Any], Callable[[Any], list[Any]]]:
    """Return the rows of the job, and a function that runs them on an engine."""
    from flexengine import SamplingParams
    from flexengine.engine.scoring import rows_of

    requests = asked.job.requests
    if not asked.score:
        rows = [{"prompt_token_ids": list(r.prompt_token_ids), "max_tokens": r.max_tokens} for r in requests]
        return rows, lambda engine: engine.generate(rows, SamplingParams(ignore_eos=True))
    contexts = [list(r.prompt_token_ids[: -r.max_tokens]) for r in requests]
    continuations = [list(r.prompt_token_ids[-r.max_tokens :]) for r in requests]
    return rows_of(contexts, continuations)[0], lambda engine: engine.score(contexts, continuations)


def run(asked: Asked) -> Record:
    """Plan, predict and run a job. Return {"refused": why} if the policy does not fit."""
    from flexengine import SamplingParams
    from flexengine.errors import OutOfMemory

    rows, run_rows = prepared(asked)
    began = time.perf_counter()
    with engine_of(asked) as engine:
        evict({run.path for origin in engine.planner.opened.prepare_weights().values() for run in origin.runs})
        opened = time.perf_counter()
        try:
            workload = engine.reader.survey(rows, SamplingParams(ignore_eos=True))
            layout = engine.planner.plan(workload).layout
            planned = time.perf_counter()
            cost = engine.planner.cost(workload)
            prediction = cost.predict(layout)
            start = time.perf_counter()
            results = run_rows(engine)
        except OutOfMemory as error:
            return {"refused": str(error), "versions": versions()}
        seconds, summary = time.perf_counter() - start, engine.summary.to_json()
    if errors := [r.error for r in results if r.error]:
        raise SystemExit(f"{len(errors)} rows failed; the first: {errors[0]}")
    return {
        "generated_tokens": sum(len(r.token_ids) for r in results),
        "seconds": seconds,
        "open_seconds": opened - began,
        "planning_seconds": planned - opened,
        "peak_rss": peak_rss(),
        "token_ids": [list(r.token_ids) for r in results],
        "versions": versions(),
        "summary": summary,
        "rates": cost.hardware.name,
        "predicted": {
            "seconds": prediction.seconds,
            "load_seconds": prediction.load_seconds,
            "lanes": prediction.busy,
            "slowed": cost.slowed(prediction.busy, layout.policy),
            "sweeps": sum(prediction.counts.values()),
            "fractions": prediction.fractions,
        },
    }


def perform(asked: Asked) -> Record:
    """Perform the task."""
    return run(asked) if asked.task == RUN else rates(asked)


def main() -> None:
    """Run one process."""
    asked = Asked.from_json(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        line = perform(asked)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
