"""Many connections at once: those without the secret cost little, and those with it come in."""

import errno
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flexengine.guests.wire import gate as gates
from flexengine.guests.wire.gate import Gate
from flexengine.guests.wire.secret import connect
from tests.helpers.patience import PATIENCE, until

GOOD, FOR = b"0123456789abcdef", b"test"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proof comes too late on a slow machine, and no second message is due."""
    monkeypatch.setattr("flexengine.guests.wire.secret.PROOF_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr(gates, "SAY_SECONDS", 10 * PATIENCE)


@contextmanager
def gate(server: Any = None) -> Iterator[tuple[Any, list[str], list[str]]]:
    """Yield the address of a gate, the names of connections that it has admitted, and its messages."""
    admitted, said, ended = list[str](), list[str](), threading.Event()

    def admit(connection: socket.socket, name: str, purpose: bytes) -> None:
        assert purpose == FOR
        admitted.append(name)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as real:
        real.settimeout(0.05)
        made = Gate(server(real) if server else real, GOOD, FOR, admit, said.append)

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


def test_idle_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them end, drawn by chance, and one with the secret comes in at once."""
    monkeypatch.setattr(gates, "MOST_UNPROVED", 16)
    before = threading.active_count()
    with gate() as (address, admitted, said):
        idle = [socket.create_connection(address) for _ in range(2 * 16)]
        connect(address, PATIENCE, FOR, GOOD).close()
        until(lambda: threading.active_count() - before <= 16 + 3)  # the threads of ended ones end
        ended = select.select(idle, [], [], 0)[0]
        assert [each.recv(1) for each in ended] == [b""] * len(ended)
        assert len(ended) >= 16
        assert not {*idle[:16]} <= {*ended}  # each of the first ones remains with a chance of over a third
        for each in idle:
            each.close()
        connect(address, PATIENCE, FOR, GOOD).close()
        until(lambda: len(admitted) == 2)
        until(lambda: said)
    assert len(said) == 1
    assert said[0].startswith("refused 127.0.0.1 port ")


@pytest.mark.parametrize(("files", "most"), [(64, 16), (3, 1), (4096, 256), (resource.RLIM_INFINITY, 256)])
def test_strangers_take_a_quarter_of_the_files(files: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert Gate(server, GOOD, FOR, lambda *_: None, lambda _: None)._most == most


def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.guests.wire.secret.PROOF_SECONDS", 0.2)
    with gate() as (address, admitted, said):
        with socket.create_connection(address) as idle:
            idle.settimeout(PATIENCE)
            assert idle.recv(1) == b""
        assert not admitted
        until(lambda: said)  # the connection ends first, then its thread says why
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
        connect(address, PATIENCE, FOR, GOOD).close()
        until(lambda: admitted)  # in the connection's thread, after the proof
    assert said == ["refused a connection: too many; raise the limit of open files (ulimit -n)"]


def test_a_closed_socket_ends_the_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Gate(server, GOOD, FOR, lambda *_: None, lambda _: None)
    with pytest.raises(OSError, match="Bad file"):
        made.accept()
