"""Ports for processes that must know theirs before they listen."""

import contextlib
import os
import socket
from random import SystemRandom

FIRST, PORTS = 20_000, 12_000  # below those that Linux gives to other sockets, also to one that connects to itself


def free_port() -> int:
    """Return a port of the loopback interface at which nothing listens. Test processes that run at the same time draw
    from different ports."""
    workers, worker = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    while True:
        port = FIRST + SystemRandom().randrange(PORTS // workers) * workers + int(worker.removeprefix("gw"))
        with contextlib.suppress(OSError), socket.socket() as server:  # it is taken
            server.bind(("127.0.0.1", port))
            return port
