"""Attention workers on other machines, over TCP: `serve_forever` there, `RemoteWorker` here.

Connections are neither encrypted nor authenticated, so the network must be trusted.
"""

import socket
from collections.abc import Callable

from flexengine.attention.client import Client
from flexengine.attention.link import Broken, Link
from flexengine.attention.server import serve
from flexengine.errors import InvalidInput, WorkerLost

CONNECT_SECONDS = 10.0


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of text such as 10.0.0.2:29600. Raise InvalidInput if it is no such text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(f"{text!r} is no address of an attention worker; give HOST:PORT, such as 10.0.0.2:29600")
    return host.strip("[]"), int(port)


class RemoteWorker(Client):
    """A worker that was started on another machine, or on this one, and listens at an address."""

    def __init__(self, place: str, address: str) -> None:
        """Connect to the worker.

        Args:
            place: name of the worker's place.
            address: HOST:PORT.

        Raises:
            InvalidInput: the worker refuses, or the address is wrong.
            WorkerLost: it does not listen there.
        """
        try:
            connection = socket.create_connection(address_of(address), CONNECT_SECONDS)
        except OSError as error:
            why = f"it does not answer ({error.strerror or error}); start it there with flexengine serve-attention"
            raise WorkerLost(place, f"{place} ({address})", f"{why}, and run the same command again") from error
        super().__init__(Link(connection), place)


def serve_forever(server: socket.socket, memory: int, say: Callable[[str], None]) -> None:
    """Serve one engine after the other. A connection that breaks frees its memory.

    Args:
        server: a listening socket.
        memory: bytes for KV pages.
        say: gets a line for each connection.
    """
    while True:
        connection, (host, port, *_) = server.accept()
        say(f"serving the engine at {host} port {port}")
        try:
            serve(connection, memory)
            say("the engine has ended")
        except Broken as error:
            say(f"the engine is lost: {error}")
