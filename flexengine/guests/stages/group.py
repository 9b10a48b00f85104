"""The group of processes that compute the stages of a model. The process of rank 0 computes the first stage, and drives
the job.

A process has a connection to the driver, for orders and results, and one to each neighbour, for hidden states. They
meet in the store that torchrun, or the driver, serves.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from flexengine.engine.guests import ProcessGroup
from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.stages.frames import LAST, Frame, FrameChannel, SocketChannel
from flexengine.guests.stages.launch import INTERFACE, ranks
from flexengine.guests.wire.link import Broken, Connection, pack, unpack

ORDERS, RESULTS, HIDDENS = 1, 2, 3  # channels: from the driver, to the driver, to the next stage
CONTROL = 0  # connection of a stage to the driver; the other ones are for HIDDENS
HELLO = 1  # kind of the first message of a connection
LOOPBACK = "127.0.0.1"
STORE_SECONDS = 20.0  # without an answer of the store, until it counts as lost
JOIN_SECONDS = 300.0  # until all processes must have joined
CONNECT_SECONDS = 25.0  # until processes that have joined are connected
LEAVE_SECONDS = 5.0  # for which `close` waits for the other processes
_LOCAL_VARIABLES = (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


class PipelineGroup(ProcessGroup):
    """The processes of a pipeline, joined by sockets. A process that dies or hangs is noticed by its connection to the
    driver."""

    def __init__(self, interface: str | None = None, look: Callable[[], None] = lambda: None) -> None:
        """Join the group that the environment names. Wait until all processes have joined.

        Args:
            interface: name of the network interface; None for the loopback interface, on one machine.
            look: called about 20 times a second while this process waits; may raise an error.

        Raises:
            InvalidInput: not all processes joined in time.
        """
        self.rank, self.size = ranks()
        self.local_size, self.local_rank = (int(os.environ.get(n, d)) for n, d in _LOCAL_VARIABLES)
        self._links: dict[tuple[int, int], Connection] = {}  # by CONTROL or HIDDENS, and rank
        self._channels: list[SocketChannel] = []
        self._senders: list[SocketChannel] = []
        self._lost: StageLost | None = None
        name = interface or os.environ.get(INTERFACE)
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            self._store = self._join(look)
            self._connect(_address(name))
        except StageLost:
            raise
        except Exception as error:
            self._close_links()
            raise InvalidInput(
                f"the {self.size} stages did not join at {address} through interface {name or 'loopback'}: {error};"
                " start all of them with the same MASTER_ADDR and MASTER_PORT, and name the interface that joins the"
                " machines by --interface"
            ) from error
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def _join(self, look: Callable[[], None]) -> Any:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process serves the store
        serves = self.rank == 0 and not agent
        whole = TCPStore(host, port, self.size, serves, timedelta(seconds=JOIN_SECONDS), wait_for_workers=False)
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
        store.set(f"here/{self.rank}", "")
        _await(store, "here", self.size, look)
        return store

    def _connect(self, host: str) -> None:
        """Connect to the driver and to the neighbours. host: address of this machine at which it listens."""
        key = secrets.token_hex(16)  # other programs that connect do not know it
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            name = f"{os.uname().nodename}, process {os.getpid()}"
            values = self.exchange("process", json.dumps([name, host, server.getsockname()[1], key]))
            self.names, hosts, ports, keys = map(list, zip(*map(json.loads, values), strict=True))
            for tag, rank in ((CONTROL, 0), (HIDDENS, self.rank - 1)) if self.rank else ():
                self._links[tag, rank] = link = Connection(
                    socket.create_connection((hosts[rank], ports[rank]), CONNECT_SECONDS)
                )
                link.send(HELLO, (tag, self.rank), pack(keys[rank]))
            accepted = {(CONTROL, rank) for rank in range(1, self.size) if self.rank == 0}
            accepted |= {(HIDDENS, self.rank + 1)} if self.rank + 1 < self.size else set()
            deadline = time.monotonic() + CONNECT_SECONDS
            while not accepted <= set(self._links):
                server.settimeout(max(0.1, deadline - time.monotonic()))
                self._accept(server.accept()[0], key)
        for (tag, _), link in self._links.items():
            if tag == CONTROL:
                link.beat()
            else:
                link.allow_silence()

    def _accept(self, connection: socket.socket, key: str) -> None:
        link = Connection(connection)
        try:
            hello = link.receive()
            if unpack(link.take(), str) == key:
                self._links[hello.numbers[0], hello.numbers[1]] = link
                return
        except Broken:
            pass
        link.close()

    def exchange(self, key: str, value: str) -> list[str]:
        self._store.set(f"{key}/{self.rank}", value)
        return [self._store.get(name).decode() for name in _await(self._store, key, self.size)]

    def send(self, rank: int, tag: int, most: int = 2) -> FrameChannel:
        """Return a channel of frames to a process. most: most frames that wait."""
        self._senders.append(self._channel(rank, tag, most, None))
        return self._senders[-1]

    def receive(self, rank: int, tag: int, seen: Callable[[Frame], None] = lambda frame: None) -> FrameChannel:
        """Return a channel of frames from a process. seen: as for `SocketChannel`."""
        return self._channel(rank, tag, None, seen)

    def _channel(self, rank: int, tag: int, most: int | None, seen: Callable[[Frame], None] | None) -> SocketChannel:
        def lost(channel: FrameChannel, why: str) -> None:
            error = self._lost or self.lost(rank, why)
            if tag == HIDDENS:
                channel.fail(error)
                return
            self._lost = error  # between the driver and a stage, all channels raise it
            for each in self._channels:
                each.fail(error)

        link = self._links[tag if tag == HIDDENS else CONTROL, rank]
        self._channels.append(SocketChannel(link, lost, most, seen))
        if self._lost is not None:
            self._channels[-1].fail(self._lost)
        return self._channels[-1]

    def lost(self, rank: int, why: str) -> StageLost:
        """Return the error of a stage that has died or hangs."""
        return StageLost(rank, self.size, self.names[rank], why)

    def close(self) -> None:
        """Leave the group. Wait for a moment until the other processes leave, too."""
        with contextlib.suppress(StageLost):
            for channel in self._senders:
                channel.put(Frame(LAST))
        deadline = time.monotonic() + LEAVE_SECONDS
        for channel in self._channels:
            channel.wait(max(0.0, deadline - time.monotonic()))
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()


def _await(store: Any, key: str, size: int, look: Callable[[], None] = lambda: None) -> list[str]:
    """Wait until all processes have set a key, and return these keys. Raise TimeoutError after JOIN_SECONDS.

    Unlike `store.wait`, this looks at whether processes have ended meanwhile.
    """
    deadline, keys = time.monotonic() + JOIN_SECONDS, [f"{key}/{rank}" for rank in range(size)]
    while not store.check(keys):
        look()
        if time.monotonic() > deadline:
            missing = [name.rpartition("/")[2] for name in keys if not store.check([name])]
            raise TimeoutError(f"stages {', '.join(missing)} did not come within {JOIN_SECONDS:g} s")
        time.sleep(0.05)
    return keys


def _address(interface: str | None) -> str:
    if interface is None:
        return LOOPBACK
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family:
                return str(address.address)
    raise InvalidInput(f"this machine has no such interface with an address; it has {', '.join(interfaces)}")
