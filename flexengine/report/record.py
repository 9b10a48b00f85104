"""Everything that a page shows, as plain values. Made from a running or an ended job by `recorder.py`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexengine.engine.state import Progress
from flexengine.engine.summary import JobCounts
from flexengine.plan import explain
from flexengine.plan.brief import kind_bytes
from flexengine.plan.feedback import PlanReport, SweepMonitor
from flexengine.plan.formatting import place_name
from flexengine.plan.fractions import HIDDEN, fraction
from flexengine.plan.picture import Memory
from flexengine.plan.prediction import Prediction
from flexengine.report.series import Bucket, ErrorCounts, LengthCounts
from flexengine.report.timeline import SweepLine

RUNNING, DONE, INTERRUPTED, FAILED = "running", "done", "interrupted", "failed"


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows that this run finished.

    Attributes:
        prompts: prompt tokens of each row.
        completions: generated tokens of each sample.
        endings: number of samples by finish reason.
    """

    prompts: LengthCounts = field(default_factory=LengthCounts)
    completions: LengthCounts = field(default_factory=LengthCounts)
    endings: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Planned:
    """Placement and prediction of a job.

    Attributes:
        hardware: name, kind and origin of the rates.
        shared: whether host and device are one memory.
        places: names of the places.
        placement: by kind of data, its bytes in each place.
        memories: name, bytes by purpose and capacity of each memory.
        report: predicted and measured seconds of the sweeps so far, as in the summary.
        job_seconds: prediction of the whole job.
        policy: fields of the policy file.
        text: the plan in words.
    """

    hardware: str
    shared: bool
    places: tuple[str, ...]
    placement: dict[str, tuple[int, ...]]
    memories: list[Memory]
    report: PlanReport
    job_seconds: float
    policy: dict[str, Any]
    text: str


@dataclass(frozen=True)
class ReportRecord:
    """A job as a page shows it.

    Attributes:
        model: name of the model.
        state: RUNNING, DONE, INTERRUPTED or FAILED.
        error: why the job failed; "" if it did not.
        began, written: times of the start and of this page, as text.
        elapsed: seconds between them.
        command: shell command that runs the job again.
        folder: its working directory.
        counts, totals, lengths, errors: see their classes.
        rates: tokens and seconds of consecutive sweeps.
        plan: None if no plan was made.
        sweep: time line of one sweep; None if none was recorded.
        summary: the engine's summary; empty while the job runs.
        machine: (name, value) of the machine and of the versions.
    """

    model: str
    state: str
    error: str
    began: str
    written: str
    elapsed: float
    command: str
    folder: str
    counts: JobCounts
    totals: Progress
    lengths: Lengths
    errors: ErrorCounts
    rates: list[Bucket]
    plan: Planned | None
    sweep: SweepLine | None
    summary: Mapping[str, Any]
    machine: list[tuple[str, str]]


def planned(watch: SweepMonitor, model: str) -> Planned:
    """Return placement and prediction of a job.

    Args:
        watch: predicted and measured seconds so far.
        model: name of the model.
    """
    cost, layout = watch.cost, watch.layout
    hardware, facts, workload = cost.hardware, cost.model, cost.workload
    prediction = cost.predict(layout)
    return Planned(
        hardware=explain.machine(hardware),
        shared=hardware.shared,
        places=tuple(place_name(place, hardware.shared) for place in layout.places),
        placement=_placement(watch, prediction),
        memories=explain.tiers(prediction, hardware),
        report=watch.report(),
        job_seconds=prediction.total_seconds,
        policy=layout.policy.to_json(),
        text=explain.report(model, facts, hardware, workload, prediction),
    )


def _placement(watch: SweepMonitor, prediction: Prediction) -> dict[str, tuple[int, ...]]:
    """Return the bytes of weights as stored, of all KV pages, and of the most hidden states of a sweep, by place."""
    cost, layout = watch.cost, watch.layout
    hidden = kind_bytes(cost.model, cost.workload, prediction)["hidden states"]
    shares = [prediction.fractions.get(fraction(HIDDEN, place), 0.0) for place in layout.places]
    return {
        "weights": tuple(layout.stored_bytes[place] for place in layout.places),
        "KV cache": tuple(layout.account[place].get("KV cache", 0) for place in layout.places),
        "activations": tuple(round(share * hidden) for share in shares),
    }
