"""The group of processes of a pipeline: values that all exchange, and their connections."""

import json
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.stages import group, store
from flexengine.guests.stages.group import HIDDENS, ORDERS, RESULTS, Frame, FrameChannel, OrderKind, PipelineGroup
from flexengine.guests.stages.remote import ChannelPort
from flexengine.guests.wire import link
from flexengine.guests.wire.link import HEADER, MAGIC, Broken, Connection
from flexengine.guests.wire.secret import WrongSecret, prove
from tests.helpers.listening import listening
from tests.helpers.patience import PATIENCE, until
from tests.helpers.ports import free_port


def joined(
    monkeypatch: pytest.MonkeyPatch, size: int, interface: str | None = None, port: int = 0,
    first: Callable[[], Any] = lambda: None,
) -> list[PipelineGroup]:  # fmt: skip
    """Return the groups of processes, which are threads here, joined by sockets. Raise the first error, which ends the
    others, too. first: what the stages wait for, but not the driver."""
    local = threading.local()
    groups: dict[int, PipelineGroup] = {}
    errors = list[Exception]()
    monkeypatch.setattr(group, "ranks", lambda: (local.rank, size))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port or free_port()))

    def look() -> None:
        assert not errors

    def join(rank: int) -> None:
        local.rank = rank
        try:
            if rank:
                first()
            groups[rank] = PipelineGroup(interface, look)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [groups[rank] for rank in range(size)]


def closed(groups: list[PipelineGroup]) -> None:
    threads = [threading.Thread(target=each.close) for each in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_values_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a channel of orders is open."""
    driver, *stages = groups = joined(monkeypatch, 3)
    driver.receive(1, RESULTS)
    found = dict[int, list[str]]()
    threads = [threading.Thread(target=lambda g=g: found.update({g.rank: g.exchange("key", f"v{g.rank}")}))
               for g in stages]  # fmt: skip
    for thread in threads:
        thread.start()
    assert driver.exchange("key", "v0") == ["v0", "v1", "v2"]
    for thread in threads:
        thread.join(30)
    assert found == {1: ["v0", "v1", "v2"], 2: ["v0", "v1", "v2"]}
    closed(groups)


def test_a_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(group, "time", clock)  # it moves by sleeping only
    monkeypatch.setattr(group, "ranks", lambda: (0, 3))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with listening() as heard, pytest.raises(InvalidInput, match=r"stages 1, 2 did not come within 300 s"):
        PipelineGroup()
    assert heard.messages == ["waiting for stages 1, 2 to join"]


def test_an_address_that_swallows_packets_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection there ends by its timeout only. The user hears of it before the process gives up."""
    now, said = [0.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))

    def swallowed(address: tuple[str, int], seconds: float, *_: object) -> socket.socket:
        now[0] += seconds
        raise TimeoutError("timed out")

    monkeypatch.setattr(group, "time", clock)
    monkeypatch.setattr(group, "connect", swallowed)
    monkeypatch.setattr(group, "message", lambda text: said.append(now[0]))
    monkeypatch.setattr(group, "ranks", lambda: (1, 2))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(InvalidInput, match=r"stage 0 at 127\.0\.0\.1:\d+ \(timed out\) did not come within 30\d s"):
        PipelineGroup()
    assert len(said) == 1
    assert 10 <= said[0] <= 20


def test_a_process_that_sends_no_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, stage = groups = joined(monkeypatch, 2)
    monkeypatch.setattr(group, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(group, "SAY_SECONDS", 0.1)
    with listening() as heard, pytest.raises(StageLost, match=r"process \d+ did not send 'key' within 0\.1 s"):
        driver.exchange("key", "a")
    assert heard.messages == [f"waiting for {driver.names[1]} to send 'key'"]
    stage._close_links()
    with pytest.raises(StageLost, match=r"stage 1 of 0 to 1 .* is lost: it has ended"):
        driver.exchange("key", "a")
    closed(groups)


def test_strangers_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before the stages, say nothing, or the wrong thing, or have another secret. Only loopback listens."""
    port, stop, held = free_port(), threading.Event(), list[socket.socket]()

    def disturb() -> None:
        while not stop.wait(0.002):
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 1))
                held[-1].sendall(HEADER.pack(MAGIC | group.VALUE, 0, 0, group.MEET, 1, 0, 0, 0)[: 64 * (len(held) % 2)])
                with suppress(Broken, OSError), socket.create_connection(("127.0.0.1", port), 1) as other:
                    prove(other, b"another secret than that", b"stage 0 1", accepts=False)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        groups = joined(monkeypatch, 3, port=port, first=lambda: until(lambda: len(held) > 4))
    finally:
        stop.set()
        thread.join(PATIENCE)
        for each in held:
            each.close()
    hidden = groups[1].send(2, HIDDENS), groups[2].receive(1, HIDDENS)
    hidden[0].put(Frame(20, 1, 2, 3))
    assert hidden[1].get().job == 1
    closed(groups)


def test_a_stage_with_another_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter((b"one secret of a stage", b"another one of a stage"))
    monkeypatch.setattr(group, "secret_for", lambda host: next(drawn))
    with pytest.raises(InvalidInput, match=r"the 2 stages did not join at 127.* it has another secret; give both"):
        joined(monkeypatch, 2)


def test_the_drivers_address_in_the_store_of_torchrun_has_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage does not connect to an address that a stranger, or a driver of an earlier start, wrote there."""
    good, secret = ("10.0.0.1", 4000), b"0123456789abcdef"
    written = store.announced(secret, *good).encode()
    assert store.driver_address(secret, written) == good
    place = json.dumps(good).encode()
    values = (written.replace(b"4000", b"4001"), written.replace(b".1", b".2"), place, written[:63], b"", b"[" * 9999,
              written + b" ", place[:0].ljust(64, b"0") + place, "ü".encode() * 99)  # fmt: skip
    for told, own in ((written, secret[::-1]), *((value, secret) for value in values)):
        with pytest.raises(WrongSecret, match="stage 0's address in torchrun's store has the proof of another"):
            store.driver_address(own, told)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(WrongSecret):
        store.driver_address(secret, written)


def test_a_stage_meets_the_driver_that_the_store_names(monkeypatch: pytest.MonkeyPatch) -> None:
    values = dict[str, bytes]()
    fake = SimpleNamespace(
        set=lambda key, value: values.update({key: value.encode()}),
        check=lambda keys: set(keys) <= set(values),
        get=values.get,
    )
    monkeypatch.setattr(store, "agent_store", lambda: fake)
    closed(joined(monkeypatch, 2))
    assert json.loads(values["driver"][store.PLACE_PROOF_BYTES :])[0] == "127.0.0.1"


def test_the_driver_listens_where_stages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of one machine meet on the loopback interface; others need a secret that the user gives."""
    bound = list[tuple[str, int]]()
    listening_at = group._listening

    def listen(address: tuple[str, int]) -> socket.socket:
        bound.append(address)
        return listening_at(address)

    monkeypatch.setattr(group, "_listening", listen)
    closed(joined(monkeypatch, 2))
    assert [host for host, _ in bound] == ["127.0.0.1"] * 2
    monkeypatch.setattr(group, "_address", lambda interface: "10.9.8.7")
    with pytest.raises(InvalidInput, match="but there is no secret; set FLEXENGINE_SECRET_FILE to a file"):
        joined(monkeypatch, 2, "eth9")
    assert len(bound) == 2


def test_hidden_states_are_bounded_by_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, stage = groups = joined(monkeypatch, 2)
    sent, received = driver.send(1, HIDDENS), stage.receive(0, HIDDENS)
    for nbytes in (100, 10):  # those of an earlier job may still come
        stage.expect(0, nbytes)
        sent.put(Frame(OrderKind.HIDDEN, 1, body=torch.zeros(100, dtype=torch.uint8)))
        assert len(received.get().body) == 100
    sent.put(Frame(OrderKind.HIDDEN, 1, body=torch.zeros(101, dtype=torch.uint8)))
    with pytest.raises(StageLost, match="a message of 101 bytes was announced; kind 16 has at most 100"):
        received.get()
    closed(groups)


def test_frames_go_from_process_to_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, *stages = groups = joined(monkeypatch, 3)
    body = torch.arange(100, dtype=torch.uint8)
    hidden = stages[0].send(2, HIDDENS), stages[1].receive(1, HIDDENS)
    stages[1].expect(1, 100)
    hidden[0].put(Frame(20, 1, 2, 3, body))
    kind, *numbers, taken = hidden[1].get()
    assert (kind, numbers) == (20, [1, 2, 3])
    assert torch.equal(taken, body)
    for rank, stage in enumerate(stages, 1):
        orders, results = stage.receive(0, ORDERS), driver.receive(rank, RESULTS)
        driver.send(rank, ORDERS).put(Frame(21, 7))
        stage.send(0, RESULTS).put(Frame(22, orders.get().job + 1))
        assert results.get()[:3] == (22, 8, 0)
    assert driver.names == [f"{os.uname().nodename}, process {os.getpid()}"] * 3
    closed(groups)


def test_a_lost_stage_fails_all_channels_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, second = groups = joined(monkeypatch, 3)
    channels = [driver.send(rank, ORDERS) for rank in (1, 2)] + [driver.receive(rank, RESULTS) for rank in (1, 2)]
    second._close_links()  # as if its process were killed
    with pytest.raises(StageLost, match=r"stage 2 of 0 to 2 \(.* is lost: it has ended"):
        channels[3].get()
    for channel in channels[:2]:
        with pytest.raises(StageLost, match="stage 2"):
            channel.put(Frame(21))
    with pytest.raises(StageLost, match="stage 2"):
        channels[2].get()
    closed(groups)


def test_a_silent_stage_is_lost_unless_hidden_states_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(Connection, "beat", lambda _: None)
    driver, stage = groups = joined(monkeypatch, 2)
    hidden, results = stage.receive(0, HIDDENS), driver.receive(1, RESULTS)
    with pytest.raises(StageLost, match=r"it gave no sign of life for 0\.5 s"):
        results.get()
    assert hidden.thread.is_alive()
    closed(groups)


def test_an_interface_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"through interface none7: this machine has no such interface .* it has"):
        joined(monkeypatch, 1, "none7")


def test_a_channel_keeps_no_hidden_states_while_it_waits() -> None:
    channel, body = FrameChannel(), torch.zeros(8, dtype=torch.uint8)
    kept = weakref.ref(body)
    wire: Any = SimpleNamespace(send=lambda *message: None)
    channel.run(wire, lambda *_: None)
    channel.put(Frame(OrderKind.HIDDEN, body=body))
    del body
    until(lambda: kept() is None)
    channel.put(Frame(OrderKind.LAST))
    channel.thread.join(PATIENCE)


class Scripted:
    """A channel of frames that have arrived."""

    def __init__(self, *frames: Frame) -> None:
        self.frames = list(frames)

    def get(self, _: Any) -> Frame:
        return self.frames.pop(0)


def hidden(job: int, batch: int, value: float) -> Frame:
    body = torch.full([1, 3, 2], value, dtype=torch.float32).view(-1).view(torch.uint8)
    return Frame(OrderKind.HIDDEN, job, batch, 3, body)


def test_a_port_drops_hidden_states_of_earlier_jobs() -> None:
    """The first job ends after gpu_batch 1 came early. The second job gets neither that nor frames still on the way."""
    channel: Any = Scripted(hidden(1, 1, 0.25), hidden(1, 0, 0.5), hidden(1, 1, 0.75), hidden(2, 1, 8), hidden(2, 0, 9))
    port, target = ChannelPort(channel), torch.empty(1, 3, 2)
    port.job = 1
    port.take(0, target)
    assert target.tolist() == [[[0.5] * 2] * 3]
    port.job = 2
    port.take(1, target)
    assert target.tolist() == [[[8] * 2] * 3]
    port.take(0, target)
    assert target.tolist() == [[[9] * 2] * 3]
