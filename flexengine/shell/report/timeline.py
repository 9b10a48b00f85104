"""The time line of one sweep: times of its tasks, recorded for a few sweeps of a job and merged to be drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from flexengine.schedule.routes import by_way
from flexengine.schedule.tasks import Compute, Op, Task

MOST_RECORDED = 20_000  # tasks of a recorded sweep; of a longer one, the first tasks are shown
MOST_DRAWN = 900
MOST_KEPT = 3  # decode sweeps that are kept, of which the page shows one
ALL_RECORDED = 3  # the first sweeps are all recorded, then each whose number is a power of two

WEIGHTS, CACHE, HIDDEN, COMPUTE = KINDS = ("weights", "KV cache", "activations", "compute")
_KINDS = {
    **dict.fromkeys((Op.LOAD_RESIDENT, Op.LOAD_WEIGHT, Op.LOAD_ROWS, Op.READ_USED), WEIGHTS),
    **dict.fromkeys((Op.LOAD_CACHE, Op.STORE_CACHE), CACHE),
    **dict.fromkeys((Op.LOAD_HIDDEN, Op.STORE_HIDDEN, Op.SEND, Op.FETCH, Op.ENTER, Op.LEAVE), HIDDEN),
}


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

    @staticmethod
    def of(task: Task, began: float, end: float) -> "LaneSpan":
        """Return the span of a task."""
        layer, batch = task.cell.layer, task.cell.batch
        last = layer + task.layers - 1 if isinstance(task, Compute) else layer
        kind = _KINDS.get(task.op, COMPUTE)
        return LaneSpan(task.lane, task.op.value, kind, began, end, (layer, last), (batch, batch), 1, end - began)

    def joined(self, other: "LaneSpan") -> "LaneSpan":
        """Return one span for this one and a later one of the same lane."""
        longer = self if self.busy >= other.busy else other
        layers, batches = _range(self.layers, other.layers), _range(self.batches, other.batches)
        end, tasks, busy = max(self.end, other.end), self.tasks + other.tasks, self.busy + other.busy
        return replace(self, kind=longer.kind, end=end, layers=layers, batches=batches, tasks=tasks, busy=busy)


def _range(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])


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

    @property
    def lanes(self) -> list[str]:
        """Return the lanes, in the order in which data passes them."""
        return by_way(self.busy)


def line(sweep: int, prefill: bool, tasks: Sequence[tuple[Task, float, float]], cut: bool = False) -> SweepLine | None:
    """Return the time line of a sweep; None if no task of it was recorded.

    The sweep lasts from the first to the last of the tasks other than weight loads, which may run ahead of their sweep.

    Args:
        tasks: (task, began, end) of the sweep. Tasks of its neighbours may be among them if they are weight loads.
    """
    own = [(began, end) for task, began, end in tasks if task.op is not Op.LOAD_WEIGHT]
    if not own:
        return None
    zero, last = min(began for began, _ in own), max(end for _, end in own)
    inside = [(task, began, end) for task, began, end in tasks if end > zero and began < last]
    spans = [LaneSpan.of(task, max(began, zero) - zero, min(end, last) - zero) for task, began, end in inside]
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + span.busy
    return SweepLine(sweep, prefill, last - zero, tuple(merged(spans)), busy, cut)


def merged(spans: Iterable[LaneSpan], most: int = MOST_DRAWN) -> list[LaneSpan]:
    """Return at most about `most` spans: consecutive spans of a lane are joined until they are few enough.

    Spans of one operation are joined first, then short spans of several.
    """
    lanes: dict[str, list[LaneSpan]] = {}
    for span in sorted(spans, key=lambda span: span.began):
        lanes.setdefault(span.lane, []).append(span)
    whole = max((span.end for each in lanes.values() for span in each), default=0.0)
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
    """Time lines of a few sweeps of a job; an executor's `Spans`.

    Few sweeps are recorded: the first ALL_RECORDED, then those whose numbers are powers of two. At most MOST_KEPT
    decode sweeps are kept. Other sweeps cost one comparison per task.
    """

    def __init__(self) -> None:
        self._recordings = [_Recording()]
        self._lines: list[SweepLine] = []

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
                same = [each for each in self._lines if each.prefill == made.prefill]
                if len(same) == (1 if made.prefill else MOST_KEPT):
                    self._lines.remove(same[0])
                self._lines.append(made)
        if sweep < ALL_RECORDED or (sweep + 1) & sweep == 0:
            self._recordings.append(_Recording())

    def drop(self) -> None:
        """Drop what is being recorded: its job has been interrupted by a replan."""
        self._recordings = []

    def typical(self, decode_seconds: float) -> SweepLine | None:
        """Return the decode sweep whose seconds are nearest to `decode_seconds`. Return the last prefill sweep if no
        decode sweep was recorded, and None if no sweep was."""
        lines = [*self._lines, *filter(None, (each.line() for each in self._recordings))]
        decodes = [each for each in lines if not each.prefill]
        return min(decodes or lines, key=lambda each: abs(each.seconds - decode_seconds), default=None)
