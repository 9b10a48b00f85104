"""A replica: holds the weights of a model, and computes slices of gpu_batches, one after the other.

A gpu_batch has one forward pass per sweep. Between two slices that the replica computes, the pass skips what other
engines compute: it leaves a layer at its attention, returns the input of layers as their output, and begins a slice in
a layer whose attention is known. Hidden states that enter replace those of the pass.
"""

import contextlib
import socket
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexengine.engine.core import Core
from flexengine.engine.options import EngineOptions
from flexengine.engine.planner import Planner
from flexengine.guests.replicas.messages import (
    HiddenInput,
    ReplicaJob,
    ReplicaKind,
    ReplicaOptions,
    SliceInput,
    SliceResult,
    packed_tensors,
    unpacked_tensors,
)
from flexengine.guests.stages.remote import failure
from flexengine.guests.wire.link import Broken, Connection, Message, unpack
from flexengine.model.forward import Attend, Forward, Inputs, Layer, Pause, Rows
from flexengine.model.skeleton import Skeleton
from flexengine.plan.sizes import aligned
from flexengine.plan.workload import Workload
from flexengine.runtime.lane import forget_variables
from flexengine.worker.regions import Regions


@dataclass
class ReplicaPass:
    """The forward pass of a gpu_batch in a sweep.

    Attributes:
        positions: int64 [1, tokens].
        hidden: [1, tokens, hidden]: entered, or output of the last slice.
        paused: layer at whose attention the pass is paused; None if it has not begun.
    """

    forward: Forward
    positions: Tensor
    hidden: Tensor
    paused: int | None = None

    def slice(self, skeleton: Skeleton, number: int, attended: Tensor) -> Attend:
        """Compute the layer before layer `number` from its attention on, then layer `number` up to its attention.
        Return this pause. attended: attention of the layer before, [1, tokens, heads, value_dim]."""
        forward, layer = self.forward, number - 1
        if self.paused == layer:
            event = forward.resume(attended)
        else:
            event = forward.leave_layer() if self.paused is not None else self._begun(skeleton)
            while isinstance(event, Layer) and event.index < layer:
                event = forward.resume(None)
            event = forward.finish(self.hidden, attended)
        event = self._without_rows(event)
        assert isinstance(event, Layer)
        assert event.index == number
        self.hidden = event.hidden.clone()  # layers may change their input in place
        event = self._without_rows(forward.resume(event.hidden))
        assert isinstance(event, Attend)
        self.paused = number
        return event

    def _begun(self, skeleton: Skeleton) -> Pause:
        """Begin the pass. Hidden states enter later, so embedding rows have no values."""
        event = self.forward.resume()
        assert isinstance(event, Rows)
        blank = torch.zeros(1, skeleton.embedding[1][1], dtype=self.hidden.dtype, device=self.hidden.device)
        return self.forward.resume((blank, torch.zeros_like(self.positions)))

    def _without_rows(self, event: Pause) -> Pause:
        while isinstance(event, Rows):  # experts, which are all in memory
            event = self.forward.resume()
        return event


class ReplicaServer:
    """Answers the messages of one engine."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._core: Core | None = None
        self._passes: dict[int, ReplicaPass] = {}  # by gpu_batch
        self._room: Regions | None = None  # of the passes that are paused
        self._failure: list[Tensor] = []  # in the present sweep; answer to all of its further slices

    @torch.no_grad()
    def run(self) -> None:
        """Answer until the connection ends."""
        answers = {
            ReplicaKind.OPEN: self._open,
            ReplicaKind.LOAD: self._load,
            ReplicaKind.BEGIN: self._begin,
            ReplicaKind.HIDDEN: self._enter,
            ReplicaKind.SLICE: self._compute,
        }
        while True:
            message = self.connection.receive()
            body = self.connection.take()
            try:
                answers[ReplicaKind(message.kind)](message, body)
            except Broken:
                raise
            except Exception as error:
                forget_variables(error)
                self._end_passes()
                self._failure = packed = list(packed_tensors(failure(error), ()))
                if message.kind not in (ReplicaKind.BEGIN, ReplicaKind.HIDDEN):  # these have no answers
                    self.connection.send(ReplicaKind.FAILED, message.numbers, *packed)

    @property
    def core(self) -> Core:
        """The model."""
        if self._core is None:
            raise Broken("a message came before the model was opened")
        return self._core

    def _open(self, message: Message, body: Tensor) -> None:
        given = unpack(body, ReplicaOptions)
        self._core = Core(EngineOptions(**given._asdict(), progress=False))
        self._core.prepare_skips()
        self.connection.send(ReplicaKind.DONE, message.numbers)

    def _load(self, message: Message, body: Tensor) -> None:
        job, core = unpack(body, ReplicaJob), self.core
        self._free_room()
        planner = Planner(core.machine, core.opened)
        if job.lossy != core.lossy:
            core.drop_weights()
            planner.use(job.lossy)
        policy = job.policy
        policy = replace(policy, cache=(1, 0, 0), partition="requests", order="fixed", slots=2,
                         prefill_tokens=policy.gpu_batch_size)  # fmt: skip
        core.opened.prepare()
        layout = planner.layout_under(policy, Workload.of([(1, 1)] * policy.block_size))
        facts, self._room = core.facts, Regions(core.machine)
        token = 3 * facts.sent + 5 * facts.hidden_bytes  # as `plan.delegation.book` has it
        self._room.keep_room("device", aligned(policy.block_size * token), "paused forwards")
        self._room.keep_room("device", layout.account["device"]["workspace"], "workspace")
        core.resident_weights(layout).load_all_resident()
        self.connection.send(ReplicaKind.DONE, message.numbers)

    def _free_room(self) -> None:
        if self._room is not None:
            self._room.free()
            self._room = None

    def _begin(self, message: Message, body: Tensor) -> None:
        self._failure = []
        self._end_passes()

    def _end_passes(self) -> None:
        for each in self._passes.values():
            each.forward.end()
        self._passes.clear()

    def _enter(self, message: Message, body: Tensor) -> None:
        if self._failure:
            return
        (batch,), (positions, hidden) = unpacked_tensors(body, HiddenInput)
        skeleton, device = self.core.skeleton, self.core.machine.compute
        if (known := self._passes.get(batch)) is not None:
            known.hidden = hidden.to(device)
            return
        positions, count = positions.to(device), positions.shape[1]
        inputs = Inputs(torch.zeros_like(positions), positions, torch.arange(count, device=device))
        forward = Forward(skeleton.model, inputs, skeleton.mode(device), recycles=True, rotates=True)
        self._passes[batch] = ReplicaPass(forward, positions, hidden.to(device))

    def _compute(self, message: Message, body: Tensor) -> None:
        if self._failure:
            self.connection.send(ReplicaKind.FAILED, message.numbers, *self._failure)
            return
        given, (attended,) = unpacked_tensors(body, SliceInput)
        own = self._passes[given.batch]
        event = own.slice(self.core.skeleton, given.number, attended.to(self.core.machine.compute))
        result = SliceResult(given.batch, given.number, event.scale, event.softcap)
        tensors = [event.q, event.k, event.v, *([own.hidden] if given.hidden else [])]
        if event.sinks is not None:
            tensors.append(event.sinks)
        self.connection.send(ReplicaKind.RESULT, message.numbers, *packed_tensors(result, tensors))

    def close(self) -> None:
        """Free all memory."""
        self._end_passes()
        self._free_room()
        if self._core is not None:
            self._core.close()


def serve(connection: socket.socket) -> None:
    """Compute slices for the engine at the other end of a socket, until it closes it."""
    server = ReplicaServer(Connection(connection))
    server.connection.allow_silence()
    with contextlib.closing(server):
        try:
            server.run()
        except Broken as error:  # the first engine shows it if it did not end the connection itself
            print(f"the connection to the first engine: {error}", file=sys.stderr)
