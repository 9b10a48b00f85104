"""Everything that a page shows, as plain values: numbers of a running or an ended job, in bounded memory."""

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flexengine import __version__
from flexengine.engine.summary import JobCounts, Progress
from flexengine.job.rows import without_place
from flexengine.plan.brief import kind_bytes
from flexengine.plan.feedback import PlanReport, SweepMonitor
from flexengine.plan.formatting import count, place_name, size
from flexengine.plan.prediction import HIDDEN
from flexengine.shell.doctor.machine import cpu
from flexengine.shell.explain import text as explain
from flexengine.shell.explain.picture import Memory
from flexengine.shell.report.timeline import SweepLine

MOST_BUCKETS = 240
MOST_BINS = 40
MOST_KINDS = 30
MOST_CHARACTERS = 300  # of a stored message

_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]?|\d[\d,.]*")
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
RUNNING, DONE, INTERRUPTED, FAILED = "running", "done", "interrupted", "failed"


@dataclass
class Bucket:
    """Sums of consecutive sweeps: of those that computed a prompt ("prefill"), and of the others ("decode")."""

    sweeps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds of all sweeps."""
        return self.prefill_seconds + self.decode_seconds

    def add(self, other: "Bucket") -> None:
        """Add the sums of another bucket."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class SweepRates:
    """Tokens and seconds of all sweeps, in at most MOST_BUCKETS buckets of equally many sweeps.

    Attributes:
        buckets: in order; the last one may have fewer sweeps.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.buckets: list[Bucket] = []
        self._most, self._sweeps = most, 1

    def add(self, sweep: Bucket) -> None:
        """Add a sweep. If all buckets are full, merge each two."""
        full = not self.buckets or self.buckets[-1].sweeps >= self._sweeps
        if full and len(self.buckets) == self._most:
            for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=False):
                first.add(second)
            del self.buckets[1::2]
            self._sweeps *= 2
            full = self.buckets[-1].sweeps >= self._sweeps
        if full:
            self.buckets.append(Bucket())
        self.buckets[-1].add(sweep)


class LengthCounts(Counter[int]):
    """Numbers of sequences by their tokens. Memory is bounded, as sequences are."""

    @property
    def mean(self) -> float:
        """Return the mean length; 0 without sequences."""
        return sum(length * number for length, number in self.items()) / (self.total() or 1)

    def bins(self, most: int = MOST_BINS) -> list[tuple[int, int, int]]:
        """Return (first length, last length, number) of bins of one width, from the first to the last that is used."""
        width = 1
        while self and max(self) >= width * most:
            width *= 2
        numbers: Counter[int] = Counter()
        for length, number in self.items():
            numbers[length // width] += number
        used = range(min(numbers), max(numbers) + 1) if numbers else ()
        return [(i * width, (i + 1) * width - 1, numbers[i]) for i in used]


@dataclass
class ErrorKind:
    """Rows whose errors are of one kind: their number, and the first one with its error, cut to MOST_CHARACTERS."""

    count: int
    row: int
    message: str


class ErrorCounts:
    """Counts of rows' errors by kind. Messages that differ only in numbers and quoted text are of one kind.

    Attributes:
        kinds: by pattern, in the order of their first rows; at most MOST_KINDS.
        others: rows with errors of further kinds.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}
        self.others = 0

    def add(self, row: int, message: str) -> None:
        """Add a row's error."""
        pattern = _VARIES.sub("*", without_place(message[: 4 * MOST_CHARACTERS]))[:MOST_CHARACTERS]
        if pattern in self.kinds:
            self.kinds[pattern].count += 1
        elif len(self.kinds) < MOST_KINDS:
            cut = message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - 4] + " ..."
            self.kinds[pattern] = ErrorKind(1, row, cut)
        else:
            self.others += 1

    def by_count(self) -> list[ErrorKind]:
        """Return the kinds, the most frequent first."""
        return sorted(self.kinds.values(), key=lambda kind: -kind.count)


def machine() -> list[tuple[str, str]]:
    """Return (name, value) of processor, memory, system and versions."""
    import psutil

    name = platform.machine()
    with suppress(OSError):  # a system without /proc
        name = cpu().model
    cores = count(len(os.sched_getaffinity(0)), "core", "cores")
    facts = [
        ("processor", f"{name}, {cores} for this process"),
        ("memory", size(psutil.virtual_memory().total)),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("flexengine", __version__),
        ("Python", platform.python_version()),
    ]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts.append((package, version(package)))
    return facts


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows that this run finished."""

    prompts: LengthCounts = field(default_factory=LengthCounts)  # prompt tokens of each row
    completions: LengthCounts = field(default_factory=LengthCounts)  # generated tokens of each sample
    endings: Counter[str] = field(default_factory=Counter)  # number of samples by finish reason


@dataclass(frozen=True)
class Planned:
    """Placement and prediction of a job."""

    hardware: str  # name, kind and origin of the rates
    shared: bool  # whether host and device are one memory
    places: tuple[str, ...]
    placement: dict[str, tuple[int, ...]]  # by kind of data, its bytes in each place
    memories: list[Memory]  # name, bytes by purpose and capacity of each memory
    report: PlanReport  # predicted and measured seconds of the sweeps so far, as in the summary
    job_seconds: float  # prediction of the whole job
    policy: dict[str, Any]  # fields of the policy file
    text: str  # the plan in words


@dataclass(frozen=True)
class ReportRecord:
    """A job as a page shows it."""

    model: str
    state: str  # RUNNING, DONE, INTERRUPTED or FAILED
    error: str  # why the job failed; "" if it did not
    # began, written: times of the start and of this page, as text
    began: str
    written: str
    elapsed: float  # seconds between them
    command: str  # shell command that runs the job again
    folder: str  # its working directory
    # counts, totals, lengths, errors: see their classes
    counts: JobCounts
    totals: Progress
    lengths: Lengths
    errors: ErrorCounts
    rates: list[Bucket]  # tokens and seconds of consecutive sweeps
    plan: Planned | None  # None if no plan was made
    sweep: SweepLine | None  # time line of one sweep; None if none was recorded
    summary: Mapping[str, Any]  # the engine's summary; empty while the job runs
    machine: list[tuple[str, str]]  # (name, value) of the machine and of the versions


def planned(watch: SweepMonitor, model: str) -> Planned:
    """Return placement and prediction of a job. watch: its predicted and measured seconds so far."""
    cost, layout, hardware = watch.cost, watch.layout, watch.cost.hardware
    prediction = cost.predict(layout)
    # Bytes of weights as stored, of all KV pages, and of the most hidden states of a sweep, by place.
    hidden = kind_bytes(cost.model, cost.workload, prediction)["hidden states"]
    placement = {
        "weights": tuple(layout.stored_bytes[place] for place in layout.places),
        "KV cache": tuple(layout.account[place].get("KV cache", 0) for place in layout.places),
        "activations": tuple(round(share * hidden) for share in prediction.shares(HIDDEN).values()),
    }
    return Planned(
        hardware=explain.machine(hardware),
        shared=hardware.shared,
        places=tuple(place_name(place, hardware.shared) for place in layout.places),
        placement=placement,
        memories=explain.tiers(prediction, hardware),
        report=watch.report(),
        job_seconds=prediction.total_seconds,
        policy=layout.policy.to_json(),
        text=explain.report(model, cost.model, hardware, cost.workload, prediction),
    )
