"""What an engine can make a worker hold: page tables, sinks, questions and handles are booked, and refused with a
reason. A worker tells a waiting engine which other one measures it, and ends a measurement that takes too long."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers import pool as pools
from flexengine.guests.attention_workers import server as servers
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.devices import PageDevice
from flexengine.guests.attention_workers.messages import MessageKind, WorkerTables
from flexengine.guests.attention_workers.pool import RECORD_BYTES, WorkerPool, records_of
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.wire.link import HEADER, MAGIC, Broken, Connection, Message
from tests.helpers.listening import listening
from tests.helpers.other_device import OtherDevice

RECORDS = 64 * RECORD_BYTES
NONE = torch.empty(0, dtype=torch.int32)


class Worker:
    """A worker with memory for 64 records, in threads. `ended` has the errors of its connections."""

    def __init__(self, device: PageDevice | None) -> None:
        self.pool, self.ended = WorkerPool(1 << 20, records=RECORDS, device=device), list[str]()
        self.threads, self.clients = list[threading.Thread](), list[Client]()

    def client(self, engine: int) -> Client:
        own, other = socket.socketpair()

        def serve() -> None:
            try:
                AttentionServer(Connection(other), self.pool, f"engine {engine}").run()
            except Broken as error:
                self.ended.append(str(error))

        self.threads.append(threading.Thread(target=serve))
        self.threads[-1].start()
        self.clients.append(Client(Connection(own), "worker1", engine=engine))
        return self.clients[-1]


@pytest.fixture(params=[None, OtherDevice], ids=["RAM", "device"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(request.param and request.param())
    yield made
    for client in made.clients:
        client.close()
    for thread in made.threads:
        thread.join(30)
        assert not thread.is_alive()
    assert made.pool.record(RECORDS)  # all was given back
    made.pool.close()


def tables(client: Client, number: int) -> None:
    """Send empty page tables of a gpu_batch."""
    client.tables(number, 0, WorkerTables(NONE.view(0, 0), NONE, NONE, NONE, NONE, NONE, NONE.view(0, 2)))


@pytest.mark.parametrize(
    "send",
    [
        tables,
        lambda client, number: client.sinks(number, torch.zeros(1)),
        lambda client, number: client._send(MessageKind.ALLOCATE, (number, 0)) or number or client.free(0),
        lambda client, number: client.tables(0, number, WorkerTables(NONE.view(0, 0), *[NONE] * 5, NONE.view(0, 2))),
    ],
)
def test_records_are_bounded(worker: Worker, send: Callable[[Client, int], None]) -> None:
    """Of all engines together. The same record in place of an earlier one counts once."""
    other = worker.client(2)
    for number in range(30):
        tables(other, number)
    assert other.allocate(64) is not None  # the tables have arrived
    client = worker.client(1)
    for _ in range(100):
        send(client, 0)

    def fill() -> None:
        for number in range(1, 10_000):
            send(client, number)

    with pytest.raises(WorkerLost, match="page tables and questions of all engines may have 262 kB together"):
        fill()
    worker.threads[-1].join(30)
    assert other.allocate(64) is not None
    assert "give it a larger --worker-mem" in worker.ended[0]


def test_a_large_message_is_refused_before_it_is_read(worker: Worker) -> None:
    client = worker.client(1)
    for kind, nbytes in ((MessageKind.TABLES, RECORDS + 1), (MessageKind.ALLOCATE, 1), (MessageKind.WRITE, 1 << 21)):
        client = worker.client(kind)
        client.link._socket.sendall(HEADER.pack(MAGIC | kind, 1, nbytes, 0, 0, 0, 0, 0))
        with pytest.raises(WorkerLost):
            client.allocate(64)
        worker.threads[-1].join(30)
    assert [f"a message of {n} bytes was announced" in error for n, error in
            zip((RECORDS + 1, 1, 1 << 21), worker.ended, strict=True)] == [True] * 3  # fmt: skip


def test_a_part_of_the_memory_is_for_records() -> None:
    assert [records_of(n << 20) for n in (2, 100, 1024, 1 << 20)] == [1 << 20, 16 << 20, 128 << 20, 2 << 30]


def test_who_measures_is_told_and_has_a_limit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that holds the worker for itself loses it when others wait."""
    readings = itertools.count()
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: next(readings) / 50))  # as if it took no time
    monkeypatch.setattr(pools, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(pools, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(pools, "ALONE_SECONDS", 0.3)
    first, second = worker.client(1), worker.client(2)
    with suppress(WorkerLost), first.alone(), listening() as heard:
        with second.alone():
            assert second.allocate(64) is not None
        with pytest.raises(WorkerLost):
            first.allocate(64)
    assert heard.messages[0].startswith("worker1 (")
    assert "waiting for engine 1, which has measured it for 0 s" in heard.messages[0]
    worker.threads[0].join(30)
    assert worker.ended == ["it measured for over 0.3 s while others waited"]


def test_too_many_engines_are_refused(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_ENGINES", 2)
    monkeypatch.setattr(servers, "MOST_ENGINES", 2)
    worker.client(1)
    worker.client(2)
    with pytest.raises(InvalidInput, match="2 engines use it, the most; end one of them, or start another worker"):
        worker.client(3)
    worker.client(2)  # connects again


def test_questions_that_are_being_answered_stay_booked(worker: Worker) -> None:
    """Also when the engine frees its last memory meanwhile; page tables and sinks do not."""
    own, other = socket.socketpair()
    server, computing = AttentionServer(Connection(other), worker.pool, "engine"), threading.Event()
    worker.pool.thread.submit(computing.wait, 30)
    server._first[7] = SimpleNamespace(question=SimpleNamespace(shared=None))  # type: ignore[assignment]
    server._records.book(7, 0)
    server._records.book(("sinks", 0), 0)
    Connection(own).send(MessageKind.ADD, (7, 0, 0))
    server._handle(server.link.receive())
    server._handle(Message(MessageKind.FREE, (0,) * 5, 0))
    kept = {*server._records._booked}
    server._ended.set()
    computing.set()
    server._records.drop_all()
    own.close()
    server.link.close()
    assert kept == {7, "added 7"}
