"""The driver's side of the stages in other processes: orders leave as frames, results come back as frames.

Ports join stages by frames of kind HIDDEN, whose `number` is the number of the gpu_batch. Frames of a job that ended
early may arrive later; they are dropped. Frames between driver and stage are:

| kind | from | body |
|---|---|---|
| CHOOSE | driver | a JobOrder without a policy; answered by ANSWER with a policy |
| LAY_OUT | driver | a JobOrder; answered by ANSWER with a RemotePlan if the job fits |
| PREPARE | driver | a JobOrder; answered by ANSWER with a RemoteParts |
| SWEEP | driver | an Order; answered by RESULT |
| END | driver | nothing; the job ends, early or not; answered by ANSWER with what the stage has measured |
| LEAVE | driver | nothing; the process ends |
| ANSWER | stage | see above; `number` is the kind of the order |
| FAILED | stage | a dict: the error |
| RESULT | stage | a StageResult |

`number` of SWEEP and RESULT is the number of the sweep.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexengine import __version__
from flexengine.config import SamplingParams
from flexengine.engine.core import Core
from flexengine.engine.options import EngineOptions
from flexengine.engine.stages import Stage, StageDriver, StageResult, Sweep
from flexengine.errors import BadCheckpoint, FlexError, InvalidInput, OutOfMemory, StageFailed, StageLost, WorkerLost
from flexengine.guests.attention_workers.workers import WorkerTier
from flexengine.guests.stages.group import HIDDENS, ORDERS, RESULTS, Frame, FrameChannel, OrderKind, PipelineGroup
from flexengine.guests.wire.link import pack, unpack
from flexengine.lossy import PREDICTORS, Lossy
from flexengine.model import identity
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.execute import Shortage
from flexengine.runtime.trace import PROCESS
from flexengine.schedule import sweeps
from flexengine.schedule.pages import Pool
from flexengine.worker.hidden import Port, Ports
from flexengine.worker.row_sequence import RowSequence

TRACE = "trace"  # in what a stage measured: rows of its spans, see `runtime.trace`
T = TypeVar("T")
# By kind of an error, what is sent of it: attributes that are its arguments.
FIELDS: dict[type[FlexError], tuple[str, ...]] = {
    OutOfMemory: ("tier", "what", "needed", "used", "capacity"),
    WorkerLost: ("place", "place", "why"),
}
LAYOUT = 5  # of frames; raise it with every change of them


class ChannelPort(Port):
    """Port between two stages, for the job with number `job`: one puts, the other takes.

    The gpu_batches of a sweep may come in another order than they are taken: the hidden states of one whose attention
    is delegated leave a stage later.
    """

    def __init__(self, channel: FrameChannel) -> None:
        self.channel, self.job, self._ended = channel, 0, 0
        self._held: dict[int, Frame] = {}  # by gpu_batch, of the present sweep

    def put(self, batch: int, hidden: Tensor) -> None:
        copied = torch.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)
        self.channel.put(Frame(OrderKind.HIDDEN, self.job, batch, hidden.shape[1], copied.view(-1).view(torch.uint8)))

    def take(self, batch: int, target: Tensor) -> None:
        """Copy the hidden states of a gpu_batch to `target`. Raise Ended if the job ends meanwhile."""
        while (frame := self._held.pop(batch, None)) is None or frame.job != self.job:
            while (other := self.channel.get(lambda: self._ended >= self.job)).job != self.job:
                pass  # of a job that ended early
            if other.number in self._held and self._held[other.number].job == self.job:
                raise InvalidInput(
                    f"hidden states of gpu_batch {other.number} came twice, but those of gpu_batch"
                    f" {batch} are due; run the same version in all stages"
                )
            self._held[other.number] = other
        if (frame.tokens, len(frame.body)) != (target.shape[1], target.nbytes):
            raise InvalidInput(
                f"hidden states of gpu_batch {batch} came with {frame.tokens} tokens in"
                f" {len(frame.body)} bytes, but {target.shape[1]} tokens in {target.nbytes} bytes are"
                " due; run the same version in all stages"
            )
        target.copy_(frame.body.view(target.dtype).view(target.shape))

    def end(self, job: int) -> None:
        """Let `take` raise Ended in this job and in earlier ones. May be called from any thread."""
        self._ended = job
        self.channel.wake()


@dataclass(frozen=True)
class JobOrder:
    """A job that a stage plans or prepares."""

    workload: Workload  # sizes of the rows
    lossy: Lossy  # the lossy switches
    policy: Policy  # policy of the first stage; unused where the stage chooses one
    given: bool = False  # whether the user gave the policy, so that weights are placed as it says in all stages
    block: int | None = None  # most sequences alive, for the choice of a policy; None for free choice
    prefill_tokens: int | None = None  # most tokens of a prefill chunk; None for free choice
    lost: Sequence[str] = ()  # places of attention workers that are replaced first
    # First layer, and last layer + 1, of each stage, which it takes first; () if all keep theirs
    layers: Sequence[tuple[int, int]] = ()
    hardware: dict[str, Any] | None = None  # rates to plan with, as in a hardware file; None for the stage's own


def claimant(sequence: sweeps.Sequence) -> sweeps.Sequence:
    """Return a copy of a sequence with all that claims and releases of pages read of it."""
    source = None if sequence.source is None else sweeps.Trunk(sequence.source.id, 0, 0)
    return sweeps.Sequence(sequence.id, 0, 0, cached=sequence.cached, home=sequence.home, source=source)


class SentText(NamedTuple):
    """A text that a stage does not have yet; see `RowSequence`."""

    noise_row: int
    sample: int
    prompt: tuple[int, ...]
    targets: tuple[int, ...]
    sampling: SamplingParams  # without `stop`: the driver ends sequences

    def sequence(self, number: int) -> RowSequence:
        """Return the sequence with all that computing reads of it. number: of the sequence."""
        sequence = RowSequence(number, 0, 0, sample=self.sample, noise_row=self.noise_row, sampling=self.sampling)
        sequence.prompt, sequence.targets = self.prompt, self.targets
        return sequence


class Order(NamedTuple):
    """A sweep for a stage in another process, with all that has changed since the last sweep."""

    sweep: Sweep  # the sweep
    # Claims and releases of pages, in order: a `claimant`, and the tokens to hold; None if its pages are released.
    events: list[tuple[sweeps.Sequence, int | None]]
    texts: dict[int, SentText]  # by sequence, texts that the stage does not have yet
    grown: dict[int, Sequence[int]]  # by sequence, tokens that were generated since the last order


@dataclass(frozen=True)
class RemotePlan:
    """The plan of a job in one stage."""

    layers: tuple[int, int, int]  # first layer, last layer + 1, and layers of the whole model
    policy: Policy
    seconds: float  # predicted
    bottleneck: str  # lane with the most work


class RemoteParts(NamedTuple):
    """What the driver reads of a prepared `Stage`."""

    layers: tuple[int, int, int]
    policy: Policy
    pools: dict[str, tuple[Pool, ...]]
    cuda: bool


class Driver(StageDriver):
    """The other stages of a pipeline, which are other processes of its group.

    Attributes:
        group: the processes.
        port: port to the second stage.
        measured: by stage, what it measured in the last job, as JSON values.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self.group, self.job = group, 0
        self.port = ChannelPort(group.send(1, HIDDENS))
        self.ports = Ports(after=self.port)
        others = range(1, group.size)
        self.orders = {rank: group.send(rank, ORDERS, most=64) for rank in others}
        self.results = {rank: group.receive(rank, RESULTS) for rank in others}
        self.measured: dict[int, dict[str, Any]] = {}
        self.lost = list[str]()

    def ask(self, kind: OrderKind, answer: type[T], job: JobOrder) -> Callable[[], dict[int, T]]:
        """Send a job to all other stages. Return a function that waits for their answers, by rank, and raises the
        first error, which names the stage, after all have answered."""
        self._order(kind, pack(job))

        def answers() -> dict[int, T]:
            answered = {rank: self.results[rank].get() for rank in self.orders}
            for rank, frame in answered.items():
                self.check(rank, frame)
            return {rank: unpack(frame.body, answer) for rank, frame in answered.items()}

        return answers

    def prepare(
        self, policy: Policy, workload: Workload, given: bool, lossy: Lossy
    ) -> "Callable[[], list[RemoteStage]]":
        self.job += 1
        self.port.job = self.job
        job = JobOrder(workload, lossy, policy, given, lost=self.lost)
        answers = self.ask(OrderKind.PREPARE, RemoteParts, job)
        self.lost = []
        return lambda: [RemoteStage(self, rank, parts) for rank, parts in answers().items()]

    def end(self) -> None:
        with suppress(StageLost):
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
        with suppress(StageLost):
            self._order(OrderKind.LEAVE)

    def _order(self, kind: OrderKind, *body: Tensor) -> None:
        for channel in self.orders.values():
            channel.put(Frame(kind, self.job, 0, 0, *body))

    def check(self, rank: int, frame: Frame) -> None:
        """Raise the error that a frame reports, if it does."""
        if frame.kind == OrderKind.FAILED:
            stage = f"stage {rank} of 0 to {self.group.size - 1} ({self.group.names[rank]})"
            raise error_of(stage, unpack(frame.body, dict))


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as values that can be packed."""
    values: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, Shortage):  # of a task
        error = OutOfMemory(error.tier, error.what, error.needed)
    fields = next((fields for kind, fields in FIELDS.items() if isinstance(error, kind)), ())
    return values | {"refused": isinstance(error, FlexError), "arguments": [getattr(error, name) for name in fields]}


def error_of(stage: str, values: Mapping[str, Any]) -> FlexError:
    """Return the error of a process, from `failure`. stage: name of the process."""
    message = f"{stage}: {values['message']}"
    if arguments := values["arguments"]:
        error: FlexError = next(kind for kind, fields in FIELDS.items() if len(fields) == len(arguments))(*arguments)
        error.args = (message,)
        return error
    if values["refused"]:
        return InvalidInput(message)
    why = f"{values['type']}: {values['message']}"
    return StageFailed(f"{stage} failed: {why}; run the same command again to continue the job")


class RemoteStage(Stage):
    """A stage in another process."""

    def __init__(self, driver: Driver, rank: int, parts: RemoteParts) -> None:
        self.driver, self.rank = driver, rank
        self.layers, self.policy, self.pools, self.cuda = parts
        self._events = list[tuple[sweeps.Sequence, int | None]]()
        self._known: dict[int, int] = {}  # by sequence, number of generated tokens that the stage has

    def __exit__(self, *error: Any) -> None:
        """Do nothing: the threads of the other process end with the job."""

    def claim(self, sequence: sweeps.Sequence, tokens: int) -> None:
        self._events.append((claimant(sequence), tokens))  # now: its cached tokens change after the claim

    def release(self, sequence: sweeps.Sequence) -> None:
        self._events.append((claimant(sequence), None))
        self._known.pop(sequence.id, None)

    def start(self, sweep: Sweep, members: Mapping[int, RowSequence]) -> None:
        """Send an order. Does not wait for its execution."""
        order = Order(sweep, self._events, {}, {})
        self._events = []
        for sequence in dict.fromkeys(piece.sequence for batch in sweep.batches for piece in batch.pieces):
            if (text := members.get(sequence)) is None:
                continue  # a trunk, whose tokens are the sweep's stems
            if sequence not in self._known:
                sampling = replace(text.sampling, stop=(), chat_template_kwargs=None)
                order.texts[sequence] = SentText(text.noise_row, text.sample, text.prompt, text.targets, sampling)
                self._known[sequence] = 0
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


def check_alike(core: Core, options: EngineOptions, group: PipelineGroup) -> None:
    """Raise InvalidInput, in all processes, if a stage differs from the first one in version, model, or a switch that
    changes results. Wait for all stages."""
    predictors = {}
    if core.lossy.flash == PREDICTORS or f"flash-{PREDICTORS}" in options.allow:
        try:
            predictors = {"predictors of neurons": core.opened.flash.latest(core.lossy.sparsity).digest()[:16]}
        except BadCheckpoint:  # all stages must know of it; the stage that has them raises the error when it loads them
            predictors = {"predictors of neurons": "damaged"}
    own: dict[str, Any] = {
        "flexengine": f"{__version__}, frames {LAYOUT}", "python torch": torch.__version__,
        "model": core.source.name, "files of the model": identity.digest(identity.given_files(core.source))[:16],
        **{f"setting {name}": value for name, value in core.numerics.items() if name not in ("torch", "policy")},
        "lossy switches": core.lossy.enabled, "switches to choose from": sorted(options.allow),
        "policy": options.policy.to_json() if options.policy else None,
        "layers": core.skeleton.total,
        "attention workers": [f"{tier.client.name}, number {tier.client.pool}" for tier in core.machine.workers
                              if isinstance(tier, WorkerTier)],
        "strategy": options.strategy.to_json() if options.strategy else None,
        **predictors,
    }  # fmt: skip
    every = [json.loads(each) for each in group.exchange("identity", json.dumps(own))]
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other.get(name) != value:
                there = f"stage {rank} ({group.names[rank]}) has {name} {other.get(name)!r}"
                here = f"stage 0 ({group.names[0]}) has {value!r}"
                raise InvalidInput(f"{there}, but {here}; all stages must have the same")
