"""The first engine's side of replicas: processes of this machine that compute slices for it."""

import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from torch import Tensor

from flexengine.activity import activity
from flexengine.config import parse_size, started_workers
from flexengine.engine.options import EngineOptions, MachineOptions
from flexengine.errors import FlexError, InvalidInput, StageLost
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
from flexengine.guests.stages.remote import error_of
from flexengine.guests.wire.link import Broken, Connection, pack
from flexengine.guests.wire.processes import INTERRUPTS, ChildProcess
from flexengine.lossy import Lossy
from flexengine.plan.layout import Layout
from flexengine.policy import Policy
from flexengine.tier.machine import resolved


class SliceAnswer(NamedTuple):
    """The end of a slice, on the CPU: the question of the attention that follows."""

    result: SliceResult
    tensors: list[Tensor]  # q, k, v, hidden states if requested, sinks if there are any


class Replica:
    """A process that computes slices. Messages are sent in two lanes and received in another."""

    module = "flexengine.guests.replicas"  # that the process runs

    def __init__(self, number: int, engines: int, threads: int) -> None:
        """Start the process. number: of the engine, 1 or more. threads: of its OpenMP."""
        self.number, self.engines = number, engines
        self.owed = deque[ReplicaKind]()  # kinds of the answers that are due and were not read, first one first
        self.connection = Connection(self._start(threads))
        self.connection.allow_silence()

    def _start(self, threads: int) -> socket.socket:
        """Return this end of the connection to a new process."""
        own, other = socket.socketpair()
        environment = {"OMP_NUM_THREADS": str(threads)}
        argv = ["-m", self.module, str(other.fileno()), str(self.number)]
        with other, ExitStack() as undo:
            undo.callback(own.close)
            self.process = ChildProcess(argv, environment, INTERRUPTS, [other.fileno()])
            undo.pop_all()
        return own

    def send(self, kind: ReplicaKind, *parts: Tensor) -> None:
        """Send a message. Raise StageLost if the process has ended."""
        try:
            self.connection.send(kind, (), *parts)
        except Broken as error:
            raise self._lost(error) from error

    def _lost(self, error: Broken) -> StageLost:
        self.connection.close()
        self.owed.clear()
        return StageLost(self.number, self.engines, "replica", f"{error} ({self._end() or 'no message'})")

    def _end(self) -> str:
        """Wait for the process. Return its last messages."""
        return self.process.end()

    def ask(self, kind: ReplicaKind, *parts: Tensor) -> None:
        """Send a message that has an answer. Raise StageLost if the process has ended."""
        self.send(kind, *parts)
        self.owed.append(ReplicaKind.RESULT if kind == ReplicaKind.SLICE else ReplicaKind.DONE)

    def receive(self) -> Tensor:
        """Wait for the first answer that is due. Return its body.

        Raises:
            FlexError: the error that the replica has met, or StageLost.
        """
        try:
            message = self.connection.receive()
            body = self.connection.take()
            kind = self.owed.popleft()  # not before: what was interrupted while it waited is still due
            if message.kind == ReplicaKind.FAILED:
                raise error_of(f"engine {self.number}", unpacked_tensors(body, dict)[0])
            if message.kind != kind:
                raise Broken(f"message of kind {message.kind} came where {kind} was due")
        except Broken as error:
            raise self._lost(error) from error
        return body

    def result(self, batch: int, number: int) -> SliceAnswer:
        """Wait for a slice of a gpu_batch. Raise as `receive` does."""
        body = self.receive()
        try:
            result, tensors = unpacked_tensors(body, SliceResult)
            if (result.batch, result.number) != (batch, number) or len(tensors) < 3:
                found = f"slice {result.number} of gpu_batch {result.batch} with {len(tensors)} tensors"
                raise Broken(f"{found} came where slice {number} of gpu_batch {batch} was due")
            return SliceAnswer(result, tensors)
        except Broken as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._end()


class Replicas:
    """All replicas of an engine."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the processes. Raise the errors of opening a model, or StageLost."""
        self.engines = options.engines
        threads = max(1, len(os.sched_getaffinity(0)) // self.engines)
        self.members: list[Replica] = []
        self._loaded: tuple[Lossy, Policy] | None = None
        sizes = (("--device-mem", options.device_mem), ("--host-mem", options.host_mem))
        device, host = (None if size is None else parse_size(size, name) for name, size in sizes)
        model = None if options.model is None else str(options.model)
        where = options.device, device, host, options.sharing or options.engines
        given = ReplicaOptions(model, *where, options.dtype, options.trust_remote_code, options.allow_symlinks)
        try:
            with activity("starting", "starting the other engines"):
                for number in range(1, self.engines):
                    self.members.append(Replica(number, self.engines, threads))
                self._ask(ReplicaKind.OPEN, pack(given))
        except BaseException:
            self.close()
            raise

    def _ask(self, kind: ReplicaKind, *parts: Tensor) -> None:
        """Send a message to all, and wait for their answers. Raise the first error."""
        for each in self.members:
            each.ask(kind, *parts)
        errors = list[FlexError]()
        for each in self.members:
            try:
                each.receive()
            except FlexError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def load(self, layout: Layout, lossy: Lossy) -> None:
        """Let all replicas read the weights of a job, if they have others. Raise InvalidInput or OutOfMemory."""
        policy = layout.policy
        if policy.weights[0] < 1 or policy.queries_first or policy.half_layers or lossy.flash:
            raise InvalidInput(
                f"--engines is {self.engines}, whose slices need all weights on the device: the policy must have"
                " weights [1, 0, 0], without queries_first and half_layers, and --flash cannot be used; change these,"
                " or leave out --engines"
            )
        self.drain()
        if self._loaded != (lossy, policy):
            self._loaded = None
            with activity("loading", "reading the weights of the other engines"):
                self._ask(ReplicaKind.LOAD, pack(ReplicaJob(lossy, policy)))
            self._loaded = lossy, policy

    def drain(self) -> None:
        """Receive the answers of a sweep, or of a load, that broke off."""
        for each in self.members:
            while each.owed:
                with suppress(FlexError):
                    each.receive()

    def begin(self) -> None:
        """Begin a sweep. No task of an earlier one is left."""
        self.drain()
        for each in self.members:
            each.send(ReplicaKind.BEGIN)

    def enter(self, engine: int, batch: int, positions: Tensor, hidden: Tensor) -> None:
        """Send hidden states of a gpu_batch, [1, tokens, hidden], to an engine. positions: int64 [1, tokens]."""
        values = HiddenInput(batch)
        self.members[engine - 1].send(ReplicaKind.HIDDEN, *packed_tensors(values, (positions, hidden)))

    def request(self, engine: int, given: SliceInput, attended: Tensor) -> None:
        """Let an engine compute a slice. attended: attention before it, [1, tokens, heads, value_dim]."""
        self.members[engine - 1].ask(ReplicaKind.SLICE, *packed_tensors(given, (attended,)))

    def answer(self, engine: int, batch: int, number: int) -> SliceAnswer:
        """Wait for the first slice that was requested from an engine and not answered yet: of this gpu_batch and of
        this number. Raise as `Replica.receive` does."""
        return self.members[engine - 1].result(batch, number)

    def close(self) -> None:
        """End the processes, all at the same time."""
        for each in self.members:
            each.connection.close()
        for each in self.members:
            each.close()


def check_engines(options: MachineOptions) -> None:
    """Raise InvalidInput if several engines cannot compute the jobs of these options."""
    count = options.engines
    if options.group is not None:
        raise InvalidInput(f"--engines is {count}, which cannot be combined with stages; leave out one of them")
    if not options.attention_workers:
        raise InvalidInput(
            f"--engines is {count}, but engines take turns while attention workers attend; add --attention-workers, or"
            " leave out --engines"
        )
    if resolved(options.device) == "cuda":
        _check_gpus(count, started_workers(options.attention_workers) or ())


def _check_gpus(count: int, workers: Sequence[str]) -> None:
    """Raise InvalidInput if GPUs are too few for the engines, or an engine and a worker that is started share one."""
    from flexengine.tier.cuda import visible_gpus

    if count > (gpus := visible_gpus()):
        raise InvalidInput(
            f"--engines is {count}, but torch sees {gpus} GPU{'s' * (gpus != 1)}, and each engine holds all weights on"
            f" one; give --engines {gpus} or less, or --device cpu"
        )
    taken = {"cuda", *(f"cuda:{number:0{width}}" for number in range(count) for width in (1, 2))}
    if shared := next(filter(taken.__contains__, workers), None):
        raise InvalidInput(
            f"--attention-workers names {shared}, but the engines are on cuda:0 to cuda:{count - 1}; name other"
            " GPUs, or cpu"
        )
