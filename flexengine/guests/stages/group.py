"""The group of processes that compute the stages of a model. The process of rank 0 computes the first stage, and drives
the job.

A process has two connections to the driver, for values that all exchange and for orders and results, and one to each
neighbour, for hidden states. They meet at the driver's address. Every connection begins with a proof of the secret
(`wire.secret`). Frames wait in queues, so that no thread that computes waits for a socket. Frames of one channel arrive
in order.
"""

import contextlib
import enum
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from flexengine.activity import message, messenger
from flexengine.engine.stages import ProcessGroup
from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.stages import store as stores
from flexengine.guests.wire.gate import Gate
from flexengine.guests.wire.link import MOST_BODY, MOST_TAKEN, Broken, Connection, pack, unpack
from flexengine.guests.wire.processes import INTERFACE, LOCAL, STAGES_SECRET, ranks
from flexengine.guests.wire.secret import NoSecret, WrongSecret, connect, is_loopback, secret_for

# Kinds of frames; see the table in `remote`. LAST ends a channel. Lower kinds are those of a connection.
OrderKind = enum.IntEnum(
    "OrderKind", "HIDDEN CHOOSE LAY_OUT PREPARE SWEEP END LEAVE ANSWER FAILED RESULT LAST", start=16
)
EMPTY = torch.empty(0, dtype=torch.uint8)
ORDERS, RESULTS, HIDDENS = 1, 2, 3  # channels: from the driver, to the driver, to the next stage
CONTROL, MEET = 0, 4  # connections of a stage to the driver, MEET for `exchange`; the other ones are for HIDDENS
VALUE = 2  # kind of the messages of `exchange`
PURPOSE = b"stage %d %d"  # of a connection: number of its kind, and rank of the process that connects
MOST_SHARED = 1 << 24  # bytes of a value that is exchanged, and of an error
# Most bytes of a body by kind; see `PipelineGroup.expect` for hidden states.
LIMITS: dict[int, int] = {
    **dict.fromkeys((OrderKind.END, OrderKind.LEAVE, OrderKind.LAST, OrderKind.HIDDEN), 0),
    **dict.fromkeys((OrderKind.CHOOSE, OrderKind.LAY_OUT, OrderKind.PREPARE), MOST_TAKEN),
    **dict.fromkeys((OrderKind.SWEEP, OrderKind.ANSWER, OrderKind.RESULT), MOST_TAKEN),
    **dict.fromkeys((OrderKind.FAILED, VALUE), MOST_SHARED),
}
SAY_SECONDS = 10.0  # of waiting, after which a message says for which process
JOIN_SECONDS = 300.0  # until all processes must have joined
CONNECT_SECONDS = 25.0  # until processes that have joined are connected
TRY_SECONDS = 5.0  # of one attempt to connect, of which there may be many
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
            InvalidInput: not all processes joined in time, or there is no secret.
        """
        self.rank, self.size = ranks()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._links: dict[tuple[int, int], Connection] = {}  # by MEET, CONTROL or HIDDENS, and rank
        self._channels: list[FrameChannel] = []
        self._lost: StageLost | None = None
        self.names = [f"stage {rank}" for rank in range(self.size)]  # until they have joined
        name = interface or os.environ.get(INTERFACE)
        try:
            self._join(name, look)
        except (StageLost, NoSecret):
            self._close_links()
            raise
        except Exception as error:
            self._close_links()
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise InvalidInput(
                f"the {self.size} stages did not join at {address} through interface {name or 'loopback'}: {error};"
                " start all of them with the same MASTER_ADDR and MASTER_PORT, and name the interface that joins the"
                " machines by --interface"
            ) from error

    def _join(self, interface: str | None, look: Callable[[], None]) -> None:
        """Connect to the driver and to the neighbours. Without an interface, all of them are on this machine."""
        host = _address(interface)
        self._secret = (os.environ.get(STAGES_SECRET) or "").encode() or secret_for(host)
        self._deadline = time.monotonic() + JOIN_SECONDS
        store, other = stores.agent_store(), not is_loopback(host)
        meeting = os.environ["MASTER_ADDR"] if other else LOCAL, int(os.environ["MASTER_PORT"])
        own = (host, 0) if self.rank or store is not None else ("" if other else host, meeting[1])
        wanted = {(tag, rank) for rank in range(1, self.size) for tag in (MEET, CONTROL) if self.rank == 0}
        after = {(HIDDENS, self.rank + 1)} if self.rank + 1 < self.size else set[tuple[int, int]]()
        with _listening(own) as server, self._accepting(server, wanted | after):
            if store is not None and self.rank == 0:
                store.set("driver", stores.announced(self._secret, host, server.getsockname()[1]))
            elif store is not None:
                self._await(lambda: store.check(["driver"]), lambda: "stage 0", look)
                meeting = stores.driver_address(self._secret, store.get("driver"))
            for tag in (MEET, CONTROL) if self.rank else ():
                self._connect(tag, 0, meeting, look)
            self._await(lambda: wanted <= set(self._links), lambda: self._missing(wanted), look)
            name = f"{os.uname().nodename}, process {os.getpid()}"
            values = self.exchange("process", json.dumps([name, host, server.getsockname()[1]]))
            self.names, hosts, ports = map(list, zip(*map(json.loads, values), strict=True))
            self._deadline = time.monotonic() + CONNECT_SECONDS
            if self.rank:
                self._connect(HIDDENS, self.rank - 1, (hosts[self.rank - 1], ports[self.rank - 1]), look)
            self._await(lambda: after <= set(self._links), lambda: self._missing(after), look)
        for (tag, _), link in self._links.items():
            if tag == CONTROL:
                link.beat()
            else:
                link.allow_silence()

    def _missing(self, wanted: set[tuple[int, int]]) -> str:
        return "stages " + ", ".join(map(str, sorted({rank for _, rank in wanted - set(self._links)})))

    def _await(self, done: Callable[[], bool], what: Callable[[], str], look: Callable[[], None]) -> None:
        """Wait until something is done. Raise TimeoutError at the deadline. what: names of what has not come."""
        began, said = time.monotonic(), False
        while not done():
            look()
            now = time.monotonic()
            if now > self._deadline:
                raise TimeoutError(f"{what()} did not come within {now - began:.0f} s")
            if now - began > SAY_SECONDS and not said:
                said = True
                message(f"waiting for {what()} to join")
            time.sleep(0.05)

    @contextlib.contextmanager
    def _accepting(self, server: socket.socket, wanted: set[tuple[int, int]]) -> Iterator[None]:
        """Accept connections while the block runs. wanted: their channels and ranks."""

        def admit(connection: socket.socket, name: str, purpose: bytes) -> None:
            link = Connection(connection)
            link.limits = LIMITS
            found = next((key for key in wanted if purpose == PURPOSE % key), None)
            if found is None or self._links.setdefault(found, link) is not link:
                link.close()

        def run() -> None:
            while not ended.is_set():
                gate.accept()

        gate, ended = Gate(server, self._secret, PURPOSE[:6], admit, messenger()), threading.Event()
        server.settimeout(0.1)
        (thread := threading.Thread(target=run, name="flexengine-gate", daemon=True)).start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _connect(self, tag: int, rank: int, address: tuple[str, int], look: Callable[[], None]) -> None:
        """Connect to another process, also if it does not listen yet. Raise InvalidInput, Broken or OSError."""
        why: list[Exception] = []

        def connected() -> bool:
            try:
                link = Connection(connect(address, TRY_SECONDS, PURPOSE % (tag, self.rank), self._secret))
                link.limits = LIMITS
                self._links[tag, rank] = link
                return True
            except WrongSecret:
                raise
            except (OSError, Broken) as error:
                why[:] = [error]
                return False

        self._await(connected, lambda: f"stage {rank} at {address[0]}:{address[1]} ({why[0]})", look)

    def exchange(self, key: str, value: str) -> list[str]:
        values = {self.rank: value}
        if self.rank:
            self._links[MEET, 0].send(VALUE, (), pack([key, value]))
            found: list[str] = self._value(0, key)
            return found
        for rank in range(1, self.size):
            there, values[rank] = self._value(rank, key)
            if there != key:
                raise InvalidInput(f"stage {rank} sends {there!r}, but {key!r} is due; run the same version in all")
        for rank in range(1, self.size):
            self._links[MEET, rank].send(VALUE, (), pack(list(values.values())))
        return list(values.values())

    def _value(self, rank: int, key: str) -> list[str]:
        link = self._links[MEET, rank]
        try:
            if not link.readable(SAY_SECONDS):
                message(f"waiting for {self.names[rank]} to send {key!r}")
                if not link.readable(JOIN_SECONDS):
                    raise TimeoutError(f"{self.names[rank]} did not send {key!r} within {JOIN_SECONDS:g} s")
            link.receive()
            return unpack(link.take(MOST_SHARED), list)
        except (Broken, TimeoutError) as error:
            raise StageLost(rank, self.size, self.names[rank], str(error)) from error

    def expect(self, rank: int, nbytes: int) -> None:
        """Accept hidden states from a process in messages of this many bytes, or of as many as before. Those of an
        earlier job may still come."""
        link = self._links[HIDDENS, rank]
        before = LIMITS if link.limits is None else link.limits
        link.limits = {**before, OrderKind.HIDDEN: max(nbytes, before[OrderKind.HIDDEN])}

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


def _listening(address: tuple[str, int]) -> socket.socket:
    both = not address[0] and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, dualstack_ipv6=both)


def _address(interface: str | None) -> str:
    if interface is None:
        return LOCAL
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family:
                return str(address.address)
    raise InvalidInput(f"this machine has no such interface with an address; it has {', '.join(interfaces)}")
