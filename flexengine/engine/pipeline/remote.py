"""The driver's side of the stages in other processes: orders leave as frames, results come back as frames.

| kind | from | body |
|---|---|---|
| CHOOSE | driver | JSON: a workload, and limits of the policy; answered by ANSWER with a policy |
| LAY_OUT | driver | JSON: policy, workload; answered by ANSWER if the job fits |
| PREPARE | driver | JSON: policy, workload, switches, lost attention workers; answered by ANSWER with its pools |
| SWEEP | driver | numbers (`messages.pack_order`); `first`: number of the sweep; answered by RESULT |
| END | driver | nothing; the job ends, early or not; answered by ANSWER with what the stage has measured |
| LEAVE | driver | nothing; the process ends |
| ANSWER, FAILED | stage | JSON |
| RESULT | stage | numbers (`messages.pack_result`); `first`: number of the sweep |

`second` is the number of the job in all frames.
"""

import contextlib
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from flexengine.engine.pipeline.messages import Event, Order, pack_order, unpack_result
from flexengine.engine.stages import Stage, StageResult, Sweep
from flexengine.errors import FlexError, InvalidInput, OutOfMemory, StageFailed, StageLost, WorkerLost
from flexengine.lossy import Lossy
from flexengine.parallel.frames import Channel, Frame
from flexengine.parallel.group import HIDDENS, ORDERS, RESULTS, Group
from flexengine.parallel.ports import SendingPort
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.trace import PROCESS
from flexengine.schedule import sweeps
from flexengine.schedule.pages import Pool
from flexengine.worker.sequence_text import SequenceText
from flexengine.worker.stage_ports import Ports

TRACE = "trace"  # in what a stage measured: rows of its spans, see `runtime.trace`
CHOOSE, LAY_OUT, PREPARE, SWEEP, END, LEAVE, ANSWER, FAILED, RESULT = range(9)
EMPTY = torch.empty(0, dtype=torch.uint8)


def packed_json(values: Any) -> Tensor:
    """Return JSON values as bytes."""
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def unpacked_json(body: Tensor) -> Any:
    """Return the JSON values in bytes."""
    return json.loads(body.numpy().tobytes())


def workload_json(workload: Workload) -> dict[str, Any]:
    """Return a workload as JSON values."""
    sizes = [[p, n, times, workload.spared.get((p, n), 0.0)] for (p, n), times in workload.sizes.items()]
    rest = {name: value for name, value in asdict(workload).items() if name not in ("sizes", "spared")}
    return {"sizes": sizes, **rest}


def workload_of(values: Mapping[str, Any]) -> Workload:
    """Return the workload in JSON values."""
    sizes = values["sizes"]
    rest = {name: value for name, value in values.items() if name != "sizes"}
    return Workload({(p, n): times for p, n, times, _ in sizes},
                    {(p, n): spared for p, n, _, spared in sizes if spared}, **rest)  # fmt: skip


@dataclass(frozen=True)
class StagePlan:
    """The plan of a job in one stage.

    Attributes:
        layers: first layer, last layer + 1, and number of layers of the model.
        policy: the stage's policy.
        seconds: predicted seconds of its work.
    """

    layers: tuple[int, ...]
    policy: Policy
    seconds: float


class Driver:
    """The other stages of a pipeline, from the view of the driver.

    Attributes:
        group: the processes.
        port: port to the second stage.
        measured: by stage, what it measured in the last job, as JSON values.
        lost: places of attention workers that all stages replace before they prepare the next job.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.job = group, 0
        self.port = SendingPort(group.send(1, HIDDENS))
        others = range(1, group.size)
        self.orders = {rank: group.send(rank, ORDERS, most=64) for rank in others}
        self.results = {rank: group.receive(rank, RESULTS) for rank in others}
        self.measured: dict[int, dict[str, Any]] = {}
        self.lost = list[str]()

    def choose(
        self, workload: Workload, lossy: Lossy, block: int | None, prefill_tokens: int | None
    ) -> Callable[[], list[Policy]]:
        """Let every other stage choose a policy for a workload. Return a function that waits for the policies.

        Args:
            lossy: the lossy switches.
            block: most sequences alive.
            prefill_tokens: most tokens of a prefill chunk; None for free choice.
        """
        asked = {"workload": workload_json(workload), "lossy": lossy.enabled, "block": block,
                 "prefill_tokens": prefill_tokens}  # fmt: skip
        self._order(CHOOSE, asked)
        return lambda: [Policy(**answer) for answer in self._answers().values()]

    def lay_out(self, policy: Policy, workload: Workload, given: bool, lossy: Lossy) -> list[StagePlan]:
        """Return the plans of the other stages for a job. Raise OutOfMemory, with the name of the stage, if the job
        does not fit in one of them. Arguments as for `prepare`."""
        self._order(LAY_OUT, {"policy": policy.to_json(), "workload": workload_json(workload), "given": given,
                              "lossy": lossy.enabled})  # fmt: skip
        return [StagePlan(tuple(answer["layers"]), Policy(**answer["policy"]), answer["seconds"])
                for answer in self._answers().values()]  # fmt: skip

    def prepare(
        self, policy: Policy, workload: Workload, given: bool, lossy: Lossy
    ) -> "Callable[[], list[RemoteStage]]":
        """Let every other stage allocate the memory of a job. Return a function that waits for the stages.

        Args:
            policy: policy of the first stage.
            workload: sizes of the rows.
            given: whether the user gave the policy, so that weights are placed as it says in all stages.
            lossy: the lossy switches.
        """
        self.job += 1
        self.port.job = self.job
        asked = {"policy": policy.to_json(), "workload": workload_json(workload), "given": given,
                 "lossy": lossy.enabled, "lost": self.lost}  # fmt: skip
        self._order(PREPARE, asked)
        self.lost = []
        return lambda: [RemoteStage(self, rank, answer) for rank, answer in self._answers().items()]

    def end(self) -> None:
        """End the present job in all stages, early or not. Wait until they have freed its memory."""
        with contextlib.suppress(StageLost):
            self._order(END)
            for rank in self.orders:
                while (frame := self.results[rank].queue.get()).kind != ANSWER or frame.first != END:
                    pass  # results of sweeps that the driver no longer waits for
                self.measured[rank] = unpacked_json(frame.body)

    def report(self) -> tuple[dict[str, Any], ...]:
        """Return what the other stages measured in the last job, without spans, in their order."""
        measured = (self.measured[rank] for rank in sorted(self.measured))
        return tuple({name: value for name, value in each.items() if name != TRACE} for each in measured)

    def spans(self) -> dict[str, list[Any]]:
        """Return the rows of the other stages in a trace, by name."""
        return {f"{PROCESS} stage {rank}": self.measured[rank].get(TRACE, []) for rank in sorted(self.measured)}

    def leave(self) -> None:
        """End the processes of the other stages."""
        with contextlib.suppress(StageLost):
            self._order(LEAVE)

    def _order(self, kind: int, values: Any = None) -> None:
        for channel in self.orders.values():
            channel.queue.put(Frame(kind, 0, self.job, EMPTY if values is None else packed_json(values)))

    def _answers(self) -> dict[int, Any]:
        """Return the answers of all stages. Raise the first error, after all have answered."""
        frames = {rank: self.results[rank].queue.get() for rank in self.orders}
        for rank, frame in frames.items():
            self.check(rank, frame)
        return {rank: unpacked_json(frame.body) for rank, frame in frames.items()}

    def check(self, rank: int, frame: Frame) -> None:
        """Raise the error that a frame reports, if it does."""
        if frame.kind == FAILED:
            raise _error(f"stage {rank} of 0 to {self.group.size - 1} ({self.group.names[rank]})",
                         unpacked_json(frame.body))  # fmt: skip


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON values."""
    values: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OutOfMemory):
        values |= {name: getattr(error, name) for name in ("tier", "what", "needed", "used", "capacity")}
    if isinstance(error, WorkerLost):
        values |= {name: getattr(error, name) for name in ("place", "why")}
    return values | {"refused": isinstance(error, FlexError)}


def _error(stage: str, values: Mapping[str, Any]) -> FlexError:
    """Return the error of a stage, with its name."""
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
    return StageFailed(f"{stage} failed: {values['type']}: {values['message']}; run the same command again to continue"
                       " the job")  # fmt: skip


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the threads of the other process end with the job."""

    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        self._events.append(Event(copy.copy(sequence), tokens))  # its cached tokens change after the claim

    def release(self, sequence: sweeps.Sequence) -> None:
        self._events.append(Event(copy.copy(sequence), None))
        self._known.pop(sequence.id, None)

    def start(self, sweep: Sweep, texts: Mapping[int, SequenceText]) -> None:
        """Send an order. Does not wait for its execution."""
        order = Order(sweep, self._events)
        self._events = []
        for sequence in dict.fromkeys(piece.sequence for batch in sweep.batches for piece in batch.pieces):
            if (text := texts.get(sequence)) is None:
                continue  # a trunk, whose tokens are the sweep's stems
            if sequence not in self._known:
                order.texts[sequence], self._known[sequence] = text, 0
            if len(text.generated) > self._known[sequence]:
                order.grown[sequence] = text.generated[self._known[sequence] :]
                self._known[sequence] = len(text.generated)
        self._orders.queue.put(Frame(SWEEP, sweep.number, self.driver.job, pack_order(order)))

    @property
    def _orders(self) -> Channel:
        return self.driver.orders[self.rank]

    def result(self) -> StageResult:
        frame = self.driver.results[self.rank].queue.get()
        self.driver.check(self.rank, frame)
        return unpack_result(frame.body)

    def abandon(self) -> None:
        """Do nothing: `close` ends the job in the other process."""

    def close(self) -> None:
        """End the job in all other stages. The last one calls the driver, as they must not wait for one another."""
        if self.rank == self.driver.group.size - 1:
            self.driver.end()


def ports_of(driver: Driver) -> Ports:
    """Return the ports of the first stage."""
    return Ports(after=driver.port)


def pools_json(pools: Mapping[str, Sequence[Pool]]) -> dict[str, Any]:
    """Return pools as JSON values."""
    return {tier: [[p.pages, p.page_tokens, p.batch_pages, p.window] for p in group] for tier, group in pools.items()}
