"""Attention workers in threads of the test's process: all of the engine's code but the start of a process."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from flexengine.attention.client import Client
from flexengine.attention.link import Broken, Link
from flexengine.attention.network import serve_forever
from flexengine.attention.pool import Pool
from flexengine.attention.server import serve
from flexengine.attention.tier import WorkerTier
from flexengine.places import worker_names


def _serve(connection: socket.socket, memory: int) -> None:
    with contextlib.suppress(Broken):  # the test ended the connection
        serve(connection, Pool(memory))


class ThreadWorker(Client):
    """A worker in a thread. It takes the place of LocalWorker, with the same arguments."""

    in_memory = True  # shared with the worker

    def __init__(self, place: str, memory: int, threads: int) -> None:
        own, other = self.sockets()
        self.thread = threading.Thread(target=_serve, args=(other, memory), daemon=True)
        self.thread.start()
        super().__init__(Link(own), place, shares=self.in_memory, threads=threads)

    @staticmethod
    def sockets() -> tuple[socket.socket, socket.socket]:
        """Return two ends of a connection."""
        return socket.socketpair()

    def close(self) -> None:
        super().close()
        self.thread.join(30)
        assert not self.thread.is_alive()


class NetWorker(ThreadWorker):
    """The same over TCP on the loopback interface."""

    in_memory = False

    @staticmethod
    def sockets() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = socket.create_connection(server.getsockname())
            return own, server.accept()[0]


def thread_workers(count: int, memory: int = 1 << 24) -> list[WorkerTier]:
    """Return the tiers of workers in threads."""
    return [WorkerTier(lambda place=place: ThreadWorker(place, memory, 1)) for place in worker_names(count)]


@contextlib.contextmanager
def listening(memory: int, folder: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """Run `serve_forever` in a thread. Yield its address, and the messages so far. folder: as in `Pool`."""
    said = list[str]()

    def run(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test closed the socket
            serve_forever(server, Pool(memory, folder), said.append)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=run, args=(server,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", said
        server.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    assert not thread.is_alive()
