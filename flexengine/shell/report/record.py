"""Everything that a page shows, as plain values: numbers of a job and the time line of one sweep, in bounded memory."""

import os
import platform
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from operator import add
from typing import Any

from flexengine import __version__
from flexengine.engine.summary import JobCounts, Progress
from flexengine.job.rows import without_place
from flexengine.places import by_way
from flexengine.plan.feedback import PlanReport, SweepMonitor
from flexengine.plan.formatting import count, place_name, size
from flexengine.plan.search import kind_bytes
from flexengine.plan.terms import HIDDEN
from flexengine.schedule.tasks import Compute, Op, Task
from flexengine.shell.doctor.machine import cpu, version_of
from flexengine.shell.explain import text as explain
from flexengine.shell.explain.picture import Memory

MOST_BUCKETS = 240
MOST_BINS = 40
MOST_KINDS = 30
MOST_CHARACTERS = 300  # of a stored message

_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]?|\d[\d,.]*")
TIME = "%Y-%m-%d %H:%M:%S %z"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")

MOST_RECORDED = 20_000  # tasks of a recorded sweep; of a longer one, the first tasks are shown
MOST_DRAWN = 900
MOST_KEPT = 3  # decode sweeps that are kept, of which the page shows one
ALL_RECORDED = 3  # the first sweeps are all recorded, then each whose number is a power of two

WEIGHTS, CACHE, ACTIVATIONS, COMPUTE = KINDS = ("weights", "KV cache", "activations", "compute")
_KINDS = {
    **dict.fromkeys((Op.LOAD_RESIDENT, Op.LOAD_WEIGHT, Op.LOAD_ROWS, Op.READ_USED), WEIGHTS),
    **dict.fromkeys((Op.LOAD_CACHE, Op.STORE_CACHE), CACHE),
    **dict.fromkeys((Op.LOAD_HIDDEN, Op.STORE_HIDDEN, Op.ENTER, Op.LEAVE), ACTIVATIONS),
    **dict.fromkeys((Op.SEND, Op.SEND_KEYS, Op.FETCH), ACTIVATIONS),
}


# The time line of one sweep: times of its tasks, recorded for a few sweeps of a job and merged to be drawn.


@dataclass(frozen=True)
class LaneSpan:
    """Time of one task, or of consecutive tasks of a lane, in seconds."""

    lane: str
    op: str  # operation of the tasks; of different ones, that of the first
    kind: str  # kind of data, in KINDS
    began: float
    end: float
    layers: tuple[int, int]  # first and last layer; -1 stands before the layers
    batches: tuple[int, int]  # first and last gpu_batch; -1 for none
    tasks: int = 1
    busy: float = 0.0  # seconds of work; less than end - began if there are gaps

    def joined(self, other: "LaneSpan") -> "LaneSpan":
        """Return one span for this one and a later one of the same lane."""
        longer = self if self.busy >= other.busy else other
        layers = min(self.layers[0], other.layers[0]), max(self.layers[1], other.layers[1])
        batches = min(self.batches[0], other.batches[0]), max(self.batches[1], other.batches[1])
        end, tasks, busy = max(self.end, other.end), self.tasks + other.tasks, self.busy + other.busy
        return replace(self, kind=longer.kind, end=end, layers=layers, batches=batches, tasks=tasks, busy=busy)


@dataclass(frozen=True)
class SweepLine:
    """The time line of one sweep."""

    sweep: int  # number of the sweep in the job, from 1
    prefill: bool  # whether it computed a prompt
    seconds: float
    # tasks between the start and the end of the sweep, in seconds from the start, sorted by lane in the order of
    # `by_way` and then by time
    spans: tuple[LaneSpan, ...]
    busy: dict[str, float]  # seconds of work by lane
    cut: bool = False  # whether only the first tasks of the sweep were recorded


def line(sweep: int, prefill: bool, tasks: Sequence[tuple[Task, float, float]], cut: bool = False) -> SweepLine | None:
    """Return the time line of a sweep; None if no task of it was recorded.

    The sweep lasts from the first to the last of the tasks other than weight loads, which may run ahead of their sweep.
    tasks: (task, began, end) of the sweep. Tasks of its neighbours may be among them if they are weight loads.
    """
    own = [(began, end) for task, began, end in tasks if task.op is not Op.LOAD_WEIGHT]
    if not own:
        return None
    zero, last = min(began for began, _ in own), max(end for _, end in own)
    spans, busy = list[LaneSpan](), defaultdict[str, float](float)
    for task, task_began, task_end in tasks:
        began, end = max(task_began, zero), min(task_end, last)
        if began < end:
            first, batch = task.cell.layer, task.cell.batch
            layers = (first, first + task.layers - 1 if isinstance(task, Compute) else first)
            kind = _KINDS.get(task.op, COMPUTE)
            where = (layers, (batch, batch))
            spans.append(LaneSpan(task.lane, task.op.value, kind, began - zero, end - zero, *where, 1, end - began))
            busy[task.lane] += end - began
    return SweepLine(sweep, prefill, last - zero, tuple(merged(spans)), dict(busy), cut)


def merged(spans: Sequence[LaneSpan], most: int = MOST_DRAWN) -> list[LaneSpan]:
    """Return at most about `most` spans: consecutive spans of a lane are joined until they are few enough.

    Spans of one operation are joined first, then short spans of several.
    """
    lanes = defaultdict[str, list[LaneSpan]](list)
    for span in sorted(spans, key=lambda span: span.began):
        lanes[span.lane].append(span)
    whole = max((span.end for span in spans), default=0.0)
    lines = [lanes[lane] for lane in by_way(lanes)]
    same = [(whole / parts, 0.0) for parts in (4000, 2000, 1000, 500)]
    any_op = [(whole / parts, whole / parts) for parts in (2000, 1000, 500, 200, 100, 50, 10)]
    for gap, longest in same + any_op:
        if sum(map(len, lines)) <= most:
            break
        lines = [_joined(each, gap, longest) for each in lines]
    return list(chain.from_iterable(lines))


def _joined(spans: list[LaneSpan], gap: float, longest: float) -> list[LaneSpan]:
    """Return the spans of one lane with neighbours joined that are at most `gap` seconds apart, and that are of one
    operation or at most `longest` seconds long together."""
    joined: list[LaneSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        adjacent = last is not None and span.began - last.end <= gap
        if last is not None and adjacent and (last.op == span.op or span.end - last.began <= longest):
            joined[-1] = last.joined(span)
        else:
            joined.append(span)
    return joined


@dataclass
class _Recording:
    """Tasks of a sweep that is recorded, and the loads still under way when it ended."""

    tasks: list[tuple[Task, float, float]] = field(default_factory=list)
    # (number, whether a prompt was computed) after the sweep has ended; None before
    ended: tuple[int, bool] | None = None
    cut: bool = False

    def add(self, task: Task, began: float, end: float) -> None:
        if self.ended and task.op is not Op.LOAD_WEIGHT:
            return  # a task of the next sweep
        if len(self.tasks) < MOST_RECORDED:
            self.tasks.append((task, began, end))
        else:
            self.cut = True

    def line(self) -> SweepLine | None:
        return line(*self.ended, self.tasks, self.cut) if self.ended else None


class SweepSample:
    """Time lines of a few sweeps of a job; an executor calls `add`.

    Few sweeps are recorded: the first ALL_RECORDED, then those whose numbers are powers of two. At most MOST_KEPT
    decode sweeps are kept. Other sweeps cost one comparison per task.
    """

    def __init__(self) -> None:
        self._recordings = [_Recording()]
        # by whether the sweep computed a prompt
        self._lines = {False: deque[SweepLine](maxlen=MOST_KEPT), True: deque[SweepLine](maxlen=1)}

    def add(self, task: Task, began: float, end: float) -> None:
        """Add a task that ran from `began` to `end`."""
        for recording in self._recordings:
            recording.add(task, began, end)

    def sweep_ended(self, sweep: int, prefill: bool) -> None:
        """End the recording of a sweep, and begin that of the next one if it is to be recorded. Sweeps are counted from
        1."""
        for recording in list(self._recordings):
            if recording.ended is None:
                recording.ended = sweep, prefill
                continue
            self._recordings.remove(recording)
            if (made := recording.line()) is not None:
                self._lines[made.prefill].append(made)
        if sweep < ALL_RECORDED or (sweep + 1) & sweep == 0:
            self._recordings.append(_Recording())

    def drop(self) -> None:
        """Drop what is being recorded: its job has been interrupted by a replan."""
        self._recordings = []

    def typical(self, decode_seconds: float) -> SweepLine | None:
        """Return the decode sweep whose seconds are nearest to `decode_seconds`. Return the last prefill sweep if no
        decode sweep was recorded, and None if no sweep was."""
        lines = [*chain(*self._lines.values()), *filter(None, (each.line() for each in self._recordings))]
        decodes = [each for each in lines if not each.prefill]
        return min(decodes or lines, key=lambda each: abs(each.seconds - decode_seconds), default=None)


# Series and sums.


@dataclass
class Bucket:
    """Sums of consecutive sweeps: of those that computed a prompt ("prefill"), and of the others ("decode")."""

    sweeps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0

    def __add__(self, other: "Bucket") -> "Bucket":
        return Bucket(*map(add, astuple(self), astuple(other)))


class SweepRates:
    """Tokens and seconds of all sweeps, in at most MOST_BUCKETS buckets of equally many sweeps."""

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.buckets: list[Bucket] = []  # in order; the last one may have fewer sweeps
        self._most, self._sweeps = most, 1

    def add(self, sweep: Bucket) -> None:
        """Add a sweep. If all buckets are full, merge each two."""
        if self.buckets and self.buckets[-1].sweeps < self._sweeps:
            self.buckets[-1] += sweep
        elif len(self.buckets) < self._most:
            self.buckets.append(sweep)
        else:
            pairs = zip_longest(self.buckets[::2], self.buckets[1::2], fillvalue=Bucket())
            self.buckets, self._sweeps = [first + second for first, second in pairs], 2 * self._sweeps
            self.add(sweep)


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
    """Counts of rows' errors by kind. Messages that differ only in numbers and quoted text are of one kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}  # by pattern, in the order of their first rows; at most MOST_KINDS
        self.others = 0  # rows with errors of further kinds

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


def machine() -> list[tuple[str, str]]:
    """Return (name, value) of processor, memory, system and versions."""
    import psutil

    name = platform.machine()
    with suppress(OSError):  # a system without /proc
        name = cpu().model
    cores = count(len(os.sched_getaffinity(0)), "core", "cores")
    versions = {package: version_of(package) for package in PACKAGES}
    return [
        ("processor", f"{name}, {cores} for this process"),
        ("memory", size(psutil.virtual_memory().total)),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("flexengine", __version__),
        ("Python", platform.python_version()),
        *((package, version) for package, version in versions.items() if version is not None),
    ]


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


@dataclass
class ReportRecord:
    """A job as a page shows it."""

    command: str  # shell command that runs the job again
    model: str = ""
    state: str = "running"  # or done, interrupted or failed
    error: str = ""  # why the job failed; "" if it did not
    # began, written: times of the start and of this page, as text
    began: str = field(default_factory=partial(time.strftime, TIME))
    written: str = ""
    elapsed: float = 0.0  # seconds between them
    folder: str = field(default_factory=os.getcwd)  # working directory of the command
    # counts, totals, errors: see their classes
    counts: JobCounts = field(default_factory=lambda: JobCounts(0, 0, 0, 0))
    totals: Progress = field(default_factory=Progress)
    prompts: LengthCounts = field(default_factory=LengthCounts)  # prompt tokens of each row that this run finished
    completions: LengthCounts = field(default_factory=LengthCounts)  # generated tokens of each sample
    endings: Counter[str] = field(default_factory=Counter)  # number of samples by finish reason
    errors: ErrorCounts = field(default_factory=ErrorCounts)
    rates: list[Bucket] = field(default_factory=list)  # tokens and seconds of consecutive sweeps
    plan: Planned | None = None  # None if no plan was made
    sweep: SweepLine | None = None  # time line of one sweep; None if none was recorded
    summary: Mapping[str, Any] = field(default_factory=dict)  # the engine's summary; empty while the job runs
    machine: list[tuple[str, str]] = field(default_factory=list)  # (name, value), and of the versions


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
        hardware=explain.machine(hardware, cost.model),
        shared=hardware.shared,
        places=tuple(place_name(place, hardware.shared) for place in layout.places),
        placement=placement,
        memories=explain.tiers(prediction, hardware),
        report=watch.report(),
        job_seconds=prediction.total_seconds,
        policy=layout.policy.to_json(),
        text=explain.report(model, cost.model, hardware, cost.workload, prediction),
    )
