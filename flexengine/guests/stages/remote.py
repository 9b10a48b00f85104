"""The driver's side of the stages in other processes: orders leave as frames, results come back as frames."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexengine.engine.guests import StageDriver
from flexengine.engine.stages import Stage, StageResult, Sweep
from flexengine.errors import FlexError, InvalidInput, OutOfMemory, StageFailed, StageLost, WorkerLost
from flexengine.guests.stages.frames import EMPTY, Frame, SendingPort
from flexengine.guests.stages.group import HIDDENS, ORDERS, RESULTS, PipelineGroup
from flexengine.guests.stages.messages import Event, JobOrder, Order, OrderKind, SentText
from flexengine.guests.wire.link import pack, unpack
from flexengine.lossy import Lossy
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.shortage import Shortage
from flexengine.runtime.trace import PROCESS
from flexengine.schedule import sweeps
from flexengine.schedule.pages import Pool
from flexengine.worker.row_sequence import RowSequence
from flexengine.worker.stage_ports import Ports

TRACE = "trace"  # in what a stage measured: rows of its spans, see `runtime.trace`


@dataclass(frozen=True)
class RemotePlan:
    """The plan of a job in one stage: layers are first layer, last layer + 1 and number of layers of the model; seconds
    are predicted."""

    layers: tuple[int, ...]
    policy: Policy
    seconds: float


class Driver(StageDriver):
    """The other stages of a pipeline, which are other processes of its group.

    Attributes:
        group: the processes.
        port: port to the second stage.
        measured: by stage, what it measured in the last job, as JSON values.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self.group, self.job = group, 0
        self.port = SendingPort(group.send(1, HIDDENS))
        self.ports = Ports(after=self.port)
        others = range(1, group.size)
        self.orders = {rank: group.send(rank, ORDERS, most=64) for rank in others}
        self.results = {rank: group.receive(rank, RESULTS) for rank in others}
        self.measured: dict[int, dict[str, Any]] = {}
        self.lost = list[str]()

    def choose(
        self, workload: Workload, lossy: Lossy, block: int | None, prefill_tokens: int | None
    ) -> Callable[[], list[Policy]]:
        """Let every other stage choose a policy for a workload. Return a function that waits for the policies.
        Arguments as for `JobOrder`."""
        job = JobOrder(workload=workload, lossy=lossy.enabled, policy={}, block=block, prefill_tokens=prefill_tokens)
        self._order(OrderKind.CHOOSE, job)
        return lambda: [Policy(**answer) for answer in self._answers().values()]

    def lay_out(self, policy: Policy, workload: Workload, given: bool, lossy: Lossy) -> list[RemotePlan]:
        """Return the plans of the other stages for a job. Raise OutOfMemory, with the name of the stage, if the job
        does not fit in one of them. Arguments as for `prepare`."""
        job = JobOrder(workload=workload, lossy=lossy.enabled, policy=policy.to_json(), given=given)
        self._order(OrderKind.LAY_OUT, job)
        return [
            RemotePlan(tuple(answer["layers"]), Policy(**answer["policy"]), answer["seconds"])
            for answer in self._answers().values()
        ]

    def prepare(
        self, policy: Policy, workload: Workload, given: bool, lossy: Lossy
    ) -> "Callable[[], list[RemoteStage]]":
        self.job += 1
        self.port.job = self.job
        job = JobOrder(workload=workload, lossy=lossy.enabled, policy=policy.to_json(), given=given, lost=self.lost)
        self._order(OrderKind.PREPARE, job)
        self.lost = []
        return lambda: [RemoteStage(self, rank, answer) for rank, answer in self._answers().items()]

    def end(self) -> None:
        with contextlib.suppress(StageLost):
            self._order(OrderKind.END)
            for rank in self.orders:
                frame = self.results[rank].get()
                while (frame.kind, frame.number) != (OrderKind.ANSWER, OrderKind.END):
                    frame = self.results[rank].get()  # drops results that the driver no longer waits for
                self.measured[rank] = unpack(frame.body, dict)

    def report(self) -> tuple[dict[str, Any], ...]:
        measured = (self.measured[rank] for rank in sorted(self.measured))
        return tuple({name: value for name, value in each.items() if name != TRACE} for each in measured)

    def spans(self) -> dict[str, list[list[Any]]]:
        return {f"{PROCESS} stage {rank}": self.measured[rank].get(TRACE, []) for rank in sorted(self.measured)}

    def leave(self) -> None:
        with contextlib.suppress(StageLost):
            self._order(OrderKind.LEAVE)

    def _order(self, kind: OrderKind, job: JobOrder | None = None) -> None:
        for channel in self.orders.values():
            channel.put(Frame(kind, self.job, body=EMPTY if job is None else pack(job)))

    def _answers(self) -> dict[int, Any]:
        """Return the answers of all stages. Raise the first error, after all have answered."""
        frames = {rank: self.results[rank].get() for rank in self.orders}
        for rank, frame in frames.items():
            self.check(rank, frame)
        return {rank: unpack(frame.body, dict) for rank, frame in frames.items()}

    def check(self, rank: int, frame: Frame) -> None:
        """Raise the error that a frame reports, if it does."""
        if frame.kind == OrderKind.FAILED:
            stage = f"stage {rank} of 0 to {self.group.size - 1} ({self.group.names[rank]})"
            raise _error(stage, unpack(frame.body, dict))


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as values that can be packed."""
    values: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, Shortage):  # of a task
        error = OutOfMemory(error.tier, error.what, error.needed)
    if isinstance(error, OutOfMemory):
        values |= {name: getattr(error, name) for name in ("tier", "what", "needed", "used", "capacity")}
    if isinstance(error, WorkerLost):
        values |= {name: getattr(error, name) for name in ("place", "why")}
    return values | {"refused": isinstance(error, FlexError)}


def _error(stage: str, values: Mapping[str, Any]) -> FlexError:
    message = f"{stage}: {values['message']}"
    if "tier" in values:
        error = OutOfMemory(*(values[name] for name in ("tier", "what", "needed", "used", "capacity")))
        error.args = (message,)
        return error
    if "place" in values:
        loss = WorkerLost(values["place"], values["place"], values["why"])
        loss.args = (message,)
        return loss
    if values["refused"]:
        return InvalidInput(message)
    why = f"{values['type']}: {values['message']}"
    return StageFailed(f"{stage} failed: {why}; run the same command again to continue the job")


class RemoteStage(Stage):
    """A stage in another process."""

    def __init__(self, driver: Driver, rank: int, answer: Mapping[str, Any]) -> None:
        """Begin a job. answer: the stage's answer to PREPARE."""
        self.driver, self.rank = driver, rank
        first, end, total = answer["layers"]
        self.layers, self.policy, self.cuda = (first, end, total), Policy(**answer["policy"]), answer["cuda"]
        self.pools = {tier: tuple(Pool(*pool) for pool in pools) for tier, pools in answer["pools"].items()}
        self._events = list[Event]()
        self._known: dict[int, int] = {}  # by sequence, number of generated tokens that the stage has

    def __exit__(self, *error: Any) -> None:
        """Do nothing: the threads of the other process end with the job."""

    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        self._events.append(Event.of(sequence, tokens))  # now: its cached tokens change after the claim

    def release(self, sequence: sweeps.Sequence) -> None:
        self._events.append(Event.of(sequence, None))
        self._known.pop(sequence.id, None)

    def start(self, sweep: Sweep, members: Mapping[int, RowSequence]) -> None:
        """Send an order. Does not wait for its execution."""
        order = Order(sweep, self._events, {}, {})
        self._events = []
        for sequence in dict.fromkeys(piece.sequence for batch in sweep.batches for piece in batch.pieces):
            if (text := members.get(sequence)) is None:
                continue  # a trunk, whose tokens are the sweep's stems
            if sequence not in self._known:
                order.texts[sequence], self._known[sequence] = SentText.of(text), 0
            if len(text.token_ids) > self._known[sequence]:
                order.grown[sequence] = text.token_ids[self._known[sequence] :]
                self._known[sequence] = len(text.token_ids)
        frame = Frame(OrderKind.SWEEP, self.driver.job, sweep.number, body=pack(order))
        self.driver.orders[self.rank].put(frame)

    def result(self) -> StageResult:
        frame = self.driver.results[self.rank].get()
        self.driver.check(self.rank, frame)
        return unpack(frame.body, StageResult)

    def abandon(self) -> None:
        """Do nothing: `close` ends the job in the other process."""

    def close(self) -> None:
        """End the job in all other stages. The last one calls the driver, as they must not wait for one another."""
        if self.rank == self.driver.group.size - 1:
            self.driver.end()
