"""Memory that an engine and a worker both map, through which pages pass to and from the worker's device."""

import random
import socket
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from flexengine.errors import WorkerLost
from flexengine.guests.attention_workers import transit
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.devices import CudaDevice
from flexengine.guests.attention_workers.messages import PROTOCOL, MessageKind, text
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.attention_workers.workers import WorkerTier
from flexengine.guests.wire.link import Broken, Connection
from flexengine.tier import cuda
from tests.guests.attention_workers.test_devices import device_worker
from tests.helpers.attention_workers import NetWorker, ThreadWorker
from tests.helpers.other_device import OtherDevice
from tests.helpers.patience import until
from tests.helpers.tiers import Cudart


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transit", "client", "server"):
        monkeypatch.setattr(f"flexengine.guests.attention_workers.{module}.PART", 1 << 12)
        monkeypatch.setattr(f"flexengine.guests.attention_workers.{module}.PARTS", 3)


def local(memory: int = 1 << 20) -> Any:
    return device_worker(ThreadWorker, [])("worker1", memory, 1)


def test_no_page_crosses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of odd sizes, of less and more than a part, by several lanes at once: messages have 24 bytes for each."""
    sent, send = dict[int, int](), Connection.send

    def noted(link: Connection, kind: int, numbers: Any = (), *parts: torch.Tensor, **more: Any) -> None:
        sent[kind] = sent.get(kind, 0) + sum(part.nbytes for part in parts)
        send(link, kind, numbers, *parts, **more)

    monkeypatch.setattr(Connection, "send", noted)
    monkeypatch.setattr(transit, "MOST_SPANS", 5)
    tier, rng = WorkerTier(lambda place: local(), "worker1"), random.Random(1)
    region, errors = tier.allocate(200_000, "pages"), list[BaseException]()
    starts = [0, *sorted(rng.sample(range(1, 200_000), 60)), 200_000]
    parts = [region.part(a, b - a) for a, b in pairwise(starts)]

    def lane(own: Any) -> None:
        try:
            data = [torch.randint(0, 256, (part.nbytes,), dtype=torch.uint8) for part in own]
            tier.store_all(list(zip(data, own, strict=True)))
            back = [torch.zeros_like(x) for x in data]
            tier.load_all(list(zip(own, back, strict=True)))
            assert all(x.equal(y) for x, y in zip(data, back, strict=True))
        except BaseException as error:
            errors.append(error)

    lanes = [threading.Thread(target=lane, args=(parts[k::3],)) for k in range(3)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join(60)
    assert errors == []
    assert tier.bytes_read == tier.bytes_written == 200_000
    assert tier.local_bytes == 3 << 12
    assert 24 * 61 <= sent[MessageKind.PUT] == sent[MessageKind.GET] <= 24 * (61 + 200_000 // (1 << 12))
    assert MessageKind.WRITE not in sent
    assert sent[MessageKind.DATA] == 0
    tier.close()


def test_over_a_network_pages_cross_the_connection() -> None:
    worker = device_worker(NetWorker, [])("worker1", 1 << 20, 1)
    assert worker.transit is None
    assert worker.local_bytes == 0
    worker.close()


def refused(act: Callable[[Client], None]) -> str:
    """Return why a worker ends the connection of an engine."""
    (own, other), said = socket.socketpair(), list[str]()
    pool = WorkerPool(1 << 20, device=OtherDevice())

    def run() -> None:
        try:
            AttentionServer(Connection(other), pool).run()
        except Broken as error:
            said.append(str(error))

    (thread := threading.Thread(target=run, daemon=True)).start()
    client = Client(Connection(own), "worker1", shares=True)
    act(client)
    with pytest.raises(WorkerLost):
        client.allocate(64)
    client.close()
    thread.join(30)
    assert pool.taken == 0
    return said[0]


@pytest.mark.parametrize("kind", [MessageKind.PUT, MessageKind.GET])
@pytest.mark.parametrize(
    ("at", "rows", "why"),
    [
        (3 << 12, [(0, 64)], "bytes 12288 to 12352 of memory"),
        (-64, [(0, 64)], "bytes -64 to 0 of memory"),
        (0, [(0, 1 << 13)], "bytes 0 to 8192 of memory"),
        (0, [(4000, 64), (4064, 64)], "bytes 4064 to 4128 of memory"),
        (0, [(0, -64)], "bytes 0 to -64 of memory"),
    ],
)
def test_transfers_beyond_memory_are_refused(kind: Any, at: int, rows: list[tuple[int, int]], why: str) -> None:
    def act(client: Client) -> None:
        handle = client.allocate(1 << 12)
        client.link.send(kind, (1, at), torch.tensor([(handle, start, count) for start, count in rows]))

    assert why in refused(act)


def test_other_memory_is_no_way_for_pages() -> None:
    def about_questions(client: Client) -> None:  # memory that holds no pages
        client.link.send(MessageKind.PUT, (1, 0), torch.tensor([[client.allocate(64, counted=False), 0, 64]]))

    def of_odd_length(client: Client) -> None:
        client.link.send(MessageKind.GET, (1, 0), torch.zeros(100, dtype=torch.uint8))

    def freed(client: Client) -> None:
        client.link.send(MessageKind.FREE, (min(client.shared),))

    def twice(client: Client) -> None:
        with pytest.raises(WorkerLost):
            client.allocate(64, counted=False, transit=True)

    assert "holds no pages" in refused(about_questions)
    assert "cannot be read" in refused(of_odd_length)
    assert "ends with the connection" in refused(freed)
    assert "a second memory came" in refused(twice)


def test_lanes_that_wait_for_a_part_learn_that_the_worker_is_lost() -> None:
    """It takes what is sent, and answers no transfer."""
    one, other = socket.socketpair()
    link = Connection(other)
    link.send(MessageKind.HELLO, (PROTOCOL, 1 << 20, 1 << 20), text("here\ndevice"))
    link.send(MessageKind.READY, (0, 1, 1 << 20, 1 << 20))
    client, said = Client(Connection(one), "worker1", shares=True), list[str]()

    def lane(start: int) -> None:
        try:
            client.write_all([(9, start, torch.zeros(1 << 14, dtype=torch.uint8))])
        except WorkerLost as error:
            said.append(error.why)

    lanes = [threading.Thread(target=lane, args=(k << 14,), daemon=True) for k in range(3)]
    for thread in lanes:
        thread.start()
    until(lambda: client.transit is not None and client.transit._free.empty())
    assert said == []
    link.close()
    for thread in lanes:
        thread.join(30)
        assert not thread.is_alive()
    assert len(said) == 3
    client.close()


def test_a_gpu_locks_the_memory_while_the_engine_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. Memory that cannot be locked is used as it is."""
    for most, locked in ((1 << 20, [3 << 12]), (64, [])):
        runtime = Cudart(most)
        monkeypatch.setattr(torch.cuda, "cudart", lambda runtime=runtime: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "_forget_error", lambda: None)
        gpu = OtherDevice()
        gpu._cuda, gpu._locked = cuda, set[int]()  # type: ignore[attr-defined]
        for name in ("lock", "unlock"):
            monkeypatch.setattr(gpu, name, getattr(CudaDevice, name).__get__(gpu))
        monkeypatch.setattr("tests.guests.attention_workers.test_devices.OtherDevice", lambda gpu=gpu: gpu)
        worker = local()
        assert list(runtime.locked.values()) == locked
        handle = worker.allocate(1 << 14)
        worker.write(handle, 0, data := torch.randint(0, 256, (1 << 14,), dtype=torch.uint8))
        worker.read(handle, 0, back := torch.zeros_like(data)).wait()
        assert back.equal(data)
        worker.close()
        assert runtime.locked == {}
