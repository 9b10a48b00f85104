"""Worker processes on this machine, which the stages of a pipeline share."""

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers import workers
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.workers import JoinedWorker, LocalWorker, listening, open_workers
from flexengine.shell.commands.main import main
from tests.helpers.attention_workers import ThreadWorker
from tests.helpers.forked import SLOW, Forked, children

MEMORY = 1 << 20
GROUP: Any = SimpleNamespace(rank=0, size=2, exchange=lambda key, text: [text])


def test_engines_of_this_machine_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with (
        listening(WorkerPool(MEMORY), str(path)),
        closing(JoinedWorker("worker1", path, 1, 7)) as one,
        closing(JoinedWorker("worker1", path, 1, 8)) as two,
    ):
        handle = one.allocate(MEMORY // 2)
        assert handle is not None
        assert len(one.shared[handle]) == MEMORY // 2  # the same memory in both processes
        assert two.pool == one.pool
        assert two.allocate(MEMORY) is None  # the other engine holds a half
    assert not path.exists()
    with pytest.raises(WorkerLost, match="worker1 is lost: it does not listen"):
        JoinedWorker("worker1", path, 1, 7)


def test_a_killed_worker_leaves_a_socket_that_the_next_one_replaces(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    with listening(WorkerPool(MEMORY), str(path)), closing(JoinedWorker("worker1", path, 1, 7)) as worker:
        assert worker.memory == MEMORY


def test_nothing_is_left_if_a_worker_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start, started = LocalWorker, list[LocalWorker]()

    def once(*args: Any, **more: Any) -> LocalWorker:
        if started:
            assert len(list(tmp_path.glob("*/*"))) == 1  # the socket of the first
            raise WorkerLost("worker2", "worker2", "no memory")
        started.append(start(*args, **more))
        return started[0]

    monkeypatch.setattr(workers, "LocalWorker", once)
    with pytest.raises(WorkerLost, match="no memory"):
        open_workers(2, MEMORY, 2, GROUP)
    assert started[0].process.poll() == 0
    assert list(tmp_path.iterdir()) == []


def test_sockets_last_as_long_as_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(workers, "LocalWorker", ThreadWorker)
    tiers = open_workers(1, MEMORY, 2, GROUP)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    tiers[0].renew()
    assert folder.is_dir()
    tiers[0].close()
    tiers.clear()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_long_name_of_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("d" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(InvalidInput, match=r"TMPDIR is .*d, .* at most 107 are possible: set it to a shorter one"):
        open_workers(1, MEMORY, 2, GROUP)
    assert list(long.iterdir()) == []


def test_the_last_messages_of_a_process_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "python").write_text("#!/bin/sh\necho no libraries >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(WorkerLost, match=r"worker1 is lost: .*; its last messages: no libraries"):
        LocalWorker("worker1", MEMORY, 1)


@pytest.mark.slow
def test_a_pipeline_of_processes_whose_worker_is_killed(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    known = families("llama")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known.rows * 3))
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 4, "cache": {"workers": 0.75, "device": 0.25}}
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    words = ["run", "in.jsonl", "-m", str(known.directory), "--max-tokens", "24", "--ignore-eos", "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    assert main([*words, "-o", "one.jsonl", "-q"]) == 0
    more = ["--policy", "policy.json", "--stages", "2", "--attention-workers", "2", "--worker-mem", "4M"]
    command = Forked(SLOW.format(seconds=0.1), [*words, *more, "-o", "out.jsonl"], tmp_path, log := tmp_path / "log")
    while "generating" not in log.read_text():
        assert command.poll() is None, log.read_text()
        time.sleep(0.05)
    workers = [pid for pid in children(command.pid) if b"flexengine.guests.attention_workers" in _words(pid)]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert command.wait(120) == 0, log.read_text()
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert "attention worker worker" in (said := log.read_text())
    assert "continuing with a new worker" in said
    assert [each for each in tmp_path.iterdir() if each.name.startswith("flexengine-")] == []


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
