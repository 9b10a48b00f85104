"""The proof of a shared secret: where it comes from, and what programs without it can do."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexengine.errors import InvalidInput
from flexengine.guests.wire import secret
from flexengine.guests.wire.link import Broken
from flexengine.guests.wire.secret import OPENING, EndedEarly, WrongSecret, connect, prove, secret_for
from tests.helpers import command_line
from tests.helpers.patience import PATIENCE, in_time

GOOD = b"0123456789abcdef"
FOR = b"test".ljust(16)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proof comes too late on a slow machine."""
    monkeypatch.setattr(secret, "PROOF_SECONDS", 10 * PATIENCE)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def proved(pair: tuple[socket.socket, socket.socket], connects: bytes, accepts: bytes) -> list[type[Exception] | None]:
    """Return the errors of both sides."""
    found: list[type[Exception] | None] = [None, None]

    def run(side: int, own: bytes) -> None:
        try:
            prove(pair[side], own, FOR[:4] if side else FOR, accepts=bool(side))
        except Broken as error:
            found[side] = type(error)

    thread = threading.Thread(target=run, args=(1, accepts))
    thread.start()
    run(0, connects)
    thread.join(30)
    return found


def test_both_sides_prove_it(pair: tuple[socket.socket, socket.socket]) -> None:
    assert proved(pair, GOOD, GOOD) == [None, None]


def test_another_secret(pair: tuple[socket.socket, socket.socket]) -> None:
    assert proved(pair, GOOD, b"another secret than that") == [WrongSecret, WrongSecret]


@pytest.mark.parametrize("accepts", [True, False])
def test_what_a_stranger_heard_is_of_no_use(pair: tuple[socket.socket, socket.socket], accepts: bool) -> None:
    """It sends the other side's own words back, in both roles."""
    stranger, other = pair
    stranger.settimeout(PATIENCE)

    def echo() -> None:
        opening = stranger.recv(64)
        stranger.sendall(opening[-32:] if accepts else opening)
        heard.append(stranger.recv(32))
        if not accepts:
            stranger.sendall(heard[0])

    heard = list[bytes]()
    if accepts:
        stranger.sendall(OPENING + FOR + bytes(32))
    (thread := threading.Thread(target=echo)).start()
    with pytest.raises(WrongSecret):
        prove(other, GOOD, FOR, accepts)
    thread.join(30)
    assert (heard == [secret.REFUSED]) == accepts


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 60, OPENING, OPENING + FOR + bytes(32), b"\0" * 5000]
)
def test_garbage_that_ends(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    stranger, other = pair
    stranger.sendall(sent)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(Broken, match=r"it has ended|it sends no messages of flexengine"):
        in_time(lambda: prove(other, GOOD, FOR, accepts=True))


def test_a_slow_stranger_gets_no_more_time(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends a byte now and then, until a whole wrong proof would have come."""
    monkeypatch.setattr(secret, "PROOF_SECONDS", 0.3)
    (stranger, other), refused = pair, threading.Event()

    def drip() -> None:
        for byte in OPENING + FOR + bytes(32) + bytes(32):
            stranger.sendall(bytes([byte]))
            if refused.wait(0.05):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(Broken, match=r"it did not prove the secret within 0\.3 s"):
        prove(other, GOOD, FOR, accepts=True)
    refused.set()
    thread.join(PATIENCE)


def test_a_connection_that_ends_early_is_tried_again() -> None:
    """As one that the other process ends because newer ones took its place."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(3):
                server.accept()[0].close()
            with server.accept()[0] as last:
                prove(last, GOOD, FOR, accepts=True)

        thread = threading.Thread(target=serve)
        thread.start()
        connect(server.getsockname(), PATIENCE, FOR, GOOD).close()
        thread.join(30)

        def end_all() -> None:
            with suppress(OSError):  # the socket is shut down
                while True:
                    server.accept()[0].close()

        (thread := threading.Thread(target=end_all)).start()
        with pytest.raises(EndedEarly):
            connect(server.getsockname(), 0.05, FOR, GOOD)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def test_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    own = secret_for("127.0.0.1")
    assert len(own) == 64
    assert [secret_for(host) for host in ("::1", "localhost", "127.1.2.3", "::ffff:127.0.0.1")] == [own] * 4
    kept = tmp_path / "cache" / "secret"
    assert kept.stat().st_mode & 0o077 == 0
    kept.chmod(0o640)
    with pytest.raises(InvalidInput, match="is open to other users; run: chmod 600"):
        secret_for("127.0.0.1")
    kept.chmod(0o600)
    for host in ("10.0.0.2", "", "0.0.0.0", "::", "node7"):
        with pytest.raises(InvalidInput, match="but there is no secret; set FLEXENGINE_SECRET_FILE to a file with at"):
            secret_for(host)
    (file := tmp_path / "file").write_bytes(GOOD + b"\n")
    file.chmod(0o644)
    monkeypatch.setenv("FLEXENGINE_SECRET_FILE", str(file))
    with pytest.raises(InvalidInput, match="is open to other users; run: chmod 600"):
        secret_for("10.0.0.2")
    file.chmod(0o640)  # its group may read it
    assert secret_for("10.0.0.2") == secret_for("localhost") == GOOD
    monkeypatch.setenv("FLEXENGINE_SECRET", "x" * 20)
    with pytest.raises(InvalidInput, match="are both set; unset one of them"):
        secret_for("10.0.0.2")
    monkeypatch.delenv("FLEXENGINE_SECRET_FILE")
    assert secret_for("10.0.0.2") == b"x" * 20
    monkeypatch.setenv("FLEXENGINE_SECRET", "short")
    with pytest.raises(InvalidInput, match="has 5 bytes; it must have 16 to 4096"):
        secret_for("10.0.0.2")
    monkeypatch.delenv("FLEXENGINE_SECRET")
    monkeypatch.setenv("FLEXENGINE_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidInput, match=r"none cannot be read .*; set FLEXENGINE_SECRET_FILE to a file that can"):
        secret_for("10.0.0.2")


def test_files_of_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the environment names may belong to root."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    secret_for("127.0.0.1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    state = SimpleNamespace(st_mode=0o100600, st_size=64, st_blksize=4096)
    monkeypatch.setattr(os, "fstat", lambda _: state)
    for given, owner, good in ((1, 1000, 1), (1, 0, 1), (1, 1001, 0), (0, 1000, 1), (0, 0, 0), (0, 1001, 0)):
        state.st_uid = owner
        monkeypatch.setenv("FLEXENGINE_SECRET_FILE", str(tmp_path / "secret") if given else "")
        with nullcontext() if good else pytest.raises(InvalidInput, match=f"belongs to user {owner}, not to 1000"):
            secret_for("127.0.0.1")


def test_a_proof_is_for_one_purpose(pair: tuple[socket.socket, socket.socket]) -> None:
    """A stranger between two processes that changes it gets no proof."""
    (one, other), (front, back) = pair, socket.socketpair()
    found = list[Exception]()

    def accept() -> None:
        try:
            prove(back, GOOD, b"", accepts=True)
        except Broken as error:
            found.append(error)

    def begin() -> None:
        with suppress(Broken):
            prove(one, GOOD, b"stage 4 1", accepts=False)

    threads = [threading.Thread(target=run) for run in (accept, begin)]
    for thread in threads:
        thread.start()
    front.sendall(other.recv(64).replace(b"stage 4 1", b"stage 3 1"))
    other.sendall(front.recv(64).replace(b"stage 3 1", b"stage 4 1"))
    front.sendall(other.recv(32))
    assert front.recv(32) == secret.REFUSED
    other.close()
    for thread in threads:
        thread.join(30)
    assert isinstance(found[0], WrongSecret)
    front.sendall(OPENING + FOR + bytes(32))
    with pytest.raises(Broken, match=r"its connection is for b'test +', not for b'attention'"):
        prove(back, GOOD, b"attention", accepts=True)
    front.close()
    back.close()


@pytest.mark.parametrize("command", ["run", "serve-attention"])
def test_the_file_of_a_secret_is_an_option(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reaches processes that the command starts, too."""
    monkeypatch.setenv("FLEXENGINE_SECRET_FILE", "")
    (file := tmp_path / "secret").write_bytes(GOOD)
    file.chmod(0o600)
    command_line.parser(command).parse_args(["--secret-file", str(file)])
    assert os.environ["FLEXENGINE_SECRET_FILE"] == str(file)
    assert secret_for("10.0.0.2") == GOOD
    monkeypatch.setenv("FLEXENGINE_SECRET", "x" * 20)
    command_line.parser(command).parse_args(["--secret-file", str(file)])
    assert secret_for("10.0.0.2") == GOOD  # the option replaces the secret of the environment
    with pytest.raises(SystemExit):  # also if no connection needs it
        command_line.parser(command).parse_args(["--secret-file", str(tmp_path / "none")])
    assert "the secret in" in (said := capsys.readouterr().err)
    assert "none cannot be read (No such file or directory)" in " ".join(said.split())
