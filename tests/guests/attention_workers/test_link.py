"""Connections to attention workers: wrong messages end them, with a reason, and reach no memory that is not there."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.devices import identity
from flexengine.guests.attention_workers.messages import PROTOCOL, MessageKind, WorkerQuestion, text, words
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.wire import link as links
from flexengine.guests.wire.link import HEADER, MAGIC, Broken, Connection, pack
from tests.helpers.attention_workers import NetWorker

BODY = torch.arange(100, dtype=torch.uint8)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection, socket.socket]]:
    """Two ends of a connection, and the socket of the first."""
    one, other = socket.socketpair()
    ends = Connection(one), Connection(other)
    yield *ends, one
    for end in ends:
        end.close()


def test_messages_arrive_in_order_and_in_parts(pair: Any) -> None:
    one, other, _ = pair
    one.send(7, (1, -2, 3), BODY, BODY.view(torch.int32))
    one.send(8)
    message = other.receive()
    assert message == (7, (1, -2, 3, 0, 0), 200)
    other.take_into(first := torch.empty(100, dtype=torch.uint8))
    assert torch.equal(first, BODY)
    assert torch.equal(other.take(), BODY)
    assert other.receive() == (8, (0,) * 5, 0)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (HEADER.pack(MAGIC | 7, 1, 0, 0, 0, 0, 0, 0), "message 1 came, but message 0 was due"),
        (HEADER.pack(MAGIC | 7, 0, -1, 0, 0, 0, 0, 0), "a message of -1 bytes was announced"),
        (HEADER.pack(MAGIC | 7, 0, 1 << 50, 0, 0, 0, 0, 0), "a message of 1125899906842624 bytes was announced"),
        (b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n" + b" " * 30, "it sends no messages of flexengine"),
    ],
)
def test_wrong_headers(pair: Any, head: bytes, reason: str) -> None:
    _, other, raw = pair
    raw.sendall(head)
    with pytest.raises(Broken, match=reason):
        other.receive()


def test_bodies_of_wrong_lengths(pair: Any) -> None:
    one, other, _ = pair
    one.send(7, (), BODY)
    other.receive()
    with pytest.raises(Broken, match="a message ended 4 bytes too early"):
        other.take_into(torch.empty(104, dtype=torch.uint8))
    with pytest.raises(Broken, match="100 bytes of a message were not read"):
        other.receive()


def test_ends(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, raw = pair
    raw.sendall(HEADER.pack(MAGIC | 7, 0, 100, 0, 0, 0, 0, 0) + b"12")
    other.receive()
    one.close()
    with pytest.raises(Broken, match="it ended in the middle of a message"):
        other.take()
    with pytest.raises(Broken, match="its connection broke"):
        other.send(7, (), BODY)


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENT_SECONDS", 0.05)
    one, other = map(Connection, socket.socketpair())
    one.send(7)
    other.receive()
    with pytest.raises(Broken, match=r"it gave no sign of life for 0.05 s"):
        other.receive()
    one.close()
    other.close()


# The worker's side.

QUESTION = WorkerQuestion(
    handle=0, start=0, pages=4, page_tokens=16, heads=2, kv_heads=1, head_dim=8, bits=0, pool_dtype=0, dtype=0, batch=0,
    group=0, scale=1.0,
)  # fmt: skip
TABLES = torch.tensor([0, 1, 20, 20, 1, 3, 0], dtype=torch.int32)  # one sequence of 20 tokens on pages 0 and 1
VECTORS = torch.zeros(4 * 8)


def refused(*sent: Callable[[Connection], None]) -> str:
    """Return why a worker ends its connection after these messages."""
    one, other = map(Connection, socket.socketpair())
    one.send(MessageKind.HELLO, (PROTOCOL,), text(identity()))
    for send in sent:
        send(one)
    server = AttentionServer(other, WorkerPool(1 << 16))
    with pytest.raises(Broken) as caught:
        server.run()
    one.close()
    return str(caught.value)


def allocated(one: Connection) -> None:
    one.send(MessageKind.ALLOCATE, (0, 4 * 2 * 16 * 8 * 4))


def with_tables(one: Connection) -> None:
    one.send(MessageKind.TABLES, (0, 0, 2, 1, 0), TABLES)


def asked(first: int) -> Callable[[Connection], None]:
    """Return what sends question 0. first: whether its queries go first."""
    vectors = VECTORS[: 2 * 8] if first else VECTORS
    question = pack(QUESTION._replace(first=bool(first)))
    return lambda one: one.send(MessageKind.ASK, (0, 0, len(question)), question, vectors)


def added(one: Connection) -> None:
    one.send(MessageKind.ADD, (0,), VECTORS[2 * 8 :])


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([lambda one: one.send(99)], "a message of unknown kind 99 came"),
        ([allocated, allocated], "memory 0 of 4096 bytes cannot be allocated"),
        ([lambda one: one.send(MessageKind.ALLOCATE, (0, -1))], "memory 0 of -1 bytes cannot be allocated"),
        (
            [lambda one: one.send(MessageKind.WRITE, (3, 0), BODY)],
            "bytes 0 to 100 of memory 3 were named, which has none",
        ),
        (
            [allocated, lambda one: one.send(MessageKind.WRITE, (0, 4000), BODY)],
            "bytes 4000 to 4100 of memory 0 were named",
        ),
        ([allocated, lambda one: one.send(MessageKind.READ, (0, 0, -8, 16))], "bytes -8 to 8 of memory 0 were named"),
        ([lambda one: one.send(MessageKind.TABLES, (0, 0, 2, 1, 0), TABLES[:-1])], "page tables of 6 numbers came"),
        ([lambda one: one.send(MessageKind.TABLES, (0, 0, -2, 1, 0), TABLES)], "page tables of 7 numbers came"),
        (
            [allocated, asked(0)],
            "before its page tables",
        ),
        ([allocated, with_tables, lambda one: one.send(MessageKind.ASK, (0, 0, 17), VECTORS[:4])], "a message ended"),
        ([allocated, with_tables, lambda one: one.send(MessageKind.ASK, (0, 0, -1), VECTORS[:4])], "cannot be read"),
        ([allocated, lambda one: one.send(MessageKind.ASK, (0, 0, 16), VECTORS[:4])], "a message is no WorkerQuestion"),
        ([lambda one: one.send(MessageKind.TABLES, (0, 0, 2, 1, 0), BODY[:5])], "a message of kind 10 cannot be read"),
        (
            [lambda one: one.send(MessageKind.ADD, (0,), VECTORS)],
            "keys and values of question 0 came, whose queries did not",
        ),
        (
            [allocated, with_tables, asked(0), lambda one: one.send(MessageKind.ADD, (0,), VECTORS)],
            "queries did not go first",
        ),
        ([allocated, with_tables, asked(1), asked(1)], "question 0 came twice"),
        ([allocated, with_tables, asked(1), added, added], "keys and values of question 0 came"),
        (
            [allocated, with_tables, asked(1), lambda one: one.send(MessageKind.ADD, (1,), VECTORS)],
            "of question 1 came",
        ),
    ],
)
def test_a_worker_ends_after_a_wrong_message(sent: list[Callable[[Connection], None]], reason: str) -> None:
    assert reason in refused(*sent)


@pytest.mark.parametrize(
    ("fields", "tables", "reason"),
    [
        ({"pages": 1}, TABLES, "page tables hold 0 to 1; they must be below 1"),
        ({"page_tokens": 8}, TABLES, "lengths hold 20 to 20; they must be below 17"),
        ({}, torch.tensor([0, 1, 20, 20, 4, 3, 0], dtype=torch.int32), "pages hold 4 to 4; they must be below 4"),
        ({}, torch.tensor([0, -1, 20, 20, 1, 3, 0], dtype=torch.int32), "page tables hold -1 to 0; they must be"),
        ({}, torch.tensor([0, 1, 0, 0, 1, 3, 0], dtype=torch.int32), "lengths hold 0; they must be at least 1"),
        ({"pages": 400}, TABLES, r"bytes 0 to 409600 of memory \d+ were named, which has 4096 bytes"),
        ({"heads": 4}, TABLES, "RuntimeError"),
        ({"bits": 5}, TABLES, "an encoded cache of 5 bits"),
        ({"dtype": 9}, TABLES, "dtypes are numbers 9 and 0; they must be 0 to 3"),
        ({"page_tokens": 0}, TABLES, "they must be at least 1, and kv_heads must divide heads"),
        ({"heads": 3, "kv_heads": 2}, TABLES, "kv_heads must divide heads"),
        ({"topk": 1.5}, TABLES, "the share of values is 1.5; it must be 0 to 1"),
    ],
)
def test_a_question_that_cannot_be_answered_is_told(fields: dict[str, Any], tables: torch.Tensor, reason: str) -> None:
    """The engine's call raises WorkerLost; the worker touches no memory that is not there."""
    worker = NetWorker("worker1", 1 << 16, 1)
    handle = worker.allocate(4 * 2 * 16 * 8 * 4)
    worker.link.send(MessageKind.TABLES, (0, 0, 2, 1, 0), tables)
    pending = worker.ask(0, QUESTION._replace(handle=handle, **fields), VECTORS.view(torch.uint8), BODY[:64].clone())
    with pytest.raises(WorkerLost, match=f"worker1 .* is lost: it could not answer .*{reason}"):
        pending.wait()
    worker.close()


@pytest.mark.parametrize(
    ("fields", "queries", "added", "reason"),
    [
        ({"topk": 0.5}, 16, 16, "queries cannot go first if the new token decides which values are read"),
        ({}, 24, 16, "96 bytes of queries came, but 64 were due"),
        ({}, 8, 16, "RuntimeError"),
        ({}, 16, 8, "RuntimeError"),
        ({"heads": 3, "kv_heads": 2}, 24, 16, "kv_heads must divide heads"),
    ],
)
def test_queries_that_go_first_and_cannot_be_answered_are_told(
    fields: dict[str, Any], queries: int, added: int, reason: str
) -> None:  # fmt: skip
    """All calls that wait raise WorkerLost, also if keys and values are sent after the error."""
    worker = NetWorker("worker1", 1 << 16, 1)
    handle = worker.allocate(4 * 2 * 16 * 8 * 4)
    worker.link.send(MessageKind.TABLES, (0, 0, 2, 1, 0), TABLES)
    question = QUESTION._replace(handle=handle, first=True, **fields)
    pending = worker.ask(0, question, torch.zeros(queries).view(torch.uint8), BODY[:64].clone())
    worker.add(pending, torch.zeros(added).view(torch.uint8), None)
    with pytest.raises(WorkerLost, match=f"worker1 .* is lost: it could not answer .*{reason}"):
        pending.wait()
    with pytest.raises(WorkerLost, match=reason):
        pending.wait_cached()
    worker.close()


def test_an_engine_ends_after_a_wrong_answer() -> None:
    one, other = map(Connection, socket.socketpair())
    other.send(MessageKind.HELLO, (PROTOCOL, 1000, 1000), text("here"))
    client = Client(one, "worker1")
    assert (client.memory, client.name) == (1000, "worker1 (here)")
    pending = client.ask(0, QUESTION, VECTORS.view(torch.uint8), BODY[:64].clone())
    other.send(MessageKind.ANSWER, (0,), BODY)
    with pytest.raises(WorkerLost, match="it answered with 100 bytes, but 64 were due"):
        pending.wait()
    with pytest.raises(WorkerLost, match="64 were due"):
        client.allocate(10)
    client.close()
    other.close()


def test_a_connection_that_breaks_inside_an_answer_is_told() -> None:
    """The call that waits for the answer raises; a later one, too, and freeing memory does not."""
    one, other = socket.socketpair()
    link = Connection(other)
    link.send(MessageKind.HELLO, (PROTOCOL, 1000, 1000), text("here"))
    client = Client(Connection(one), "worker1")
    pending = client.ask(0, QUESTION, VECTORS.view(torch.uint8), BODY[:64].clone())
    other.sendall(HEADER.pack(MAGIC | MessageKind.ANSWER, 1, 64, 0, 0, 0, 0, 0) + b"half")
    link.close()
    with pytest.raises(WorkerLost, match=r"it ended in the middle of a message|its connection broke"):
        pending.wait()
    with pytest.raises(WorkerLost):
        client.allocate(10)
    client.free(0)
    client.close()


def test_other_programs_are_no_workers() -> None:
    one, other = socket.socketpair()
    other.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 64)
    with pytest.raises(WorkerLost, match="worker1 is lost: it sends no messages of flexengine"):
        Client(Connection(one), "worker1")
    other.close()
    one, other = socket.socketpair()
    Connection(other).send(MessageKind.REFUSE, (), text("because"))
    with pytest.raises(InvalidInput, match="attention worker worker1 refuses: because; run the same version"):
        Client(Connection(one), "worker1")


def test_processes_of_other_protocols_read_why_they_part() -> None:
    """The body of a greeting, and of its refusal, is UTF-8 in all protocols."""
    one, other = map(Connection, socket.socketpair())
    one.send(MessageKind.HELLO, (3, 7), torch.frombuffer(bytearray(b"flexengine 0.0.9"), dtype=torch.uint8))
    with pytest.raises(Broken, match=r"but the engine runs flexengine 0\.0\.9, protocol 3"):
        AttentionServer(other, WorkerPool(1 << 16)).run()
    assert one.receive().kind == MessageKind.REFUSE
    assert (
        words(one.take())
        == f"it runs {identity()}, protocol {PROTOCOL}, but the engine runs flexengine 0.0.9, protocol 3"
    )
    one.close()
    raw = b"it runs flexengine 0.0.9, protocol 3"
    one, other = map(Connection, socket.socketpair())
    other.send(MessageKind.REFUSE, (), torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    with pytest.raises(InvalidInput, match=r"worker1 refuses: it runs flexengine 0\.0\.9, protocol 3; run"):
        Client(one, "worker1")
