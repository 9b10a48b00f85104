"""An attention worker: holds memory for engines, and computes decode attention over pages in it.

Each engine has a connection, with a thread that receives messages. This thread writes pages straight into the memory,
and hands questions to the pool, which all connections share (`attention/pool.py`); another thread sends the answers.
The engine orders its messages: pages that a question names are not written before the answer.
"""

import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine import kernels
from flexengine.attention.files import mapped_file
from flexengine.attention.link import SILENT_SECONDS, Broken, Link, Message
from flexengine.attention.messages import DTYPES, NONE, PROTOCOL, QUESTION_BYTES, Kind, Question, text, words
from flexengine.attention.pool import Pool
from flexengine.codec.cache import CacheFormat
from flexengine.tier.base import aligned

BEAT_SECONDS = SILENT_SECONDS / 10


class Tables(NamedTuple):
    """Page tables of a gpu_batch for a group of layers, all int32.

    Attributes:
        tables: [sequences, pages], pages of each sequence.
        lengths: [sequences], tokens of each sequence in these pages, with the new one if it is here.
        seen: [sequences], number of the last of them that the query sees.
        pages: [new tokens], page of each new token.
        offsets: [new tokens], its offset in the page.
        copies: [copies, 2], pages (from, to) that are copied before tokens are appended.
    """

    tables: Tensor
    lengths: Tensor
    seen: Tensor
    pages: Tensor
    offsets: Tensor
    copies: Tensor


class Asked(NamedTuple):
    """A question. vectors: q, then k, then v."""

    ticket: int
    layer: int
    question: Question
    vectors: Tensor
    tables: Tables


class Server:
    """Serves one engine over one connection.

    Args:
        link: the connection.
        pool: memory and processors, shared with other connections.
        name: of this worker, for messages.
    """

    def __init__(self, link: Link, pool: Pool, name: str) -> None:
        self.link, self.pool, self.name = link, pool, name
        self.engine = 0  # number that the engine has drawn
        self.kernels = kernels.load()
        self._held: dict[int, Tensor] = {}  # by handle: uint8 [bytes]
        self._counted = set[int]()  # handles of memory for pages
        self._tables: dict[tuple[int, int], Tables] = {}  # by gpu_batch and group
        self._sinks: dict[int, Tensor] = {}  # by layer: fp32 [heads]
        self._asked = queue.SimpleQueue[tuple[Asked, Future[tuple[Tensor, ...]]] | None]()
        self._ended, self._left = threading.Event(), threading.Event()

    def run(self) -> None:
        """Serve until the engine ends the connection. Raise Broken if it was not ended in good order."""
        threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._reply)]
        try:
            self._greet()
            for thread in threads:
                thread.start()
            while (message := self.link.receive()).kind != Kind.BYE:
                try:
                    self._handle(message)
                except (RuntimeError, ValueError, MemoryError) as error:  # of a body that is no tensor of its kind
                    raise Broken(f"a message of kind {message.kind} cannot be read ({error})") from error
        finally:
            self._ended.set()
            self._asked.put(None)
            self.link.close()
            if threads[1].ident is not None:  # it was started
                threads[1].join()
            self.pool.give_back(self._taken)
            self._held.clear()
            self.pool.part(self.engine, self)
            self._left.set()

    def leave(self) -> None:
        """End the connection, and return when its memory is given back."""
        self.link.close()
        self._left.wait(SILENT_SECONDS / 2)  # the new connection waits for its greeting

    def _greet(self) -> None:
        """Exchange versions. Raise Broken if the engine has another one."""
        hello = self.link.receive()
        engine = words(self.link.take())
        own = identity()
        if hello.kind != Kind.HELLO or hello.numbers[0] != PROTOCOL or engine != own:
            why = f"it runs {own}, protocol {PROTOCOL}, but the engine runs {engine}, protocol {hello.numbers[0]}"
            self.link.send(Kind.REFUSE, (), text(why))
            raise Broken(why)
        self.engine = hello.numbers[1]
        self.pool.join(self.engine, self)
        self.link.send(Kind.HELLO, (PROTOCOL, self.pool.free, self.pool.memory, self.pool.file_rate), text(self.name))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.link.send(Kind.BEAT)
            except Broken:
                return

    def _handle(self, message: Message) -> None:
        """Carry out a message. Raise Broken if it is wrong."""
        link, (a, b, c, d, e) = self.link, message.numbers
        if message.kind == Kind.BEAT:
            return
        if message.kind == Kind.ALLOCATE:
            self._ready(a, self._allocate(a, b, self.pool.buffer))
        elif message.kind == Kind.SHARE:
            descriptor = link.take_file()
            try:
                ready = self._allocate(a, b, lambda nbytes: mapped_file(descriptor, nbytes), counted=bool(c))
            finally:
                os.close(descriptor)  # the mapping stays
            self._ready(a, ready)
        elif message.kind == Kind.FREE:
            if a in self._counted:
                self._counted.remove(a)
                self.pool.give_back(len(self._held[a]))
            self._held.pop(a, None)
            if not self._held:
                self._tables.clear()
                self._sinks.clear()
        elif message.kind == Kind.WRITE:
            link.take_into(self._part(a, b, message.nbytes))
        elif message.kind == Kind.READ:
            link.send(Kind.DATA, (a,), self._part(b, c, d))
        elif message.kind == Kind.TABLES:
            self._tables[a, b] = _tables(link.take().view(torch.int32), c, d, e)
        elif message.kind == Kind.SINKS:
            self._sinks[a] = link.take().view(torch.float32)
        elif message.kind == Kind.ASK:
            self._ask(a, b)
        else:
            raise Broken(f"a message of unknown kind {message.kind} came")

    def _ready(self, handle: int, ready: bool) -> None:
        """Answer a request for memory."""
        others = self.pool.taken - self._taken
        self.link.send(Kind.READY, (handle, int(ready), self.pool.memory - others, self.pool.memory))

    def _allocate(self, handle: int, nbytes: int, make: Callable[[int], Tensor], counted: bool = True) -> bool:
        if nbytes < 0 or handle in self._held:
            raise Broken(f"memory {handle} of {nbytes} bytes cannot be allocated")
        size = aligned(nbytes)
        if counted and not self.pool.take(size):
            return False
        try:
            self._held[handle] = make(size)
        except (MemoryError, OSError, RuntimeError):
            self.pool.give_back(size * counted)
            return False
        if counted:
            self._counted.add(handle)
        return True

    @property
    def _taken(self) -> int:
        """Bytes of pages."""
        return sum(len(self._held[handle]) for handle in self._counted)

    def _part(self, handle: int, start: int, nbytes: int) -> Tensor:
        held = self._held.get(handle)
        if held is None or not 0 <= start <= start + nbytes <= len(held):
            size = "none" if held is None else f"{len(held)} bytes"
            raise Broken(f"bytes {start} to {start + nbytes} of memory {handle} were named, which has {size}")
        return held[start : start + nbytes]

    def _ask(self, ticket: int, layer: int) -> None:
        head = torch.empty(QUESTION_BYTES, dtype=torch.uint8)
        self.link.take_into(head)
        question, vectors = Question.unpack(head), self.link.take()
        if question.shared != NONE:
            vectors = self._part(question.shared, question.at, question.nbytes)
        tables = self._tables.get((question.batch, question.group))
        if tables is None or (question.sinks and layer not in self._sinks):
            raise Broken(f"a question about layer {layer} of gpu_batch {question.batch} came before its page tables")
        asked = Asked(ticket, layer, question, vectors, tables)
        self._asked.put((asked, self.pool.compute(lambda: self._computed(asked))))

    def _computed(self, asked: Asked) -> tuple[Tensor, ...]:
        """Return the answer, in the pool's thread. Raise Broken, without computing, if the connection has ended."""
        if self._ended.is_set():
            raise Broken("the connection has ended")
        return self._attend(asked)

    def _reply(self) -> None:
        """Send answers in the order of the questions. After the connection has ended, wait for those that are being
        computed."""
        while (item := self._asked.get()) is not None:
            asked, answer = item
            try:
                try:
                    self._answer(asked, answer.result())
                except Exception as error:  # told to the engine, whose job computes the rows again
                    self.link.send(Kind.FAILED, (asked.ticket,), text(f"{type(error).__name__}: {error}"))
            except Broken:  # the connection has ended, so the thread that receives ends, too
                continue
            finally:
                del item, asked, answer

    def _answer(self, asked: Asked, answer: tuple[Tensor, ...]) -> None:
        ask = asked.question
        if ask.shared == NONE:
            self.link.send(Kind.ANSWER, (asked.ticket,), *answer)
            return
        target = self._part(ask.shared, ask.out, sum(x.nbytes for x in answer))
        for part, x in zip(torch.split(target, [x.nbytes for x in answer]), answer, strict=True):
            part.copy_(x.view(-1).view(torch.uint8))
        self.link.send(Kind.ANSWER, (asked.ticket,))

    def _attend(self, asked: Asked) -> tuple[Tensor, ...]:
        """Append the new keys and values, and return attention, [sequences, heads, head_dim]. If other workers hold
        other tokens, also return its log-sum-exp, fp32 [sequences, heads]."""
        ask, tables = asked.question, asked.tables
        _check(ask, tables, self._sinks.get(asked.layer))
        pool, form = self._pool(ask)
        new, dim = len(tables.pages), ask.head_dim
        flat = asked.vectors.view(DTYPES[ask.dtype]).view(-1, dim)
        rows = [len(tables.lengths) * ask.heads, new * ask.kv_heads, new * ask.kv_heads]
        q, k, v = (x.view(-1, heads, dim) for x, heads in
                   zip(torch.split(flat, rows), (ask.heads, ask.kv_heads, ask.kv_heads), strict=True))  # fmt: skip
        for source, target in tables.copies.tolist():
            pool[target].copy_(pool[source])
        self.kernels.append(k, v, pool, tables.pages, tables.offsets, form)
        softcap, topk = (None if x == NONE else x for x in (ask.softcap, ask.topk))
        if ask.partial:
            return self._part_of(q, pool, tables, ask.scale, softcap, form)
        window = None if ask.window == NONE else ask.window
        sinks = self._sinks[asked.layer] if ask.sinks else None
        return (self.kernels.decode_attention(
            q, pool, tables.tables, tables.lengths, ask.scale, window, softcap, sinks, form, topk
        ),)  # fmt: skip

    def _part_of(
        self, q: Tensor, pool: Tensor, tables: Tables, scale: float, softcap: float | None, form: CacheFormat | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return attention over the tokens in these pages, and its log-sum-exp: -inf for sequences without any.

        Kernels take one window for all sequences, so sequences that see equally many tokens are computed together.
        """
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        whole = tables.seen == tables.lengths
        for seen in {None: 0, **dict.fromkeys(tables.seen[~whole].tolist())}:
            chosen = whole if seen is None else (tables.seen == seen) & ~whole
            rows = torch.nonzero(chosen & (tables.seen > 0)).flatten()
            if len(rows):
                out[rows], lse[rows] = self.kernels.decode_attention(
                    q[rows], pool, tables.tables[rows], tables.lengths[rows], scale, seen, softcap, None, form,
                    with_lse=True,
                )  # fmt: skip
        return out, lse

    def _pool(self, ask: Question) -> tuple[Tensor, CacheFormat | None]:
        """Return the pages of a question, and their format."""
        if ask.bits:
            form = CacheFormat(ask.bits, ask.kv_heads, ask.page_tokens, ask.head_dim)
            shape: tuple[int, ...] = (ask.pages, form.page_bytes)
        else:
            form, shape = None, (ask.pages, 2, ask.kv_heads, ask.page_tokens, ask.head_dim)
        dtype = DTYPES[ask.pool_dtype]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._part(ask.handle, ask.start, nbytes).view(dtype).view(shape), form


def _tables(numbers: Tensor, pages: int, new: int, copies: int) -> Tables:
    """Return the page tables in the body of a message. Raise Broken if it has a wrong length."""
    sequences, rest = divmod(len(numbers) - 2 * new - 2 * copies, pages + 2) if min(pages, new, copies) >= 0 else (0, 1)
    if rest or sequences < 0:
        raise Broken(f"page tables of {len(numbers)} numbers came, which fit no number of sequences")
    sizes = [sequences * pages, sequences, sequences, new, new, 2 * copies]
    tables, lengths, seen, at, offsets, both = torch.split(numbers, sizes)
    return Tables(tables.view(sequences, pages), lengths, seen, at, offsets, both.view(copies, 2))


def _check(ask: Question, tables: Tables, sinks: Tensor | None) -> None:
    """Raise ValueError if a question or its tables name memory that does not exist: kernels read without checks."""
    sizes = (ask.pages, ask.page_tokens, ask.heads, ask.kv_heads, ask.head_dim)
    if min(sizes) < 1 or ask.heads % ask.kv_heads:
        raise ValueError(f"pages, page_tokens, heads, kv_heads and head_dim are {sizes}; they must be at least 1, and"
                         " kv_heads must divide heads")  # fmt: skip
    if not (0 <= ask.dtype < len(DTYPES) and 0 <= ask.pool_dtype < len(DTYPES)):
        raise ValueError(f"dtypes are numbers {ask.dtype} and {ask.pool_dtype}; they must be 0 to {len(DTYPES) - 1}")
    if ask.topk != NONE and not 0 <= ask.topk <= 1:
        raise ValueError(f"the share of values is {ask.topk}; it must be 0 to 1")
    if ask.sinks and (sinks is None or len(sinks) != ask.heads):
        raise ValueError(f"the layer has {0 if sinks is None else len(sinks)} sinks, but {ask.heads} heads")
    if len(tables.pages) != len(tables.lengths) and not ask.partial:
        raise ValueError(f"{len(tables.pages)} new tokens came for {len(tables.lengths)} sequences")
    limits = {"page tables": (tables.tables, ask.pages), "pages": (tables.pages, ask.pages),
              "offsets": (tables.offsets, ask.page_tokens), "copied pages": (tables.copies, ask.pages),
              "lengths": (tables.lengths, tables.tables.shape[1] * ask.page_tokens + 1),
              "seen tokens": (tables.seen, tables.tables.shape[1] * ask.page_tokens + 1)}  # fmt: skip
    for what, (numbers, end) in limits.items():
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
            raise ValueError(f"{what} hold {int(numbers.min())} to {int(numbers.max())}; they must be below {end}")
    if not ask.partial and tables.lengths.numel() and int(tables.lengths.min()) < 1:
        raise ValueError("lengths hold 0; they must be at least 1")


def identity() -> str:
    """Return what must be equal in an engine and its workers, so that results do not depend on the worker."""
    from flexengine import __version__

    return f"flexengine {__version__} with {type(kernels.load()).__name__}"


def name_of(process: int) -> str:
    """Return the name of a worker, for messages."""
    return f"{os.uname().nodename}, process {process}"


def serve(connection: socket.socket, pool: Pool) -> None:
    """Serve the engine at the other end of a connection until it ends. Raise Broken as `Server.run`."""
    Server(Link(connection), pool, name_of(os.getpid())).run()
