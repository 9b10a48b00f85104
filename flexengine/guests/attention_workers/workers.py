"""Attention workers, of this machine or of others.

Processes that this one starts end when it closes them. The stages of a pipeline share them: the process of the first
stage starts them, and each listens at a Unix socket for the others.

Workers on other machines are reached over TCP: `serve_forever` there, `connecting` here. Both sides prove a shared
secret first (`wire.secret`). Connections are not encrypted.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flexengine.activity import activity, message
from flexengine.config import DEVICE_NAME, parse_size, started_workers
from flexengine.engine.stages import ProcessGroup
from flexengine.errors import InvalidInput, OutOfMemory, WorkerLost, shown
from flexengine.errors import size as size_text
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.devices import environment_of, open_device
from flexengine.guests.attention_workers.pool import RECORDS, WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.wire.gate import Gate
from flexengine.guests.wire.link import Broken, Connection
from flexengine.guests.wire.processes import INTERRUPTS, ChildProcess
from flexengine.guests.wire.secret import WrongSecret, connect
from flexengine.places import MOST_WORKERS, worker_names
from flexengine.tier.base import Ledger, Region, Tier, aligned

WAIT_SECONDS = 0.5  # between two attempts to connect to a worker that was lost


class WorkerTier(Tier):
    """Memory of one worker: pages of prompts are stored there, and read for later chunks. `Region.place` is the handle.

    Attributes:
        client: connection to the worker.
        engines: engines that share the worker, of which this is one: each takes at most an equal part of its memory.
    """

    def __init__(self, connect: Callable[[str], Client], name: str, engines: int = 1) -> None:
        """Connect to the worker of a place. connect: starts the worker, or connects to a running one; gets the name of
        the place; may raise WorkerLost."""
        self._connect, self.client, self.name, self.engines = connect, connect(name), name, engines
        self.ledger = Ledger(self.name, self._room())
        self._earlier = (0, 0)  # bytes of questions and answers of lost workers
        self._held: dict[int, tuple[int, str]] = {}  # by handle: bytes of a region, and their purpose

    def renew(self) -> None:
        """Replace a lost worker by a new one. Regions stay, with undefined contents.

        Raises:
            WorkerLost: there is no new worker, or other engines hold all its memory.
            OutOfMemory: the new worker has too little memory for the regions.
        """
        self.client.close()
        client = self._reconnected()
        self._earlier, self.client = self.attention_bytes, client
        self.ledger.capacity = self._room()
        for handle, (size, what) in self._held.items():
            if client.allocate(size, handle=handle) is None:
                raise OutOfMemory(self.name, what, size)

    def _reconnected(self) -> Client:
        for wait in (WAIT_SECONDS,) * int(self.client.patience / WAIT_SECONDS):
            with contextlib.suppress(WorkerLost, OutOfMemory):
                return self._connect(self.name)
            time.sleep(wait)
        try:
            return self._connect(self.name)
        except OutOfMemory as error:
            why = "other engines hold all its memory now; run the same command again when one of them has ended"
            raise WorkerLost(self.name, self.client.name, why) from error

    def _room(self) -> int:
        client = self.client
        return min(client.memory, (client.memory + client.others) // self.engines)

    def rename(self, name: str) -> None:
        self.name = self.ledger.name = name
        self.client.rename(name)

    @property
    def local_bytes(self) -> int:  # type: ignore[override]
        return self.client.local_bytes

    @property
    def attention_bytes(self) -> tuple[int, int]:  # type: ignore[override]
        return self._earlier[0] + self.client.asked, self._earlier[1] + self.client.answered

    def allocate(self, nbytes: int, what: str, dtype: torch.dtype = torch.uint8) -> Region:
        size = aligned(nbytes)
        with self.ledger.booked(size, what):
            if (handle := self.client.allocate(size)) is None:
                held = f", as other engines hold {size_text(self.client.others)} of the worker"
                raise OutOfMemory(self.name, what + held * (self.client.others > 0), size)
        self._held[handle] = size, what
        return Region(handle, 0, nbytes, dtype)

    def free(self, region: Region, what: str) -> None:
        del self._held[region.place]
        self.client.free(region.place)
        self.ledger.release(aligned(region.nbytes), what)

    def load_all(self, pairs: Sequence[tuple[Region, Tensor]]) -> None:
        self.client.read_all([(region.place, region.start, target) for region, target in pairs])
        self.count(read=sum(region.nbytes for region, _ in pairs))

    def store_all(self, pairs: Sequence[tuple[Tensor, Region]]) -> None:
        self.client.write_all([(region.place, region.start, source) for source, region in pairs])
        self.count(written=sum(region.nbytes for _, region in pairs))

    def close(self) -> None:
        self.client.close()


def worker_tiers(connects: Sequence[Callable[[str], Client]], engines: int = 1) -> list[WorkerTier]:
    """Return a tier for each worker, named by its place: first the workers in memory, then those with pages in a file,
    if some are in memory. Raise the error of the first that cannot be connected, after ending the others. engines: as
    in WorkerTier."""
    with contextlib.ExitStack() as connected:
        tiers = list[WorkerTier]()
        for connect, name in zip(connects, worker_names(len(connects)), strict=True):
            tiers.append(WorkerTier(connect, name, engines))
            connected.callback(tiers[-1].close)
            for other in tiers[:-1]:
                if other.client.pool == tiers[-1].client.pool:
                    both = f"{other.client.name} and {tiers[-1].client.name}"
                    raise InvalidInput(f"{both} are one attention worker with two addresses; name each worker once")
        connected.pop_all()
    tiers.sort(key=lambda tier: tier.client.pages == "file")
    filed = sum(tier.client.pages == "file" for tier in tiers)
    for tier, name in zip(tiers, worker_names(len(tiers), filed if filed < len(tiers) else 0), strict=True):
        tier.rename(name)
    return tiers


MOST_PATH = 107  # bytes of the name of a Unix socket
PURPOSE = b"attention"  # of connections to attention workers
CONNECT_SECONDS = 10.0  # to a worker of another machine
START_SECONDS = 120.0  # until a process must have loaded its libraries and kernels


class LocalWorker(Client):
    """A worker in a process of its own, at the other end of a pair of sockets.

    The process ends by itself when this one ends, as its connection then does. It ignores SIGINT and SIGTERM.
    """

    def __init__(self, place: str, memory: int, threads: int, path: Path | None = None, device: str = "cpu") -> None:
        """Start the process. Raise WorkerLost if it does not start. path: Unix socket at which it listens for other
        engines; None for no others. device: as in `open_device`."""
        own, other = socket.socketpair()
        argv = ["-m", __package__, str(other.fileno()), str(memory), device, *([] if path is None else [str(path)])]
        with other, contextlib.ExitStack() as undo:
            undo.callback(own.close)
            self.process = ChildProcess(argv, environment_of(device, threads), INTERRUPTS, [other.fileno()])
            undo.pop_all()
        try:
            super().__init__(Connection(own, first_seconds=START_SECONDS), place, shares=True, threads=threads)
        except BaseException as error:
            tail = self.process.end(0.0)
            if isinstance(error, WorkerLost) and tail:
                raise WorkerLost(place, place, f"{error.why}; its last messages: {tail}") from error
            raise

    def close(self) -> None:
        super().close()
        self.process.end()


class JoinedWorker(Client):
    """A worker that another process of this machine has started."""

    def __init__(self, place: str, path: Path, threads: int, engine: int) -> None:
        """Connect to the worker at a Unix socket. Raise WorkerLost if it does not listen. engine: as in Client."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise WorkerLost(place, place, f"it does not listen ({error.strerror or error})") from error
        super().__init__(Connection(connection), place, shares=True, threads=threads, engine=engine)


def open_workers(given: int | Sequence[str], memory: int, engines: int, group: ProcessGroup | None) -> list[WorkerTier]:
    """Return the tiers of an engine's attention workers. The first process of a group starts them, the others join.

    Args:
        given: number of processes to start on this machine, or their devices, or addresses of running workers.
        memory: bytes for pages of each process that is started.
        engines: engines that share the workers at the addresses.
        group: processes on this machine that share the started workers; None for this process alone.

    Raises:
        InvalidInput: the directory of temporary files has a too long name for sockets.
        WorkerLost: a worker cannot be started, or does not answer.
    """
    if (devices := started_workers(given)) is None:
        assert not isinstance(given, int)
        return worker_tiers(list(map(connecting, given)), engines)
    engines = 1 if group is None else group.size
    threads = max(1, len(os.sched_getaffinity(0)) // (len(devices) + engines))
    if group is None:
        return _started(devices, memory, threads, engines, None)
    if group.rank > 0:
        folder = Path(json.loads(group.exchange("attention workers", "")[0]))
        join = partial(JoinedWorker, threads=threads)
        joins = [partial(join, path=folder / str(n), engine=secrets.randbits(62)) for n in range(len(devices))]
        return worker_tiers(joins, engines)
    folder = Path(tempfile.mkdtemp(prefix="flexengine-"))
    try:
        if (length := len(os.fsencode(folder / str(len(devices))))) > MOST_PATH:
            what = f"TMPDIR is {tempfile.gettempdir()}, in which the name of a socket has {length} bytes"
            raise InvalidInput(f"{what}; at most {MOST_PATH} are possible: set it to a shorter one")
        tiers = _started(devices, memory, threads, engines, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(tiers[0], shutil.rmtree, folder, ignore_errors=True)
    group.exchange("attention workers", json.dumps(str(folder)))
    return tiers


def _started(devices: Sequence[str], memory: int, threads: int, engines: int, folder: Path | None) -> list[WorkerTier]:
    """Return the tiers of new workers. folder: directory of their sockets; None if other engines do not share them."""
    start = partial(LocalWorker, memory=memory, threads=threads)
    starts = [partial(start, path=folder and folder / str(n), device=device) for n, device in enumerate(devices)]
    with activity("starting", "starting the processes of attention workers"):
        return worker_tiers(starts, engines)


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of text such as 10.0.0.2:29600. Raise InvalidInput if it is no such text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(
            f"{shown(text)} is no address of an attention worker; give HOST:PORT, such as 10.0.0.2:29600"
        )
    return host.strip("[]"), int(port)


def check_workers(given: int | Sequence[str], memory: str | int | None) -> None:
    """Raise InvalidInput if options of attention workers are wrong; see `MachineOptions`. memory: of each worker."""
    count = given if isinstance(given, int) else len(given)
    if not 0 <= count <= MOST_WORKERS:
        raise InvalidInput(f"--attention-workers is {count}; it must be 0 to {MOST_WORKERS}")
    if isinstance(given, str) or not (isinstance(given, int) or all(isinstance(each, str) for each in given)):
        what = "it must be a number of processes, or a list of devices or of addresses HOST:PORT"
        raise InvalidInput(f"attention_workers is {shown(given)}; {what}")
    if not isinstance(given, int) and started_workers(given) is None:
        if memory is not None:
            raise InvalidInput(
                f"--worker-mem is {memory}, but workers at addresses have memory of their own; give it to flexengine"
                " serve-attention"
            )
        if any(map(DEVICE_NAME.fullmatch, given)):
            both = f"--attention-workers is {shown(','.join(given))}, devices and addresses"
            raise InvalidInput(f"{both}; start workers with flexengine serve-attention --device, and name addresses")
        for address in given:
            address_of(address)
        if twice := next((each for each in given if list(given).count(each) > 1), None):
            raise InvalidInput(f"--attention-workers names {twice} twice; name each worker once")
    elif memory is None:
        raise InvalidInput(
            "--attention-workers needs --worker-mem, the bytes for KV cache of each worker; set it, for example to 2G"
        )
    elif not count:
        remedy = "set --attention-workers, or leave it out"
        raise InvalidInput(f"--worker-mem is {memory}, but there are no attention workers; {remedy}")
    else:
        parse_size(memory, "--worker-mem")


class RemoteWorker(Client):
    """A worker that was started on another machine, or on this one, and listens at an address."""

    patience = 20.0

    def __init__(self, place: str, address: str, engine: int | None = None) -> None:
        """Connect to the worker at HOST:PORT. Raise InvalidInput if it refuses, has another secret, or the address is
        wrong, OutOfMemory if other engines hold all its memory, WorkerLost if it does not listen there. engine: as in
        Client."""
        lost = partial(WorkerLost, place, f"{place} ({address})")
        remedy = "check the address, or start flexengine serve-attention there"
        try:
            connection = connect(address_of(address), CONNECT_SECONDS, PURPOSE)
        except WrongSecret as error:
            raise InvalidInput(f"attention worker {place} ({address}): {error}") from error
        except Broken as error:
            raise lost(f"no attention worker answers there ({error}); {remedy}") from error
        except OSError as error:
            why = f"it does not answer ({error.strerror or error}); start it there with flexengine serve-attention"
            raise lost(f"{why}, and run the same command again") from error
        try:
            super().__init__(Connection(connection), place, engine=engine)
        except WorkerLost as error:
            raise lost(f"no attention worker answers there ({error.why}); {remedy}") from error
        if self.others:
            held, left = map(size_text, (self.others, self.memory))
            message(f"{self.name}: other engines hold {held} of its memory; {left} are left")
        if not self.memory:
            self.close()
            why = f"other engines hold all memory of {self.name}; run the same command again when one of them has"
            why += " ended, or give flexengine serve-attention a larger --worker-mem"
            raise OutOfMemory(place, "KV cache", 1, self.others, self.others, why)


def connecting(address: str) -> Callable[[str], RemoteWorker]:
    """Return a function that connects to the worker at an address, at every call as the same engine. Its argument is
    the name of the worker's place."""
    return partial(RemoteWorker, address=address, engine=secrets.randbits(62))


def serve_forever(
    server: socket.socket, pool: WorkerPool, say: Callable[[str], None], secret: bytes | None = None
) -> None:
    """Serve all engines that connect, each in threads of its own. A connection that ends frees its memory.

    Args:
        server: a listening socket. After its timeout, if it has one, `accept` is called again. A Unix socket must have
            no timeout: on Linux, `accept` with a timeout spins, and does not return, after such a socket is shut down.
        pool: memory and processors for all engines; it is closed at the end.
        say: gets a line when a connection begins, and when it ends.
        secret: what engines must prove; None for a socket that only this user can reach.
    """

    def serve(connection: socket.socket, name: str, _: bytes) -> None:
        engine = f"the engine at {name}"
        say(f"serving {engine}")
        try:
            AttentionServer(Connection(connection), pool, engine).run()
            say(f"{engine} has ended")
        except Exception as error:  # Broken, or an error of a message that no engine sends; other engines go on
            say(f"{engine} is lost: {error}")

    gate = Gate(server, secret, PURPOSE, serve, say)
    try:
        while True:
            gate.accept()
    finally:
        pool.close()


def serve_engine(fd: int, memory: int, device: str = "cpu", path: str | None = None) -> int:
    """Serve the engine at the other end of an open socket, and those that connect to a Unix socket, until the first one
    ends. Return the exit code. device: as in `open_device`."""
    try:
        pool = WorkerPool(memory, device=None if device == "cpu" else open_device(device, memory, RECORDS))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with contextlib.nullcontext() if path is None else listening(pool, path):
            AttentionServer(Connection(socket.socket(fileno=fd)), pool).run()
    except Broken as error:
        print(f"attention worker: the engine is lost: {error}", file=sys.stderr)
        if path is not None:  # else the first engine removes the directory
            with contextlib.suppress(OSError):
                Path(path).parent.rmdir()
        return 3
    return 0


@contextlib.contextmanager
def listening(pool: WorkerPool, path: str) -> Iterator[None]:
    """Serve engines that connect to a Unix socket while the block runs."""
    Path(path).unlink(missing_ok=True)  # the socket of a worker that was killed
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def run() -> None:
            with contextlib.suppress(OSError):  # at the end, when the socket is shut down
                serve_forever(server, pool, lambda line: None)

        serving = threading.Thread(target=run, daemon=True)
        serving.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            serving.join()
            Path(path).unlink(missing_ok=True)
