"""The bench of connections by strangers: what it sends, and a short run of all of it."""

import os
import random
import shutil
import subprocess
import sys

import pytest

from bench.workers.strangers import attack, kinds
from flexengine.guests.attention_workers.workers import RemoteWorker
from tests.helpers.attention_workers import listening


def test_all_kinds_differ() -> None:
    made = {name: send(random.Random(1)) for name, send in kinds().items()}
    assert len(set(made.values())) == len(made) == 8


def test_a_worker_serves_engines_after_an_attack() -> None:
    with listening(1 << 20) as (address, said):
        host, port = address.split(":")
        sent = attack((host, int(port)), 160, seed=3, held=80)
        assert sum(sent.values()) == 160
        assert "not made" not in sent
        worker = RemoteWorker("worker1", address)
        assert worker.allocate(1000) is not None
        worker.close()
    assert sum("serving" in line for line in said) == 1
    assert not [line for line in said if not any(word in line for word in ("refused", "serving", "has ended"))]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a network namespace needs root")
def test_in_a_network_namespace() -> None:
    """An attention worker and a stage in processes of their own, at an address that other machines could reach."""
    words = [sys.executable, "-m", "bench.workers.strangers", "--connections", "400"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
