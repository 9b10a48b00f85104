"""The group of processes that compute the stages of a model. The process of rank 0 computes the first stage, and drives
the job."""

import contextlib
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from flexengine.errors import InvalidInput, StageLost
from flexengine.parallel.environment import INTERFACE, ranks
from flexengine.parallel.frames import LAST, Channel, Frame, receiver, sender
from flexengine.parallel.heartbeat import Heartbeat

ORDERS, RESULTS, HIDDENS = 1, 2, 3  # channels: from the driver, to the driver, to the next stage
LOOPBACK = "lo"
STORE_SECONDS = 20.0  # without an answer of the store, until it counts as lost
JOIN_SECONDS = 300.0  # until all processes must have joined
CONNECT_SECONDS = 25.0  # until processes that have joined are connected
LEAVE_SECONDS = 5.0  # for which `close` waits for the other processes
_LOCAL_VARIABLES = (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
_CPU = torch.device("cpu")


class Group:
    """The processes of a pipeline, from the view of one of them.

    Attributes:
        rank: number of this process, and of its stage.
        size: number of processes.
        local_size: number of processes on this machine.
        local_rank: number of this process among them.
        names: host and process number of each, for messages.
    """

    def __init__(self, interface: str | None = None, look: Callable[[], None] = lambda: None) -> None:
        """Join the group that the environment names. Wait until all processes have joined.

        Args:
            interface: name of the network interface; None for the loopback interface, on one machine.
            look: called about five times a second while this process waits; may raise an error.

        Raises:
            InvalidInput: not all processes joined in time.
        """
        self.rank, self.size = ranks()
        self.local_size, self.local_rank = (int(os.environ.get(n, d)) for n, d in _LOCAL_VARIABLES)
        self._interface = os.environ.get(INTERFACE)  # before this group
        _choose(interface)
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            store = self._join(look)
            dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=self.rank,
                                    world_size=self.size, timeout=timedelta(seconds=CONNECT_SECONDS))  # fmt: skip
        except StageLost:
            raise
        except Exception as error:
            raise InvalidInput(f"the {self.size} stages did not join at {address} through interface"
                               f" {os.environ[INTERFACE]}: {error}; start all of them with the same MASTER_ADDR and"
                               " MASTER_PORT, and name the interface that joins the machines by --interface"
                               ) from error  # fmt: skip
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._store, self._beats = store, PrefixStore("beats", store)
        self._groups = {tag: dist.new_group(backend="gloo") for tag in (ORDERS, RESULTS, HIDDENS)}
        self._channels: list[Channel] = []
        self._senders: list[Channel] = []
        self._lost: StageLost | None = None
        self.names = self.exchange("name", f"{os.uname().nodename}, process {os.getpid()}")
        watched = range(1, self.size) if self.rank == 0 else (0,)
        self._heartbeat = Heartbeat(self._beats, self.rank, watched, self._fail)

    def _join(self, look: Callable[[], None]) -> Any:
        """Return the store, after all processes have come."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        whole = TCPStore(host, port, self.size, serves, timedelta(seconds=JOIN_SECONDS), wait_for_workers=False)
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
        store.set(f"here/{self.rank}", "")
        _await(store, "here", self.size, look)
        return store

    def exchange(self, key: str, value: str) -> list[str]:
        """Return the values that all processes give, in the order of their ranks. Wait for all of them."""
        self._store.set(f"{key}/{self.rank}", value)
        keys = _await(self._store, key, self.size)
        return [self._store.get(each).decode() for each in keys]

    def send(self, rank: int, tag: int, most: int = 2) -> Channel:
        """Return a channel of frames to a process. most: most frames that wait."""
        self._senders.append(self._added(sender(self._backend(tag), rank, tag, self._lost_by(rank), most)))
        return self._senders[-1]

    def receive(self, rank: int, tag: int, seen: Callable[[Frame], None] = lambda frame: None) -> Channel:
        """Return a channel of frames from a process. seen: as for `frames.receiver`."""
        return self._added(receiver(self._backend(tag), rank, tag, self._lost_by(rank), seen))

    def _backend(self, tag: int) -> Any:
        return self._groups[tag]._get_backend(_CPU)

    def _lost_by(self, rank: int) -> Callable[[Exception], StageLost]:
        return lambda error: self._lost or self.lost(rank, str(error))

    def _added(self, channel: Channel) -> Channel:
        self._channels.append(channel)
        if self._lost is not None:
            channel.queue.fail(self._lost)
        return channel

    def lost(self, rank: int, why: str) -> StageLost:
        """Return the error of a stage that has died or hangs."""
        return StageLost(rank, self.size, self.names[rank], reason(why))

    def _fail(self, rank: int, why: str) -> None:
        """Let all channels raise the error of a lost stage."""
        self._lost = self.lost(rank, why)
        for channel in self._channels:
            channel.queue.fail(self._lost)

    def close(self) -> None:
        """Leave the group. Wait for a moment until the other processes leave, too."""
        self._heartbeat.end()
        with contextlib.suppress(StageLost):
            for channel in self._senders:
                channel.queue.put(Frame(LAST, 0, 0, torch.empty(0, dtype=torch.uint8)))
        deadline = time.monotonic() + LEAVE_SECONDS
        for channel in self._channels:
            channel.wait(max(0.0, deadline - time.monotonic()))
        if self._interface is None:
            os.environ.pop(INTERFACE, None)
        else:
            os.environ[INTERFACE] = self._interface
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _await(store: Any, key: str, size: int, look: Callable[[], None] = lambda: None) -> list[str]:
    """Wait until all processes have set a key, and return these keys. Raise TimeoutError after JOIN_SECONDS.

    `store.wait` would keep the heartbeat, which uses the same connection, from counting up.
    """
    deadline, keys = time.monotonic() + JOIN_SECONDS, [f"{key}/{rank}" for rank in range(size)]
    while not store.check(keys):
        look()
        if time.monotonic() > deadline:
            missing = [each.rpartition("/")[2] for each in keys if not store.check([each])]
            raise TimeoutError(f"stages {', '.join(missing)} did not come within {JOIN_SECONDS:g} s")
        time.sleep(0.05)
    return keys


def reason(why: str) -> str:
    """Return a message of gloo without the source line at its beginning, and the advice about logs at its end."""
    first = why.partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[\S*\.cc:\d+\] ", "", first) or "its connection broke"


def _choose(interface: str | None) -> None:
    """Set the network interface of gloo."""
    if interface is not None or INTERFACE not in os.environ:
        os.environ[INTERFACE] = interface or LOOPBACK
