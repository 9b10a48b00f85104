"""An attention worker: holds memory for engines, and computes decode attention over pages in it.

Each engine has a connection, with a thread that receives messages. This thread writes pages straight into the memory,
and hands questions to the pool, which all connections share (`pool.py`); another thread sends the answers.
The engine orders its messages: pages that a question names are not written before the answer.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future

import torch
from torch import Tensor

from flexengine.guests.attention_workers.answers import Answers, Parts, PendingQuestion
from flexengine.guests.attention_workers.messages import (
    PROTOCOL,
    MessageKind,
    WorkerQuestion,
    WorkerTables,
    text,
    to_worker,
    words,
)
from flexengine.guests.attention_workers.pool import MOST_ENGINES, Records, RecordsFull, WorkerPool, mapped_file
from flexengine.guests.attention_workers.transit import PART, PARTS
from flexengine.guests.wire.link import MOST_TEXT, SILENT_SECONDS, Broken, Connection, Message, unpack
from flexengine.tier.base import aligned


class AttentionServer:
    """Serves one engine over one connection.

    Args:
        link: the connection.
        pool: memory and processors, shared with other connections.
        name: of the engine, for messages.
    """

    def __init__(self, link: Connection, pool: WorkerPool, name: str = "the engine that started the worker") -> None:
        self.device = pool.device
        self.sinks: dict[int, Tensor] = {}  # fp32 [heads], by layer, on the device
        self.link, self.pool, self.name = link, pool, name
        link.pieces = self.device.pieces
        self._records = Records(pool)
        self._ousted = ""  # why the worker has ended the connection
        self.engine = 0  # number that the engine has drawn
        self._alone = False  # whether this engine measures
        self._held: dict[int, Tensor] = {}  # by handle: uint8 [bytes]
        self._counted = set[int]()  # handles of memory for pages
        self._transit: int | None = None  # handle of the shared memory through which pages pass; None if there is none
        self._answers = Answers(self.device, self.sinks, self._pages)
        # by gpu_batch and group: in RAM, and on the device
        self._tables: dict[tuple[int, int], tuple[WorkerTables, WorkerTables]] = {}
        self._first: dict[int, PendingQuestion] = {}  # by ticket: questions whose keys and values have not come
        # with the records that end with the answer
        self._asked = queue.SimpleQueue[tuple[PendingQuestion, Future[Parts], tuple[Hashable, ...]] | None]()
        self._ended, self._leaving, self._left = (threading.Event() for _ in range(3))

    def run(self) -> None:
        """Serve until the engine ends the connection. Raise Broken if it was not ended in good order."""
        reply = threading.Thread(target=self._reply, daemon=True)
        self.device.begin_thread()
        try:
            self._greet()
            self.link.beat()
            reply.start()
            while (message := self.link.receive()).kind != MessageKind.BYE:
                try:
                    self._handle(message)
                except RecordsFull as error:
                    self._refuse(str(error))
                except (RuntimeError, ValueError, MemoryError) as error:  # of a body that is no tensor of its kind
                    raise Broken(f"a message of kind {message.kind} cannot be read ({error})") from error
        except Broken as error:
            raise Broken(self._ousted or str(error)) from error
        finally:
            self._ended.set()
            self._asked.put(None)
            self.link.close()
            if reply.ident is not None:  # it was started
                reply.join()
            taken = self._taken
            self._first.clear()
            if self._transit in self._held:
                self.device.unlock(self._held[self._transit])
            self._held.clear()
            if self._alone:
                self._end_alone()
            self.device.give_back()
            self.pool.give_back(taken)
            self._records.drop_all()
            self.pool.part(self.engine, self.leave)
            self._left.set()

    def leave(self, why: str = "it has connected again") -> None:
        """End the connection, and return when its memory is given back."""
        self._ousted = self._ousted or why
        self._leaving.set()
        self.link.close()
        self._left.wait(SILENT_SECONDS / 2)  # the new connection waits for its greeting

    def _greet(self) -> None:
        self.link.limits = {MessageKind.HELLO: MOST_TEXT}
        hello = self.link.receive()
        engine = words(self.link.take())
        own = self.device.identity()
        if hello.kind != MessageKind.HELLO or hello.numbers[0] != PROTOCOL or not f"{engine} ".startswith(f"{own} "):
            other = f"the engine runs {engine}, protocol {hello.numbers[0]}"
            self._refuse(f"it runs {own}, protocol {PROTOCOL}, but {other}")
        self.engine, pool = hello.numbers[1], self.pool
        self.link.limits = to_worker(pool.memory, pool.records)
        if not pool.join(self.engine, self.leave):
            self._refuse(f"{MOST_ENGINES} engines use it, the most; end one of them, or start another worker")
        numbers = PROTOCOL, pool.memory - pool.taken, pool.memory, pool.rate, pool.number
        name = f"{os.uname().nodename}, process {os.getpid()}{', ' * bool(self.device.name)}{self.device.name}"
        self.link.send(MessageKind.HELLO, numbers, text(f"{name}\n{pool.kind}"))

    def _refuse(self, why: str) -> None:
        """Tell the engine why its connection ends, and raise Broken."""
        self.link.send(MessageKind.REFUSE, (), text(why))
        self.link.finish()
        raise Broken(why)

    def _drop_first(self, batch: int | None = None) -> None:
        """Forget the questions of a gpu_batch, or of all, whose keys and values have not come."""
        gone = [ticket for ticket, asked in self._first.items() if batch in (None, asked.question.batch)]
        for ticket in gone:
            del self._first[ticket]
            self._records.drop(ticket)

    def _handle(self, message: Message) -> None:
        link, (a, b, c, d, e) = self.link, message.numbers
        if message.kind == MessageKind.ALLOCATE:
            self._ready(a, self._allocate(a, b, self.pool.buffer))
        elif message.kind == MessageKind.SHARE:
            descriptor = link.take_file()
            other = c not in (0, 1, 2) or (c == 1 and self.pool.kind == "device") or (c == 2 and b > PARTS * PART)
            if other or b < 1:  # a mapping of 0 bytes is one of the whole file
                os.close(descriptor)
                raise Broken(f"{b} bytes of memory that both processes map came, of kind {c}, which does not fit here")
            try:
                ready = self._allocate(a, b, lambda nbytes: mapped_file(descriptor, nbytes), counted=c == 1)
            finally:
                os.close(descriptor)  # the mapping stays
            if ready and c == 2:
                self._open_transit(a)
            self._ready(a, ready)
        elif message.kind == MessageKind.ALONE:
            self._begin_alone() if a else self._end_alone()
        elif message.kind == MessageKind.FREE:
            freed = len(self._held[a]) if a in self._counted else 0
            if a == self._transit:
                raise Broken("the memory through which pages pass ends with the connection")
            self._counted.discard(a)
            self._held.pop(a, None)
            self._records.drop(("held", a))
            if not self._held.keys() - {self._transit}:
                self._drop_first()
                self._tables.clear()
                self.sinks.clear()
                self._records.drop_all(tuple)  # questions that are being answered remain
            if freed:
                self.device.give_back()
            self.pool.give_back(freed)
        elif message.kind == MessageKind.WRITE:
            self.device.receive(link, self._part(a, b, message.nbytes))
        elif message.kind == MessageKind.READ:
            link.send(MessageKind.DATA, (a,), self._part(b, c, d))
        elif message.kind in (MessageKind.PUT, MessageKind.GET):
            for handle, start, nbytes in link.take().view(torch.int64).view(-1, 3).tolist():
                pages, shared = self._pages(handle, start, nbytes), self._part(self._transit, b, nbytes)
                target, source = (pages, shared) if message.kind == MessageKind.PUT else (shared, pages)
                target.copy_(source, non_blocking=True)
                b += nbytes
            self.device.synchronize()
            link.send(MessageKind.DATA, (a,))
        elif message.kind == MessageKind.TABLES:
            # A sweep of which the engine sends no keys and values any more broke off.
            self._drop_first(a)
            self._records.book(("tables", a, b), message.nbytes)
            numbers = link.take().view(torch.int32)
            tables = WorkerTables.unpack(numbers, c, d, e)
            self._tables[a, b] = tables, WorkerTables.unpack(self.device.put(numbers), c, d, e)
            self.device.synchronize()
        elif message.kind == MessageKind.SINKS:
            self._records.book(("sinks", a), message.nbytes)
            self.sinks[a] = self.device.put(link.take().view(torch.float32))
            self.device.synchronize()
        elif message.kind == MessageKind.ASK:
            self._ask(a, b, c, message.nbytes)
        elif message.kind == MessageKind.ADD:
            self._add(a, b, c, message.nbytes)

    def _begin_alone(self) -> None:
        if self._alone:
            raise Broken("measuring begins twice")
        self.pool.begin_alone(self.name, self.leave, self._wait)
        self._alone = True
        self._ready(0, True)

    def _wait(self, why: str) -> None:
        if self._leaving.is_set():
            raise Broken("the engine has connected again")
        if why:
            self.link.send(MessageKind.WAITS, (), text(why))

    def _end_alone(self) -> None:
        if not self._alone:
            raise Broken("measuring ends, but did not begin")
        self._alone = False
        self.pool.end_alone()

    def _ready(self, handle: int, ready: bool) -> None:
        others = self.pool.taken - self._taken
        self.link.send(MessageKind.READY, (handle, int(ready), self.pool.memory - others, self.pool.memory))

    def _allocate(self, handle: int, nbytes: int, make: Callable[[int], Tensor], counted: bool = True) -> bool:
        if nbytes < 0 or handle in self._held:
            raise Broken(f"memory {handle} of {nbytes} bytes cannot be allocated")
        self._records.book(("held", handle), 0)
        size = aligned(nbytes)
        if counted and not self.pool.take(size):
            return False
        try:
            self._held[handle] = make(size)
        except (MemoryError, OSError, RuntimeError, ValueError):
            self.pool.give_back(size * counted)
            return False
        if counted:
            self._counted.add(handle)
        return True

    @property
    def _taken(self) -> int:
        return sum(len(self._held[handle]) for handle in self._counted)

    def _open_transit(self, handle: int) -> None:
        if self._transit is not None:
            raise Broken("a second memory came through which pages pass")
        self._transit = handle
        self.device.lock(self._held[handle])

    def _part(self, handle: int | None, start: int, nbytes: int) -> Tensor:
        held = None if handle is None else self._held.get(handle)
        if held is None or not 0 <= start <= start + nbytes <= len(held):
            size = "none" if held is None else f"{len(held)} bytes"
            raise Broken(f"bytes {start} to {start + nbytes} of memory {handle} were named, which has {size}")
        return held[start : start + nbytes]

    def _ask(self, ticket: int, layer: int, nbytes: int, whole: int) -> None:
        if ticket in self._records:
            raise Broken(f"question {ticket} came twice")
        self._records.book(ticket, 2 * whole)  # an answer is no larger than its question
        head = torch.empty(min(nbytes, whole + 1), dtype=torch.uint8)
        self.link.take_into(head)
        question = unpack(head, WorkerQuestion)
        vectors = self._vectors(question.shared, question.at, question.nbytes, whole - nbytes)
        tables = self._tables.get((question.batch, question.group))
        if tables is None or (question.sinks and layer not in self.sinks):
            raise Broken(f"a question about layer {layer} of gpu_batch {question.batch} came before its page tables")
        asked = PendingQuestion(ticket, layer, question, vectors, *tables)
        if question.first:
            self._first[ticket] = asked
        work = self._answers.attend_cached if question.first else self._answers.attend
        self._queue(asked, lambda: work(asked), *[] if question.first else [ticket])

    def _add(self, ticket: int, at: int, nbytes: int, whole: int) -> None:
        asked, record = self._first.pop(ticket, None), f"added {ticket}"
        if asked is None:
            raise Broken(f"keys and values of question {ticket} came, whose queries did not go first")
        self._records.book(record, 2 * whole)
        vectors = self._vectors(asked.question.shared, at, nbytes, whole)
        self._queue(asked, lambda: self._answers.attend_new(asked, vectors), ticket, record)

    def _pages(self, handle: int, start: int, nbytes: int) -> Tensor:
        if handle not in self._counted and self.pool.kind == "device":
            raise ValueError(f"memory {handle} holds no pages")
        return self._part(handle, start, nbytes)

    def _vectors(self, shared: int | None, at: int, nbytes: int, whole: int) -> Tensor:
        """Return what a question brings, uint8 in RAM: bytes of shared memory, or the rest of the body."""
        if shared is None:
            vectors = self.device.staging(max(0, whole))
            self.link.take_into(vectors)
            return vectors
        return self._part(shared, at, nbytes)

    def _queue(self, asked: PendingQuestion, work: Callable[[], Parts], *records: Hashable) -> None:
        """Let the pool's thread compute a part of an answer, unless the connection has ended. Then drop `records`."""

        def compute() -> Parts:
            if self._ended.is_set():
                raise Broken("the connection has ended")
            parts = work()
            return None if parts is None else self.device.fetch(parts)

        self._asked.put((asked, self.pool.thread.submit(compute), records))

    def _reply(self) -> None:
        """Send answers in the order of the questions. After the connection has ended, wait for those that are being
        computed."""
        while (item := self._asked.get()) is not None:
            asked, answer, records = item
            with contextlib.suppress(Broken):  # the connection has ended, so the thread that receives ends, too
                try:
                    if (found := answer.result()) is not None:
                        self._answer(asked, found)
                except Exception as error:  # told to the engine, whose job computes the rows again
                    self.link.send(MessageKind.FAILED, (asked.ticket,), text(f"{type(error).__name__}: {error}"))
            del item, asked, answer
            self._records.drop(*records)

    def _answer(self, asked: PendingQuestion, answer: tuple[Tensor, ...]) -> None:
        ask, kind = asked.question, MessageKind.ANSWER if answer else MessageKind.CACHED
        if answer and ask.shared is not None:
            target = self._part(ask.shared, ask.out, sum(x.nbytes for x in answer))
            for part, x in zip(torch.split(target, [x.nbytes for x in answer]), answer, strict=True):
                part.copy_(x.view(-1).view(torch.uint8))
            answer = ()
        self.link.send(kind, (asked.ticket,), *answer)
