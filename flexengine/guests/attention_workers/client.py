"""The engine's side of an attention worker: its memory, and questions that it answers."""

import contextlib
import itertools
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexengine.activity import message as say
from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers.devices import identity
from flexengine.guests.attention_workers.messages import (
    PROTOCOL,
    TO_ENGINE,
    MessageKind,
    WorkerQuestion,
    WorkerTables,
    text,
    words,
)
from flexengine.guests.attention_workers.pool import mapped_file
from flexengine.guests.attention_workers.transit import PART, PARTS, PageSpan, Transit
from flexengine.guests.wire.link import Broken, Connection, Message, pack
from flexengine.tier.base import aligned

END_SECONDS = 5.0  # until `close` no longer waits for a thread


@dataclass(eq=False)
class PendingAnswer:
    """Bytes that a worker will send."""

    targets: Sequence[Tensor]  # contiguous tensors in RAM that receive the bytes, in order
    ticket: int = -1  # number of the question
    open: bool = False  # whether the queries went first, and keys and values are not sent yet
    arrived: Callable[[], object] | None = None  # called when the answer has come, before `ended` is done
    # Done when attention over the cached tokens is computed, if the queries went first, and when the bytes are in the
    # targets. Both raise WorkerLost if the worker has died or has failed.
    cached: Future[None] = field(default_factory=Future)
    ended: Future[None] = field(default_factory=Future)

    def wait_cached(self) -> None:
        """Wait until attention over the cached tokens is computed, if the queries went first. Raise as `wait`."""
        self.cached.result()
        if self.ended.done():
            self.ended.result()

    def wait(self) -> None:
        """Wait until the bytes are in the targets. Raise WorkerLost if the worker has died or has failed."""
        self.ended.result()

    def end(self, error: WorkerLost | None = None) -> None:
        """Let those that wait go on, or raise an error."""
        for part in (self.cached, self.ended):
            with contextlib.suppress(InvalidStateError):  # it is done
                part.set_result(None) if error is None else part.set_exception(error)


class Client:
    """A connection to a worker. Threads may call all methods at the same time.

    Args:
        shares: whether the worker is on this machine, so that it maps the same memory. Pages, questions and answers
            are then written and read there, and messages hold none of them.
        threads: threads that compute, if the worker uses the processors of this machine; else 0.
        engine: number of the engine, drawn here if it is None. A worker ends an older connection of the same engine.

    Attributes:
        place: name of its place, such as worker1.
        name: place, host and process, for messages.
        memory: bytes for pages that the worker has, without those that other engines hold.
        others: bytes that other engines held when the worker last told.
        pages: kind of memory that holds its pages: ram, file or device.
        rate: bytes per second at which it reads its file, or attends to pages of its device, as it has measured it; 0
            if this process measures it.
        pool: number that the worker has drawn.
        patience: seconds for which a lost worker may be started again by others, before it counts as lost for good.
        asked: bytes of queries, keys and values sent.
        answered: bytes of answers to them.
        shared: memory that the worker maps too, uint8, by handle.
        transit: memory through which pages pass, if the worker maps the same and holds pages on a device; else None.
    """

    patience = 0.0
    _handles = itertools.count()  # of all clients: memory of a new worker may take the handle that a lost worker had

    def __init__(
        self, link: Connection, place: str, shares: bool = False, threads: int = 0, engine: int | None = None
    ) -> None:
        """Compare versions with the worker. Raise InvalidInput if it refuses, WorkerLost if it has ended."""
        self.link, self.place, self.name, self.threads = link, place, place, threads
        self.asked, self.answered, self.shares = 0, 0, shares
        self.shared: dict[int, Tensor] = {}  # by handle
        self._tickets = itertools.count()
        self._pending: dict[int, PendingAnswer] = {}
        self._ready = queue.SimpleQueue[bool | str | WorkerLost]()  # text: what an engine waits for
        self._lost: WorkerLost | None = None
        self._lock, self._allocating = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        link.limits = TO_ENGINE
        try:
            number = secrets.randbits(62) if engine is None else engine
            link.send(MessageKind.HELLO, (PROTOCOL, number), text(identity()))
            answer = link.receive()
            body = words(link.take())
        except Broken as error:
            link.close()
            raise self._error(str(error)) from error
        if answer.kind != MessageKind.HELLO:
            link.close()
            raise InvalidInput(f"attention worker {place} refuses: {body}; run the same version on all machines")
        about, _, self.pages = body.partition("\n")
        self.memory, self.name = answer.numbers[1], f"{place} ({about})"
        self.others, self.rate, self.pool = answer.numbers[2] - self.memory, *answer.numbers[3:5]
        link.beat()
        self._thread = threading.Thread(target=self._receive, name=f"flexengine-{place}", daemon=True)
        self._thread.start()
        self.transit: Transit[PendingAnswer] | None = None
        if shares and self.pages == "device":
            try:
                if (transit := self.allocate(PARTS * PART, counted=False, transit=True)) is not None:
                    self.transit = Transit(self.transfer, self.shared[transit])
            except BaseException:
                Client.close(self)  # the connection alone: LocalWorker ends the process, and reads its last messages
                raise

    @property
    def local_bytes(self) -> int:
        """Return the bytes of this machine's RAM that the worker may take for pages, or through which they pass."""
        if self.pages == "device":
            return 0 if self.transit is None else PARTS * PART
        return self.memory + self.others if self.shares else 0

    def rename(self, place: str) -> None:
        self.place, self.name = place, place + self.name.removeprefix(self.place)
        if self._lost is not None:
            self._lost.place = place

    def _error(self, why: str) -> WorkerLost:
        return WorkerLost(self.place, self.name, why)

    def _send(
        self, kind: MessageKind, numbers: Sequence[int] = (), *parts: Tensor, descriptor: int | None = None
    ) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            self.link.send(kind, numbers, *parts, descriptor=descriptor)
        except Broken as error:
            if not isinstance(error.__cause__, TimeoutError):
                self._thread.join(END_SECONDS)  # which reads what the worker sent before it ended: it may say why
            raise self._fail(str(error)) from error

    def allocate(
        self, nbytes: int, counted: bool = True, handle: int | None = None, transit: bool = False
    ) -> int | None:
        """Return the handle of new memory; None if the worker has too little, as other engines may hold some.

        Args:
            counted: whether it is part of the worker's memory for pages; else it is shared memory of this process.
            handle: the handle; None for a new one.
            transit: whether pages pass through this shared memory.
        """
        handle, size = next(self._handles) if handle is None else handle, aligned(max(nbytes, 1))
        with self._allocating:
            if self.shares and not (counted and self.pages == "device"):
                descriptor = os.memfd_create(f"flexengine-{self.place}", os.MFD_CLOEXEC)
                try:
                    os.ftruncate(descriptor, size)
                    self._send(MessageKind.SHARE, (handle, size, 2 if transit else int(counted)), descriptor=descriptor)
                    self.shared[handle] = mapped_file(descriptor, size)
                finally:
                    os.close(descriptor)
            else:
                self._send(MessageKind.ALLOCATE, (handle, size))
            ready = self._ready.get()
        if isinstance(ready, WorkerLost):
            raise ready
        if not ready:
            self.shared.pop(handle, None)
        return handle if ready else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other engine measure this worker while the block runs. Entering it waits until they have ended."""
        with self._allocating:
            self._send(MessageKind.ALONE, (1,))
            while isinstance(ready := self._ready.get(), str):
                say(f"{self.name}: {ready}")
            if isinstance(ready, WorkerLost):
                raise ready
        try:
            yield
        finally:
            self._send(MessageKind.ALONE, (0,))

    def free(self, handle: int) -> None:
        """Free memory. Does nothing more if the worker is lost."""
        self.shared.pop(handle, None)
        if self._lost is None and not self._closed.is_set():
            with contextlib.suppress(WorkerLost):
                self._send(MessageKind.FREE, (handle,))

    def write_all(self, spans: Sequence[tuple[int, int, Tensor]]) -> None:
        """Copy contiguous tensors in RAM to memory. spans: handle, first byte, and tensor of each."""
        if (transit := self.transit) is not None:
            transit.write(PageSpan(*span) for span in spans)
            return
        for span in spans:
            self.write(*span)

    def read_all(self, spans: Sequence[tuple[int, int, Tensor]]) -> None:
        """Copy memory to contiguous tensors in RAM. spans: as for `write_all`."""
        if (transit := self.transit) is not None:
            waiting = [transit.read(PageSpan(*span) for span in spans)]
        else:
            waiting = [self.read(*span) for span in spans]
        for pending in filter(None, waiting):
            pending.wait()

    def write(self, handle: int, start: int, source: Tensor) -> None:
        """Copy a contiguous tensor in RAM to byte `start` of memory."""
        if (shared := self.shared.get(handle)) is not None:
            shared[start : start + source.nbytes].copy_(source.view(-1).view(torch.uint8))
        elif (transit := self.transit) is not None:
            transit.write([PageSpan(handle, start, source)])
        else:
            self._send(MessageKind.WRITE, (handle, start), source)

    def read(self, handle: int, start: int, target: Tensor) -> PendingAnswer:
        """Begin to copy bytes from byte `start` of memory on to a contiguous tensor in RAM."""
        (done := PendingAnswer([])).end()
        if (shared := self.shared.get(handle)) is not None:
            target.view(-1).view(torch.uint8).copy_(shared[start : start + target.nbytes])
            return done
        if (transit := self.transit) is not None:
            return transit.read([PageSpan(handle, start, target)]) or done
        ticket, pending = self._new([target])
        self._send(MessageKind.READ, (ticket, handle, start, target.nbytes))
        return pending

    def transfer(
        self,
        kind: MessageKind,
        at: int,
        rows: Tensor,
        ended: Callable[[Future[None]], None],
        arrived: Callable[[], object],
    ) -> PendingAnswer:
        """Begin a transfer between pages and `transit`. Raise WorkerLost.

        Args:
            kind: PUT or GET.
            at: first byte in `transit`.
            rows: int64 [n, 3]: handle, first byte and bytes of pages.
            ended: called when it has ended, also if the worker is lost.
            arrived: called before that, unless it has failed.
        """
        ticket, pending = self._new([])
        pending.arrived = arrived
        self._send(kind, (ticket, at), rows)
        pending.ended.add_done_callback(ended)
        return pending

    def tables(self, batch: int, group: int, tables: WorkerTables) -> None:
        """Send the page tables of a gpu_batch for a group of layers."""
        numbers = (batch, group, tables.tables.shape[1], len(tables.pages), len(tables.copies))
        self._send(MessageKind.TABLES, numbers, *(part.contiguous() for part in tables))

    def sinks(self, layer: int, sinks: Tensor) -> None:
        """Send the sinks of a layer, fp32 [heads] in RAM."""
        self._send(MessageKind.SINKS, (layer,), sinks)

    def ask(self, layer: int, question: WorkerQuestion, vectors: Tensor, target: Tensor) -> PendingAnswer:
        """Send a question, with queries, keys and values, or with queries alone if they go first (uint8, contiguous).
        `target` (uint8, contiguous) receives the answer. If the question names shared memory, both are there."""
        packed, apart = pack(question._replace(nbytes=vectors.nbytes)), question.shared is None
        ticket, pending = self._new([target] if apart else [])
        pending.open = question.first
        self._send(MessageKind.ASK, (ticket, layer, packed.nbytes), packed, *([vectors] if apart else []))
        with self._lock:
            self.asked += vectors.nbytes
            self.answered += target.nbytes
        return pending

    def add(self, pending: PendingAnswer, vectors: Tensor, at: int | None) -> None:
        """Send the keys and values (uint8, contiguous) of a question whose queries went first. at: first byte of the
        vectors in the question's shared memory; None if they are not there."""
        pending.open = False
        self._send(MessageKind.ADD, (pending.ticket, at or 0, vectors.nbytes), *([vectors] if at is None else []))
        with self._lock:
            self.asked += vectors.nbytes

    def drain(self, pending: PendingAnswer) -> None:
        """Wait until the worker uses memory of a question no more, also if its keys and values are never sent. Raise
        WorkerLost as `PendingAnswer.wait`."""
        if not pending.open:
            pending.wait()
            return
        pending.wait_cached()
        with self._lock:
            self._pending.pop(pending.ticket, None)  # the worker forgets the question, too

    def _new(self, targets: Sequence[Tensor]) -> tuple[int, PendingAnswer]:
        ticket = next(self._tickets)
        pending = PendingAnswer(targets, ticket)
        with self._lock:
            self._pending[ticket] = pending
        if self._lost is not None:
            raise self._lost
        return ticket, pending

    def _receive(self) -> None:
        try:
            while True:
                self._handle(self.link.receive())
        except Exception as error:  # Broken, or no memory for a body: in any case nothing more is received
            self._fail(str(error))

    def _handle(self, message: Message) -> None:
        number = message.numbers[0]
        if message.kind == MessageKind.READY:
            self.others = message.numbers[3] - message.numbers[2]
            self._ready.put(bool(message.numbers[1]))
            return
        if message.kind == MessageKind.WAITS:
            self._ready.put(words(self.link.take()))
            return
        if message.kind == MessageKind.REFUSE:
            raise Broken(words(self.link.take()))
        with self._lock:
            pending = self._pending.get(number)
        if pending is None:
            raise Broken(f"it answered question {number}, which was not asked")
        if message.kind == MessageKind.CACHED:
            pending.cached.set_result(None)
            return
        error = None
        if message.kind == MessageKind.FAILED:
            error = self._error(f"it could not answer ({words(self.link.take())})")
        elif message.nbytes != (due := sum(target.nbytes for target in pending.targets)):
            raise Broken(f"it answered with {message.nbytes} bytes, but {due} were due")
        else:
            for target in pending.targets:
                self.link.take_into(target)
            if pending.arrived is not None:
                pending.arrived()
        with self._lock:
            self._pending.pop(number, None)  # only now: after an error, `_fail` ends it
        pending.end(error)

    def _fail(self, why: str) -> WorkerLost:
        """Let all calls that wait, and all later ones, raise WorkerLost, and return it."""
        with self._lock:
            lost = self._lost = self._lost or self._error(why)
            waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            pending.end(lost)
        self._ready.put(lost)
        return lost

    def close(self) -> None:
        """End the connection."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(WorkerLost):
                self._send(MessageKind.BYE)
            self.link.close()
            self._thread.join(END_SECONDS)
            self.shared.clear()
            self.transit = None  # else its memory stays until garbage is collected
