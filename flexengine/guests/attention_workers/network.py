"""Attention workers on other machines, over TCP: `serve_forever` there, `connecting` here.

Connections are neither encrypted nor authenticated, so the network must be trusted.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from flexengine.activity import message
from flexengine.config import parse_size, shown
from flexengine.errors import InvalidInput, OutOfMemory, WorkerLost
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import serve
from flexengine.guests.wire.link import Connection
from flexengine.places import MOST_WORKERS

CONNECT_SECONDS = 10.0


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
        """Connect to the worker.

        Args:
            place: name of the worker's place.
            address: HOST:PORT.
            engine: number of the engine, as in Client.

        Raises:
            InvalidInput: the worker refuses, or the address is wrong.
            OutOfMemory: other engines hold all its memory.
            WorkerLost: it does not listen there.
        """
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
    """Return a function that connects to the worker at an address, at every call as the same engine.

    Its argument is the name of the worker's place.
    """
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
