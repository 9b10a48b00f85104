"""Records of invented jobs, for the tests of pages."""

import dataclasses
from collections import Counter
from typing import Any

from flexengine.engine.summary import JobCounts, Progress
from flexengine.plan.feedback import LaneSeconds, PlanReport
from flexengine.shell.report.record import (
    COMPUTE,
    WEIGHTS,
    Bucket,
    ErrorCounts,
    LaneSpan,
    LengthCounts,
    Planned,
    ReportRecord,
    SweepLine,
)

GB = 10**9
SPANS = (
    LaneSpan("disk_read", "load weight", WEIGHTS, 0.0, 0.4, (0, 0), (-1, -1), 1, 0.4),
    LaneSpan("disk_read", "load weight", WEIGHTS, 0.5, 0.9, (1, 1), (-1, -1), 1, 0.4),
    LaneSpan("device", "compute", COMPUTE, 0.4, 1.0, (0, 1), (0, 2), 3, 0.6),
)
PLAN = Planned(
    hardware="box (sim, measured)", shared=False, places=("device", "host", "disk"),
    placement={"weights": (2 * GB, 3 * GB, 5 * GB), "KV cache": (GB, 0, 0), "activations": (10**6, 0, 0)},
    memories=[("device", {"weights": 2 * GB, "KV cache": GB}, 4 * GB), ("host", {"weights": 3 * GB}, None),
              ("disk", {}, 100 * GB)],
    report=PlanReport("box", True, 14.0, 15.0, {
        "disk_read": LaneSeconds(10.0, 12.0), "device": LaneSeconds(5.0, 4.0), "loading": LaneSeconds(1.0, 1.5)}),
    job_seconds=20.0, policy={"gpu_batch_size": 3}, text="the plan in words",
)  # fmt: skip


def record(**changes: Any) -> ReportRecord:
    """Return a finished job with some errors, with these fields changed."""
    prompts, completions, errors = LengthCounts(), LengthCounts(), ErrorCounts()
    for n in (5, 9, 30, 31):
        prompts[n] += 1
        completions[n // 2] += 1
    errors.add(4, "line 5: max_tokens is 0; it must be at least 1")
    made = ReportRecord(
        model="toy", state="done", error="", began="2026-01-01 10:00:00", written="2026-01-01 10:00:20", elapsed=20.0,
        command="python -m flexengine.run in.jsonl --report r.html", folder="/data", counts=JobCounts(5, 4, 1, 0),
        totals=Progress(6, 4, 1, 75, 75, 30, 30, 5.0, 10.0), prompts=prompts, completions=completions,
        endings=Counter({"length": 3, "stop": 1}), errors=errors,
        rates=[Bucket(1, 5.0, 0.0, 75, 0), Bucket(5, 0.0, 10.0, 0, 26)], plan=PLAN,
        sweep=SweepLine(4, False, 1.0, SPANS, {"disk_read": 0.8, "device": 0.6}),
        summary={"load_seconds": 0.5, "device": "sim", "dtype": "float32", "lossy": {}, "bytes": {"h2d": GB},
                 "peak_bytes": {"device": GB}, "replanned": []},
        machine=[("processor", "a processor"), ("flexengine", "0.1")],
    )  # fmt: skip
    return dataclasses.replace(made, **changes)
