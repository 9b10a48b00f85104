"""The bench of connections by strangers: what it sends, and a short run of all of it."""

import json
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from bench.workers.machines import missing
from bench.workers.strangers import ECHO, OTHER_SECRET, SLOW, attack, harmless, kinds
from flexengine.guests.attention_workers.workers import RemoteWorker
from flexengine.guests.wire.secret import OPENING, REFUSED
from tests.helpers.attention_workers import listening


def test_all_kinds_differ() -> None:
    made = {name: send(random.Random(1)) for name, send in kinds().items() if name not in (OTHER_SECRET, ECHO)}
    assert len(set(made.values())) == len(made) == 10
    assert made[SLOW] == made["half an opening"][:1]


@pytest.mark.parametrize(("got", "good"), [
    (b"", True), (OPENING[:7], True), (OPENING + bytes(16) + b"n" * 32, True), (OPENING + bytes(48) + REFUSED, True),
    (OPENING + bytes(48) + REFUSED[:9], True), (OPENING + bytes(48) + b"p" * 32, False), (b"KV", False),
    (OPENING + bytes(48) + REFUSED + b"x", False),
])  # fmt: skip
def test_harm_is_noticed(got: bytes, good: bool) -> None:
    """Anything beyond a nonce and a refusal counts, such as a proof or contents of memory."""
    assert harmless(got) == good


def test_a_worker_serves_engines_after_an_attack() -> None:
    with listening(1 << 20) as (address, said):
        host, port = address.split(":")
        found = attack((host, int(port)), 160, seed=3, held=80)
        assert sum(found["sent"].values()) >= 160
        assert set(found["sent"]) <= set(kinds())
        assert not found["harmful"]
        assert 64 <= found["got"] <= 96
        worker = RemoteWorker("worker1", address)
        assert worker.allocate(1000) is not None
        worker.close()
    assert sum("serving" in line for line in said) == 1
    assert not [line for line in said if not any(word in line for word in ("refused", "serving", "has ended"))]


def test_an_attack_notices_a_server_that_tells_too_much() -> None:
    """A server that sends memory to every program that connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def leak() -> None:
            with suppress(OSError), ExitStack() as stack:
                while True:
                    connection = stack.enter_context(server.accept()[0])
                    connection.sendall(b"KV cache of a job")

        (thread := threading.Thread(target=leak)).start()
        found = attack(server.getsockname(), 100, seed=1, held=400, until=lambda: time.sleep(0.5))
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert b"KV cache".hex() in found["harmful"][0]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "it is possible here")
def test_a_siege_of_two_machines() -> None:
    """10,000 connections to an attention worker, and as many to stages, while their jobs run: nothing is read, nothing
    is written, and the tokens are those of transformers."""
    words = [sys.executable, "-m", "bench.workers.siege", "--connections", "10000"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    for sent in (record["sent"], record["of_stages"]["sent"]):
        assert sum(sent.values()) >= 10_000
        assert min(sent[name] for name in (*kinds(),)) > 500
