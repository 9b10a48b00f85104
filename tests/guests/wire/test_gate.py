"""Many connections at once: those without the secret cost little, and those with it come in."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from flexengine.guests.wire import gate as gates
from flexengine.guests.wire.gate import MOST_UNPROVED, Gate
from flexengine.guests.wire.secret import connect

GOOD = b"0123456789abcdef"


@contextmanager
def gate(server: Any = None) -> Iterator[tuple[Any, list[str], list[str]]]:
    """Yield the address of a gate, the names of connections that it has admitted, and its messages."""
    admitted, said, ended = list[str](), list[str](), threading.Event()

    def admit(connection: socket.socket, name: str) -> None:
        admitted.append(name)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as real:
        real.settimeout(0.05)
        made = Gate(server(real) if server else real, GOOD, admit, said.append)

        def run() -> None:
            while not ended.is_set():
                made.accept()

        (thread := threading.Thread(target=run)).start()
        try:
            yield real.getsockname(), admitted, said
        finally:
            ended.set()
            thread.join(30)
            assert not thread.is_alive()


def test_idle_connections_make_room() -> None:
    """The oldest ends first, and one with the secret comes in at once."""
    before = threading.active_count()
    with gate() as (address, admitted, said):
        idle = [socket.create_connection(address) for _ in range(3 * MOST_UNPROVED)]
        connect(address, 5, GOOD).close()
        assert threading.active_count() - before <= MOST_UNPROVED + 3
        idle[0].settimeout(5)
        assert idle[0].recv(1) == b""
        idle[-1].settimeout(0.05)
        with suppress(TimeoutError):  # it may still prove the secret
            assert idle[-1].recv(1) == b"late"
        for each in idle:
            each.close()
        connect(address, 5, GOOD).close()
        deadline = time.monotonic() + 10
        while len(admitted) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert 1 <= len(said) <= 2
    assert said[0].startswith("refused 127.0.0.1 port ")


def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.guests.wire.secret.PROOF_SECONDS", 0.2)
    with gate() as (address, admitted, said):
        with socket.create_connection(address) as idle:
            idle.settimeout(5)
            assert idle.recv(1) == b""
        assert not admitted
        assert "it did not prove the secret within 0.2 s" in said[0]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED])
def test_a_system_without_means_for_a_connection(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "REST_SECONDS", 0.001)

    class Short:
        """A socket whose first calls of `accept` fail."""

        def __init__(self, server: socket.socket) -> None:
            self.server, self.left = server, 20

        def accept(self) -> Any:
            self.left -= 1
            if self.left >= 0:
                raise OSError(number, "too many")
            return self.server.accept()

    with gate(Short) as (address, admitted, said):
        connect(address, 5, GOOD).close()
    assert admitted
    assert said == ["refused a connection: too many; raise the limit of open files (ulimit -n)"]


def test_a_closed_socket_ends_the_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Gate(server, GOOD, lambda *_: None, lambda _: None)
    with pytest.raises(OSError, match="Bad file"):
        made.accept()
