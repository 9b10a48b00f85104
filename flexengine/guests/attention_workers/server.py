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
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine import __version__, kernels
from flexengine.codec.cache import CacheFormat
from flexengine.guests.attention_workers import messages
from flexengine.guests.attention_workers.messages import (
    DTYPES,
    PROTOCOL,
    MessageKind,
    WorkerQuestion,
    WorkerTables,
    text,
    to_worker,
    words,
)
from flexengine.guests.attention_workers.pool import MOST_ENGINES, Records, RecordsFull, WorkerPool, mapped_file
from flexengine.guests.wire.link import MOST_TEXT, SILENT_SECONDS, Broken, Connection, Message, unpack
from flexengine.kernels.base import AttentionOptions
from flexengine.tier.base import aligned

Parts = tuple[Tensor, ...] | None  # of an answer: none yet, or none that the engine still waits for


@dataclass
class PendingQuestion:
    """A question."""

    ticket: int
    layer: int
    question: WorkerQuestion
    vectors: Tensor  # q, then k, then v; q alone if it goes first
    tables: WorkerTables
    # attention over the cached tokens, and its log-sum-exp; None before it is computed
    part: tuple[Tensor, Tensor] | None = None

    @property
    def queries(self) -> Tensor:
        """Return the queries, [sequences, heads, head_dim]."""
        ask, sequences = self.question, len(self.tables.lengths)
        flat = self.vectors.view(DTYPES[ask.dtype])[: sequences * ask.heads * ask.head_dim]
        return flat.view(sequences, ask.heads, ask.head_dim)


class AttentionServer:
    """Serves one engine over one connection.

    Args:
        link: the connection.
        pool: memory and processors, shared with other connections.
        name: of the engine, for messages.
    """

    def __init__(self, link: Connection, pool: WorkerPool, name: str = "the engine that started the worker") -> None:
        self.kernels = kernels.load()
        self.sinks: dict[int, Tensor] = {}  # fp32 [heads], by layer
        self.link, self.pool, self.name = link, pool, name
        self._records = Records(pool)
        self._ousted = ""  # why the worker has ended the connection
        self.engine = 0  # number that the engine has drawn
        self._alone = False  # whether this engine measures
        self._held: dict[int, Tensor] = {}  # by handle: uint8 [bytes]
        self._counted = set[int]()  # handles of memory for pages
        self._tables: dict[tuple[int, int], WorkerTables] = {}  # by gpu_batch and group
        self._first: dict[int, PendingQuestion] = {}  # by ticket: questions whose keys and values have not come
        # with the records that end with the answer
        self._asked = queue.SimpleQueue[tuple[PendingQuestion, Future[Parts], tuple[Hashable, ...]] | None]()
        self._ended, self._leaving, self._left = (threading.Event() for _ in range(3))

    def run(self) -> None:
        """Serve until the engine ends the connection. Raise Broken if it was not ended in good order."""
        reply = threading.Thread(target=self._reply, daemon=True)
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
            self._held.clear()
            if self._alone:
                self._end_alone()
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
        own = identity()
        if hello.kind != MessageKind.HELLO or hello.numbers[0] != PROTOCOL or engine != own:
            other = f"the engine runs {engine}, protocol {hello.numbers[0]}"
            self._refuse(f"it runs {own}, protocol {PROTOCOL}, but {other}")
        self.engine, pool = hello.numbers[1], self.pool
        self.link.limits = to_worker(pool.memory, pool.records)
        if not pool.join(self.engine, self.leave):
            self._refuse(f"{MOST_ENGINES} engines use it, the most; end one of them, or start another worker")
        numbers = PROTOCOL, pool.memory - pool.taken, pool.memory, pool.file_rate, pool.number
        self.link.send(MessageKind.HELLO, numbers, text(f"{os.uname().nodename}, process {os.getpid()}"))

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
            try:
                ready = self._allocate(a, b, lambda nbytes: mapped_file(descriptor, nbytes), counted=bool(c))
            finally:
                os.close(descriptor)  # the mapping stays
            self._ready(a, ready)
        elif message.kind == MessageKind.ALONE:
            self._begin_alone() if a else self._end_alone()
        elif message.kind == MessageKind.FREE:
            freed = len(self._held[a]) if a in self._counted else 0
            self._counted.discard(a)
            self._held.pop(a, None)
            self._records.drop(("held", a))
            if not self._held:
                self._drop_first()
                self._tables.clear()
                self.sinks.clear()
                self._records.drop_all(tuple)  # questions that are being answered remain
            self.pool.give_back(freed)
        elif message.kind == MessageKind.WRITE:
            link.take_into(self._part(a, b, message.nbytes))
        elif message.kind == MessageKind.READ:
            link.send(MessageKind.DATA, (a,), self._part(b, c, d))
        elif message.kind == MessageKind.TABLES:
            # A sweep of which the engine sends no keys and values any more broke off.
            self._drop_first(a)
            self._records.book(("tables", a, b), message.nbytes)
            self._tables[a, b] = WorkerTables.unpack(link.take().view(torch.int32), c, d, e)
        elif message.kind == MessageKind.SINKS:
            self._records.book(("sinks", a), message.nbytes)
            self.sinks[a] = link.take().view(torch.float32)
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

    def _part(self, handle: int, start: int, nbytes: int) -> Tensor:
        held = self._held.get(handle)
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
        question, vectors = unpack(head, WorkerQuestion), self.link.take()
        if question.shared is not None:
            vectors = self._part(question.shared, question.at, question.nbytes)
        tables = self._tables.get((question.batch, question.group))
        if tables is None or (question.sinks and layer not in self.sinks):
            raise Broken(f"a question about layer {layer} of gpu_batch {question.batch} came before its page tables")
        asked = PendingQuestion(ticket, layer, question, vectors, tables)
        if question.first:
            self._first[ticket] = asked
        work = self._attend_cached if question.first else self._attend
        self._queue(asked, lambda: work(asked), *[] if question.first else [ticket])

    def _add(self, ticket: int, at: int, nbytes: int, whole: int) -> None:
        asked, record = self._first.pop(ticket, None), f"added {ticket}"
        if asked is None:
            raise Broken(f"keys and values of question {ticket} came, whose queries did not go first")
        self._records.book(record, 2 * whole)
        vectors = self.link.take()
        if (shared := asked.question.shared) is not None:
            vectors = self._part(shared, at, nbytes)
        self._queue(asked, lambda: self._attend_new(asked, vectors), ticket, record)

    def _queue(self, asked: PendingQuestion, work: Callable[[], Parts], *records: Hashable) -> None:
        """Let the pool's thread compute a part of an answer, unless the connection has ended. Then drop `records`."""

        def compute() -> Parts:
            if self._ended.is_set():
                raise Broken("the connection has ended")
            return work()

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

    def _attend(self, asked: PendingQuestion) -> tuple[Tensor, ...]:
        """Append the new keys and values, and return attention, [sequences, heads, head_dim]. If other workers hold
        other tokens, also return its log-sum-exp, fp32 [sequences, heads]."""
        ask, tables = asked.question, asked.tables
        q, pool, form = self._begun(asked)
        self._append(asked, asked.vectors[q.nbytes :], pool, form)
        if ask.partial:
            return self._part_of(ask, q, pool, tables, form)
        options = AttentionOptions(ask.scale, ask.window, ask.softcap, self._sinks_of(asked), ask.topk)
        return (self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, options, form),)

    def _attend_cached(self, asked: PendingQuestion) -> tuple[Tensor, ...]:
        """Compute attention over the tokens before the new ones, and its log-sum-exp. Return no part of the answer."""
        ask, tables = asked.question, asked.tables
        if ask.topk is not None:
            raise ValueError("queries cannot go first if the new token decides which values are read")
        q, pool, form = self._begun(asked)
        if len(asked.vectors) > q.nbytes:
            raise ValueError(f"{len(asked.vectors)} bytes of queries came, but {q.nbytes} were due")
        if not ask.partial and ask.window is not None:
            tables = tables._replace(seen=tables.lengths.clamp(max=ask.window))
        asked.part = self._part_of(ask, q, pool, tables.cached(), form)
        return ()

    def _attend_new(self, asked: PendingQuestion, vectors: Tensor) -> Parts:
        """Append the new keys and values, and return what `_attend` does: attention over the new tokens, merged with
        that over the cached ones. A window of one token leaves the new token only. Sinks are in its denominator.

        Return None if attention over the cached tokens has failed, which the engine was told.
        """
        ask, tables = asked.question, asked.tables
        if asked.part is None:
            return None
        q, (pool, form) = asked.queries, self._pool(ask)
        self._append(asked, vectors, pool, form)
        (out, lse), rows = asked.part, tables.rows.long()
        options, new_lse = AttentionOptions(ask.scale, 1, ask.softcap, self._sinks_of(asked)), lse[rows]
        pages, lengths = tables.tables[rows], tables.lengths[rows]
        new = self.kernels.decode_attention(q[rows], pool, pages, lengths, options, form, new_lse)
        out[rows] = messages.merge([out[rows], new], [lse[rows], new_lse])
        if not ask.partial:
            return (out,)
        lse[rows] = torch.logaddexp(lse[rows], new_lse)
        return out, lse

    def _begun(self, asked: PendingQuestion) -> tuple[Tensor, Tensor, CacheFormat | None]:
        """Return the queries, the pages, and their format, after a check and the copies of pages."""
        tables = asked.tables
        messages.check(asked.question, tables, self.sinks.get(asked.layer))
        pool, form = self._pool(asked.question)
        for source, target in tables.copies.tolist():
            pool[target].copy_(pool[source])
        return asked.queries, pool, form

    def _append(self, asked: PendingQuestion, vectors: Tensor, pool: Tensor, form: CacheFormat | None) -> None:
        ask, tables = asked.question, asked.tables
        k, v = vectors.view(DTYPES[ask.dtype]).view(2, len(tables.pages), ask.kv_heads, ask.head_dim)
        self.kernels.append(k, v, pool, tables.pages, tables.offsets, form)

    def _sinks_of(self, asked: PendingQuestion) -> Tensor | None:
        return self.sinks[asked.layer] if asked.question.sinks else None

    def _part_of(
        self, ask: WorkerQuestion, q: Tensor, pool: Tensor, tables: WorkerTables, form: CacheFormat | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention over the tokens in these pages, and its log-sum-exp: -inf for sequences without any.

        Kernels take one window for all sequences, so sequences that see equally many tokens are computed together.
        """
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        whole = tables.seen == tables.lengths
        for seen in {None: 0, **dict.fromkeys(tables.seen[~whole].tolist())}:
            chosen = whole if seen is None else (tables.seen == seen) & ~whole
            rows = torch.nonzero(chosen & (tables.seen > 0)).flatten()
            if len(rows):
                options, found = AttentionOptions(ask.scale, seen, ask.softcap), lse[rows]
                pages, lengths = tables.tables[rows], tables.lengths[rows]
                out[rows] = self.kernels.decode_attention(q[rows], pool, pages, lengths, options, form, found)
                lse[rows] = found
        return out, lse

    def _pool(self, ask: WorkerQuestion) -> tuple[Tensor, CacheFormat | None]:
        if ask.bits:
            form = CacheFormat(ask.bits, ask.kv_heads, ask.page_tokens, ask.head_dim)
            shape: tuple[int, ...] = (ask.pages, form.page_bytes)
        else:
            form, shape = None, (ask.pages, 2, ask.kv_heads, ask.page_tokens, ask.head_dim)
        dtype = DTYPES[ask.pool_dtype]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._part(ask.handle, ask.start, nbytes).view(dtype).view(shape), form


def identity() -> str:
    """Return what must be equal in an engine and its workers, so that results do not depend on the worker."""
    return f"flexengine {__version__} with {type(kernels.load()).__name__}"
