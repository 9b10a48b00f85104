"""Two network namespaces stand for two machines, with a rate and a delay between them: an attention worker on the other
machine, and stages over both, give the tokens of transformers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.workers.machines import ADDRESSES, INTERFACE, TwoMachines, missing
from flexengine import Policy
from tests.helpers.families import NEW
from tests.helpers.pages import ROOT
from tests.helpers.patience import PATIENCE
from tests.helpers.ports import free_port

MEGABITS, DELAY = 40.0, 0.01
SECRET = {"FLEXENGINE_SECRET": "0123456789abcdef of two machines", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
ECHO = f"""
import socket
with socket.create_server(("{ADDRESSES[1]}", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    left = 1_000_001
    while left:
        left -= len(connection.recv(left if left < 1_000_001 else 1))
        if left in (1_000_000, 0):
            connection.sendall(b"x")
"""
SPEAK = f"""
import socket, time
connection = socket.create_connection(("{ADDRESSES[1]}", 5000))
for sent in (b"a", bytes(1_000_000)):
    began = time.monotonic()
    connection.sendall(sent)
    connection.recv(1)
    print(time.monotonic() - began)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing(delay=True)), reason=missing(delay=True) or "it is possible here"),
]


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    with TwoMachines(MEGABITS, DELAY) as two:
        yield two


def written(folder: Path, known: Any, policy: Policy) -> list[str]:
    """Write an input and a policy. Return the words of the command."""
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known.rows))
    (folder / "policy.json").write_text(json.dumps(policy.to_json()))
    return ["in.jsonl", "-m", str(known.directory), "--policy", "policy.json", "--max-tokens", str(NEW), "--ignore-eos",
            "--device", "cpu", "--device-mem", "300M", "-o", "out.jsonl"]  # fmt: skip


def finished(process: "subprocess.Popen[str]") -> None:
    said = process.communicate(timeout=8 * PATIENCE)[1]
    assert process.returncode == 0, said


def tokens(folder: Path) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in (folder / "out.jsonl").read_text().splitlines()]


def test_the_network_has_its_rate_and_delay(machines: TwoMachines) -> None:
    """Without these, the other tests would show nothing about networks."""
    server = machines.start(1, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    assert server.stdout.readline() == "ready\n"
    client = machines.start(0, [sys.executable, "-c", SPEAK], stdout=subprocess.PIPE, text=True)
    there_and_back, transfer = map(float, client.communicate(timeout=PATIENCE)[0].split())
    least = 8 * 1_000_000 / (MEGABITS * 1e6)
    assert 2 * DELAY <= there_and_back < 2 * DELAY + 0.2
    assert 0.8 * least <= transfer < 3 * least + 1
    assert machines.bytes_received(1) > 1_000_000


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_attention_worker_on_the_other_machine(
    machines: TwoMachines, families: Any, tmp_path: Path, device: str
) -> None:
    """sim: the worker's pages are in memory that counts as a GPU's, and questions come to its RAM first."""
    known, address = families("llama"), f"{ADDRESSES[1]}:{free_port()}"
    serve = [sys.executable, "-m", "flexengine", "serve-attention", address, "--worker-mem", "8M", "--device", device]
    worker = machines.start(1, serve, SECRET, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert worker.stderr
    assert "listening at" in worker.stderr.readline()
    before = machines.bytes_received(1)
    words = [*written(tmp_path, known, Policy(3, 2, cache={"workers": 1})), "--attention-workers", address]
    run = [sys.executable, "-m", "flexengine.run", *words]
    finished(machines.start(0, run, SECRET, stderr=subprocess.PIPE, text=True, cwd=tmp_path))
    assert tokens(tmp_path) == known.expected
    pages = sum(map(len, known.prompts)) * 4 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head_dim, fp32
    assert machines.bytes_received(1) - before > pages


def test_an_engine_with_another_secret_is_refused(machines: TwoMachines, families: Any, tmp_path: Path) -> None:
    address = f"{ADDRESSES[1]}:{free_port()}"
    serve = [sys.executable, "-m", "flexengine", "serve-attention", address, "--worker-mem", "8M"]
    worker = machines.start(1, serve, SECRET, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert worker.stderr
    assert "listening at" in worker.stderr.readline()
    words = [*written(tmp_path, families("llama"), Policy(3, 2, cache={"workers": 1})), "--attention-workers", address]
    for more, why in (
        ({"FLEXENGINE_SECRET": "another secret than that"}, f"attention worker worker1 ({address}): it has another se"),
        ({"FLEXENGINE_SECRET": ""}, f"connections at {ADDRESSES[1]} can come from other machines, but there is no"),
    ):
        run = [sys.executable, "-m", "flexengine.run", *words]
        process = machines.start(0, run, {**SECRET, **more}, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        said = process.communicate(timeout=8 * PATIENCE)[1]
        assert process.returncode == 2
        assert why in said


def test_stages_on_two_machines(machines: TwoMachines, families: Any, tmp_path: Path) -> None:
    known, port = families("llama"), free_port()
    words = [sys.executable, "-m", "flexengine.run", *written(tmp_path, known, Policy(2, 2)), "--interface", INTERFACE]
    shared = {**SECRET, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "WORLD_SIZE": "2",
              "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # fmt: skip
    stages = []
    for rank in (0, 1):
        folder = tmp_path if not rank else tmp_path / "other"
        folder.mkdir(exist_ok=True)
        for name in ("in.jsonl", "policy.json") if rank else ():
            os.link(tmp_path / name, folder / name)
        stages.append(machines.start(rank, words, {**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
                                     cwd=folder))  # fmt: skip
    deadline = time.monotonic() + 8 * PATIENCE
    while stages[1].poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    for stage in stages:
        finished(stage)
    assert tokens(tmp_path) == known.expected
    hidden = sum(map(len, known.prompts)) * 64 * 4  # tokens, hidden size, fp32
    assert machines.bytes_received(1) > hidden
    assert not (tmp_path / "other" / "out.jsonl").exists()  # rank 0 alone writes
