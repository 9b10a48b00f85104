"""Attention workers, of this machine or of others.

Processes that this one starts end when it closes them. The stages of a pipeline share them: the process of the first
stage starts them, and each listens at a Unix socket for the others.

Workers on other machines are reached over TCP: `serve_forever` there, `connecting` here. Connections are neither
encrypted nor authenticated, so the network must be trusted.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from flexengine.activity import activity, message
from flexengine.config import parse_size
from flexengine.engine.guests import ProcessGroup
from flexengine.errors import InvalidInput, OutOfMemory, WorkerLost, shown
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import serve
from flexengine.guests.attention_workers.tier import WorkerTier, worker_tiers
from flexengine.guests.wire.link import Connection
from flexengine.guests.wire.processes import INTERRUPTS, ChildProcess
from flexengine.places import MOST_WORKERS

MOST_PATH = 107  # bytes of the name of a Unix socket
CONNECT_SECONDS = 10.0  # to a worker of another machine
START_SECONDS = 120.0  # until a process must have loaded its libraries and kernels


class LocalWorker(Client):
    """A worker in a process of its own, at the other end of a pair of sockets.

    The process ends by itself when this one ends, as its connection then does. It ignores SIGINT and SIGTERM.
    """

    def __init__(self, place: str, memory: int, threads: int, path: Path | None = None) -> None:
        """Start the process. Raise WorkerLost if it does not start. path: Unix socket at which it listens for other
        engines; None for no others."""
        own, other = socket.socketpair()
        argv = ["-m", __package__, str(other.fileno()), str(memory), *([] if path is None else [str(path)])]
        try:
            self.process = ChildProcess(argv, {"OMP_NUM_THREADS": str(threads)}, INTERRUPTS, [other.fileno()])
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
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
    """Return the tiers of an engine's attention workers.

    Args:
        given: number of processes to start on this machine, or addresses HOST:PORT of running workers.
        memory: bytes for pages of each process that is started.
        engines: engines that share the workers at the addresses.
        group: processes on this machine that share the started workers; None for this process alone.

    Raises:
        WorkerLost: a worker cannot be started, or does not answer.
    """
    if not isinstance(given, int):
        return worker_tiers(list(map(connecting, given)), engines)
    if group is None:
        return local_workers(given, memory)
    return shared_workers(given, memory, group.rank, group.size, partial(group.exchange, "attention workers"))


def local_workers(count: int, memory: int, engines: int = 1, folder: Path | None = None) -> list[WorkerTier]:
    """Start workers on this machine, and return their tiers. Each gets an equal part of the processors. Raise
    WorkerLost if a process does not start. folder: directory of the sockets for the other engines that share them; None
    without others."""
    start = partial(LocalWorker, memory=memory, threads=_threads(count, engines))
    starts = [start if folder is None else partial(start, path=folder / str(number)) for number in range(count)]
    with activity("starting", "starting the processes of attention workers") if count else contextlib.nullcontext():
        return worker_tiers(starts, engines)


def shared_workers(
    count: int, memory: int, rank: int, engines: int, exchange: Callable[[str], list[str]]
) -> list[WorkerTier]:
    """Return the tiers of workers on this machine for several engines: the first one starts them, the others join.

    Args:
        count: number of workers.
        memory: bytes for pages of each, of all engines together.
        rank: number of this engine.
        engines: number of engines.
        exchange: gives text to all engines, and returns the texts of all by their numbers.

    Raises:
        InvalidInput: the directory of temporary files has a too long name.
        WorkerLost: a process did not start.
    """
    if rank == 0:
        folder = Path(tempfile.mkdtemp(prefix="flexengine-"))
        try:
            if (length := len(os.fsencode(folder / str(count)))) > MOST_PATH:
                what = f"TMPDIR is {tempfile.gettempdir()}, in which the name of a socket has {length} bytes"
                raise InvalidInput(f"{what}; at most {MOST_PATH} are possible: set it to a shorter one")
            tiers = local_workers(count, memory, engines, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(tiers[0], shutil.rmtree, folder, ignore_errors=True)
        exchange(json.dumps(str(folder)))
        return tiers
    folder = Path(json.loads(exchange("")[0]))
    start = partial(JoinedWorker, threads=_threads(count, engines))
    starts = [partial(start, path=folder / str(n), engine=secrets.randbits(62)) for n in range(count)]
    return worker_tiers(starts, engines)


def _threads(count: int, engines: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // (count + engines))


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of text such as 10.0.0.2:29600. Raise InvalidInput if it is no such text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(f"{text!r} is no address of an attention worker; give HOST:PORT, such as 10.0.0.2:29600")
    return host.strip("[]"), int(port)


def check_workers(given: int | Sequence[str], memory: str | int | None) -> None:
    """Raise InvalidInput if options of attention workers are wrong; see `MachineOptions`. memory: of each worker."""
    count = given if isinstance(given, int) else len(given)
    if not 0 <= count <= MOST_WORKERS:
        raise InvalidInput(f"--attention-workers is {count}; it must be 0 to {MOST_WORKERS}")
    if isinstance(given, str) or not (isinstance(given, int) or all(isinstance(each, str) for each in given)):
        raise InvalidInput(
            f"attention_workers is {shown(given)}; it must be a number of processes, or a list of addresses HOST:PORT"
        )
    if not isinstance(given, int):
        if memory is not None:
            raise InvalidInput(
                f"--worker-mem is {memory}, but workers at addresses have memory of their own; give it to flexengine"
                " serve-attention"
            )
        for address in given:
            address_of(address)
        if twice := next((each for each in given if list(given).count(each) > 1), None):
            raise InvalidInput(f"--attention-workers names {twice} twice; name each worker once")
    elif memory is None:
        raise InvalidInput(
            "--attention-workers needs --worker-mem, the bytes for KV cache of each worker; set it, for example to 2G"
        )
    elif not count:
        raise InvalidInput(
            f"--worker-mem is {memory}, but there are no attention workers; set --attention-workers, or leave it out"
        )
    else:
        parse_size(memory, "--worker-mem")


class RemoteWorker(Client):
    """A worker that was started on another machine, or on this one, and listens at an address."""

    patience = 20.0

    def __init__(self, place: str, address: str, engine: int | None = None) -> None:
        """Connect to the worker at HOST:PORT. Raise InvalidInput if it refuses or the address is wrong, OutOfMemory if
        other engines hold all its memory, WorkerLost if it does not listen there. engine: as in Client."""
        try:
            connection = socket.create_connection(address_of(address), CONNECT_SECONDS)
        except OSError as error:
            why = f"it does not answer ({error.strerror or error}); start it there with flexengine serve-attention"
            raise WorkerLost(place, f"{place} ({address})", f"{why}, and run the same command again") from error
        try:
            super().__init__(Connection(connection), place, engine=engine)
        except WorkerLost as error:
            remedy = "check the address, or start flexengine serve-attention there"
            why = f"no attention worker answers there ({error.why}); {remedy}"
            raise WorkerLost(place, f"{place} ({address})", why) from error
        if self.others:
            message(f"{self.name}: other engines hold {self.others:,} bytes of its memory; {self.memory:,} are left")
        if not self.memory:
            self.close()
            why = f"other engines hold all memory of {self.name}; run the same command again when one of them has"
            why += " ended, or give flexengine serve-attention a larger --worker-mem"
            raise OutOfMemory(place, "KV cache", 1, self.others, self.others, why)


def connecting(address: str) -> Callable[[str], RemoteWorker]:
    """Return a function that connects to the worker at an address, at every call as the same engine. Its argument is
    the name of the worker's place."""
    return partial(RemoteWorker, address=address, engine=secrets.randbits(62))


def serve_forever(server: socket.socket, pool: WorkerPool, say: Callable[[str], None]) -> None:
    """Serve all engines that connect, each in threads of its own. A connection that ends frees its memory.

    Args:
        server: a listening socket. After its timeout, if it has one, `accept` is called again. A Unix socket must have
            no timeout: on Linux, `accept` with a timeout spins, and does not return, after such a socket is shut down.
        pool: memory and processors for all engines; it is closed at the end.
        say: gets a line when a connection begins, and when it ends.
    """
    try:
        while True:
            try:
                connection, address = server.accept()
            except TimeoutError:
                continue
            engine = "the engine at {} port {}".format(*address) if address else "an engine of this machine"
            threading.Thread(target=_serve, args=(connection, pool, engine, say), daemon=True).start()
    finally:
        pool.close()


def serve_meanwhile(server: socket.socket, pool: WorkerPool) -> threading.Thread:
    """Start and return a thread that serves all engines that connect, until the socket is shut down."""

    def run() -> None:
        with suppress(OSError):
            serve_forever(server, pool, lambda line: None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _serve(connection: socket.socket, pool: WorkerPool, engine: str, say: Callable[[str], None]) -> None:
    say(f"serving {engine}")
    try:
        serve(connection, pool)
        say(f"{engine} has ended")
    except Exception as error:  # Broken, or an error of a message that no engine sends; other engines go on
        say(f"{engine} is lost: {error}")
