"""The group of processes that compute the stages of a model. The process of rank 0 computes the first stage, and drives
the job.

A process has a connection to the driver, for orders and results, and one to each neighbour, for hidden states. They
meet in the store that torchrun, or the driver, serves. Frames wait in queues, so that no thread that computes waits for
a socket. Frames of one channel arrive in order.
"""

import contextlib
import enum
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from flexengine.engine.stages import ProcessGroup
from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.wire.link import MOST_BODY, Broken, Connection, pack, unpack
from flexengine.guests.wire.processes import INTERFACE, LOCAL, ranks

# Kinds of frames; see the table in `remote`. LAST ends a channel. Lower kinds are those of a connection.
OrderKind = enum.IntEnum(
    "OrderKind", "HIDDEN CHOOSE LAY_OUT PREPARE SWEEP END LEAVE ANSWER FAILED RESULT LAST", start=16
)
EMPTY = torch.empty(0, dtype=torch.uint8)
ORDERS, RESULTS, HIDDENS = 1, 2, 3  # channels: from the driver, to the driver, to the next stage
CONTROL = 0  # connection of a stage to the driver; the other ones are for HIDDENS
HELLO = 1  # kind of the first message of a connection
STORE_SECONDS = 20.0  # without an answer of the store, until it counts as lost
JOIN_SECONDS = 300.0  # until all processes must have joined
CONNECT_SECONDS = 25.0  # until processes that have joined are connected
LEAVE_SECONDS = 5.0  # for which `close` waits for the other processes


class Frame(NamedTuple):
    """A message."""

    kind: int  # number of its kind
    job: int = 0  # number of the job
    number: int = 0  # number whose meaning depends on the kind
    tokens: int = 0  # tokens of hidden states
    body: Tensor = EMPTY  # uint8 [bytes], in RAM


class Ended(Exception):
    """The job ended while a thread waited for a frame."""


class FrameChannel:
    """Frames that wait, between two threads, of which one may send them to a process of the group, or receive them.

    Any number of received frames waits, so that the other process never waits for this one. After `fail`, `put` and
    `get` raise its error.

    Args:
        most: most frames that wait; `put` then waits. None for no limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most, self._frames = most, deque[Frame]()
        self._changed = threading.Condition()
        self._error: StageLost | None = None
        self.seen: Callable[[Frame], None] | None = None

    def put(self, frame: Frame) -> None:
        """Add a frame. Wait while `most` frames wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._most is None or len(self._frames) < self._most)
            if self._error is not None:
                raise self._error
            self._frames.append(frame)
            self._changed.notify_all()

    def get(self, ended: Callable[[], bool] = lambda: False) -> Frame:
        """Return the first frame. Wait until there is one. Raise Ended if `ended()` is true, which is looked at after
        every `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._frames or ended())
            if ended():
                raise Ended
            if not self._frames:
                assert self._error is not None
                raise self._error
            self._changed.notify_all()
            return self._frames.popleft()

    def wake(self) -> None:
        """Let `get` look at its `ended` again."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: StageLost) -> None:
        """Let all calls raise an error. Frames that arrived before it can still be taken."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def run(
        self, link: Connection, lost: Callable[["FrameChannel", str], None], seen: Callable[[Frame], None] | None = None
    ) -> None:
        """Send or receive the frames in a thread, until frame LAST.

        Args:
            lost: called with the channel and the reason if the connection breaks.
            seen: called with every frame that is received, from the thread; None for a channel that sends.
        """
        self.seen = seen
        self.thread = threading.Thread(target=self._loop, args=(link, lost), name="flexengine-channel", daemon=True)
        self.thread.start()

    def _loop(self, link: Connection, lost: Callable[["FrameChannel", str], None]) -> None:
        kind = 0
        try:
            while kind != OrderKind.LAST:
                if self.seen is None:
                    kind, *numbers, body = self.get()
                    link.send(kind, numbers, body)
                    del body  # no hidden states are kept while the thread waits
                else:
                    kind, (job, number, tokens, *_), _ = link.receive()
                    frame = Frame(kind, job, number, tokens, link.take(MOST_BODY))
                    self.put(frame)
                    self.seen(frame)
                    del frame
        except StageLost:  # from `get` or `put`
            return
        except (Broken, MemoryError, RuntimeError) as error:  # RuntimeError: no memory for a tensor
            lost(self, str(error))


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
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._links: dict[tuple[int, int], Connection] = {}  # by CONTROL or HIDDENS, and rank
        self._channels: list[FrameChannel] = []
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
        return self._channel(rank, tag, most, None)

    def receive(self, rank: int, tag: int, seen: Callable[[Frame], None] = lambda frame: None) -> FrameChannel:
        """Return a channel of frames from a process. seen: as for `FrameChannel.run`."""
        return self._channel(rank, tag, None, seen)

    def _channel(self, rank: int, tag: int, most: int | None, seen: Callable[[Frame], None] | None) -> FrameChannel:
        def lost(channel: FrameChannel, why: str) -> None:
            error = self._lost or StageLost(rank, self.size, self.names[rank], why)
            if tag == HIDDENS:
                channel.fail(error)
                return
            self._lost = error  # between the driver and a stage, all channels raise it
            for each in self._channels:
                each.fail(error)

        channel = FrameChannel(most)
        channel.run(self._links[tag if tag == HIDDENS else CONTROL, rank], lost, seen)
        self._channels.append(channel)
        if self._lost is not None:
            channel.fail(self._lost)
        return channel

    def close(self) -> None:
        """Leave the group. Wait for a moment until the other processes leave, too."""
        with contextlib.suppress(StageLost):
            for channel in self._channels:
                if channel.seen is None:
                    channel.put(Frame(OrderKind.LAST))
        deadline = time.monotonic() + LEAVE_SECONDS
        for channel in self._channels:
            channel.thread.join(max(0.0, deadline - time.monotonic()))
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
        return LOCAL
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family:
                return str(address.address)
    raise InvalidInput(f"this machine has no such interface with an address; it has {', '.join(interfaces)}")
