"""Workers at addresses: the command flexengine serve-attention, and refusals. test_pool.py has several engines."""

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers import workers
from flexengine.shell.commands import serve_attention
from flexengine.shell.commands.main import main
from tests.helpers.attention_workers import ThreadWorker, listening
from tests.helpers.families import NEW
from tests.helpers.forked import Forked
from tests.helpers.patience import until
from tests.helpers.ports import free_port

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
POLICY = Policy(4, 2, cache={"workers": 1})
SERVE = "import sys; from flexengine.shell.commands.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_the_command_serves_engines_until_it_is_ended(families: Any, tmp_path: Path) -> None:
    known, address = families("llama"), f"127.0.0.1:{free_port()}"
    worker = Forked(SERVE, ["serve-attention", address, "--worker-mem", "4M"], tmp_path, log := tmp_path / "log")
    while "listening at" not in (log.read_text() if log.exists() else ""):
        assert worker.poll() is None, worker.said()
        time.sleep(0.05)
    for _ in range(2):
        with Engine(known.directory, policy=POLICY, device="cpu", attention_workers=[address]) as engine:
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
            assert engine.summary.peak_bytes["worker1"] > 0
    with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))) as other:  # a scanner
        other.sendall(b"GET / HTTP/1.0\r\n\r\n" + b" " * 60)
        assert other.recv(100) == b""
    until(lambda: re.search(r"refused 127.0.0.1 port \d+: it sends no messages of flexengine", worker.said()))
    until(lambda: len(re.findall(r"the engine at 127.0.0.1 port \d+ has ended", worker.said())) == 2)
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait(60) == 143


def test_refusals(families: Any) -> None:
    model, port = families("llama").directory, free_port()
    for given, message in (
        (["here"], "'here' is no address of an attention worker; give HOST:PORT"),
        (["a:1", "b:99999"], "'b:99999' is no address"),
        (["a:1", "a:1"], "attention_workers names a:1 twice"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Engine(model, policy=POLICY, attention_workers=given)
    with pytest.raises(InvalidInput, match="but workers at addresses have memory of their own"):
        Engine(model, policy=POLICY, attention_workers=["a:1"], worker_mem="1G")
    with pytest.raises(WorkerLost, match=r"worker1 \(127.0.0.1:\d+\) is lost: it does not answer .*refused"):
        Engine(model, policy=POLICY, device="cpu", attention_workers=[f"127.0.0.1:{port}"])


def test_one_worker_with_two_addresses(families: Any) -> None:
    with listening(1 << 20) as (address, _):
        other = address.replace("127.0.0.1", "localhost")
        with pytest.raises(InvalidInput, match=r"worker1 .* and worker2 .* are one attention worker with two"):
            Engine(families("llama").directory, policy=POLICY, device="cpu", attention_workers=[address, other])


def test_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by name, also in the middle of a job, and the worker goes on."""
    with listening(1 << 20) as (address, said):
        monkeypatch.setenv("FLEXENGINE_SECRET", "another secret than that")
        why = rf"attention worker worker1 \({address}\): it has another secret; give both processes the same secret"
        with pytest.raises(InvalidInput, match=why):
            workers.RemoteWorker("worker1", address)
        until(lambda: said)  # by the connection's thread
        monkeypatch.delenv("FLEXENGINE_SECRET")
        workers.RemoteWorker("worker1", address).close()
    assert re.match(r"refused 127.0.0.1 port \d+: it has another secret", said[0])


def test_no_secret_beyond_loopback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for address in (f"0.0.0.0:{free_port()}", f"[::]:{free_port()}", f"10.0.0.2:{free_port()}"):
        assert main(["serve-attention", address, "--worker-mem", "4M"]) == 2
        assert "but there is no secret; set FLEXENGINE_SECRET_FILE to a file with" in capsys.readouterr().err
    monkeypatch.setattr("flexengine.guests.wire.secret.is_loopback", lambda host: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(InvalidInput, match=r"connections at 127\.0\.0\.1 can come from .* but there is no secret"):
            workers.RemoteWorker("worker1", f"127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()
        assert connection.recv(1) == b""  # nothing was sent
        connection.close()


def test_an_address_of_another_program(families: Any) -> None:
    """It answers with other bytes, and ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n" * 10)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = rf"worker1 \({address}\) is lost: no attention worker answers there \(.*\); check the address"
        with pytest.raises(WorkerLost, match=said):
            Engine(families("llama").directory, policy=POLICY, device="cpu", attention_workers=[address])
        thread.join(10)


def test_a_worker_may_come_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again by others, within the seconds that its class names."""
    monkeypatch.setattr(workers, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(ThreadWorker, "patience", 0.05)
    absent, tried = 3, 0

    def connect(place: str) -> ThreadWorker:
        nonlocal tried
        tried += 1
        if 1 < tried <= 1 + absent:
            raise WorkerLost(place, place, "it does not answer")
        return ThreadWorker(place, 1 << 20, 1)

    worker = workers.WorkerTier(connect, "worker1")
    region = worker.allocate(1 << 10, "pages")
    worker.renew()
    assert tried == 5
    worker.free(region, "pages")  # the new worker has it
    absent, tried = 99, 1
    with pytest.raises(WorkerLost, match="worker1 is lost: it does not answer"):
        worker.renew()
    assert tried == 1 + 5 + 1
    worker.close()


def test_the_command_waits_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a signal that came just before `accept` is handled when it returns."""
    timeouts = list[float | None]()
    monkeypatch.setattr(workers, "serve_forever", lambda server, *_: timeouts.append(server.gettimeout()))
    assert main(["serve-attention", f"127.0.0.1:{free_port()}", "--worker-mem", "4M"]) == 0
    assert timeouts == [serve_attention.ACCEPT_SECONDS]


def test_a_worker_still_listens_after_a_timeout() -> None:
    with listening(4_000_000, timeout=0.01) as (address, said):
        time.sleep(0.1)
        workers.RemoteWorker("worker1", address).close()
    assert said[0].startswith("serving the engine at 127.0.0.1 port ")
