"""The group of processes of a pipeline: values that all exchange, and their connections."""

import os
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.stages import group
from flexengine.guests.stages.group import HIDDENS, ORDERS, RESULTS, Frame, FrameChannel, OrderKind, PipelineGroup
from flexengine.guests.stages.remote import ChannelPort
from flexengine.guests.wire import link
from flexengine.guests.wire.link import Connection


class Store:
    """A store whose `wait` must not be called, as it does not look at processes that end."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, *_: Any) -> None:
        raise AssertionError("a thread waits in the store")

    def set_timeout(self, _: Any) -> None:
        pass


def member(store: Store, rank: int) -> PipelineGroup:
    made: PipelineGroup = object.__new__(PipelineGroup)
    made.rank, made.size, made._store = rank, 2, store
    return made


def test_values_are_exchanged_without_waiting_in_the_store() -> None:
    store, found = Store(), list[list[str]]()
    thread = threading.Thread(target=lambda: found.append(member(store, 1).exchange("key", "b")))
    thread.start()
    time.sleep(0.1)
    assert found == []
    assert member(store, 0).exchange("key", "a") == ["a", "b"]
    thread.join(30)
    assert found == [["a", "b"]]


def test_a_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOIN_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"stages 1 did not come within 0\.1 s"):
        member(Store(), 0).exchange("key", "a")


def joined(monkeypatch: pytest.MonkeyPatch, size: int, interface: str | None = None) -> list[PipelineGroup]:
    """Return the groups of processes, which are threads here, joined by sockets."""
    store, local = Store(), threading.local()
    groups: dict[int, PipelineGroup] = {}
    errors = list[Exception]()
    monkeypatch.setattr(group, "ranks", lambda: (local.rank, size))
    monkeypatch.setattr(PipelineGroup, "_join", lambda *_: store)

    def join(rank: int) -> None:
        local.rank = rank
        try:
            groups[rank] = PipelineGroup(interface)
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


def test_frames_go_from_process_to_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, *stages = groups = joined(monkeypatch, 3)
    body = torch.arange(100, dtype=torch.uint8)
    hidden = stages[0].send(2, HIDDENS), stages[1].receive(1, HIDDENS)
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
    deadline = time.monotonic() + 5
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept() is None
    channel.put(Frame(OrderKind.LAST))
    channel.thread.join(5)


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
