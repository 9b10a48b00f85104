"""Pipelines of real processes: --stages and torchrun, stages that die or hang, and resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flexengine.commands.main import main
from flexengine.parallel import heartbeat
from tests.helpers.pages import ROOT
from tests.helpers.slow_command import slow_command

ROWS, NEW = 12, 6
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def job(families: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """The words of a command without -o, and the output of one process."""
    folder, known = tmp_path_factory.mktemp("job"), families("llama")
    rows = [{"prompt_token_ids": known.prompts[i % len(known.prompts)], "seed": i} for i in range(ROWS)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", str(folder / "in.jsonl"), "-m", str(known.directory), "--max-tokens", str(NEW), "--temperature",
             "0.8", "--ignore-eos", "--device", "cpu", "--device-mem", "300M"]  # fmt: skip
    assert main([*words, "-o", str(folder / "one.jsonl"), "-q"]) == 0
    return words, (folder / "one.jsonl").read_bytes()


def finish(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def children(process: "subprocess.Popen[Any]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
def test_torchrun(job: Any, tmp_path: Path) -> None:
    words, expected = job
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
           "flexengine.run", *words[1:], "-o", "out.jsonl"]  # fmt: skip
    finish(run, tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "blow"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_a_killed_stage_is_named_and_the_job_continues(job: Any, tmp_path: Path, victim: int, blow: Any) -> None:
    """A stage that dies is noticed at once, one that hangs after some seconds. No process stays behind."""
    words, expected = job
    given = [*words, "-o", "out.jsonl", "--stages", "3"]
    journal = tmp_path / "out.jsonl.journal"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen([sys.executable, *slow_command(given, 0.3)], cwd=tmp_path,
                                  env=os.environ | ENVIRONMENT, stderr=log, stdout=log)  # fmt: skip
    while driver.poll() is None and not (journal.exists() and journal.read_bytes().count(b'"index"')):
        time.sleep(0.01)
    processes = [driver.pid, *children(driver)]
    assert len(processes) == 3
    os.kill(processes[victim], blow)
    began = time.monotonic()
    code = driver.wait(heartbeat.SILENT_SECONDS + 15)
    if victim:
        assert code == 3
        said = (tmp_path / "log").read_text()
        assert f"stage {victim} of 0 to 2 (" in said
        assert "run the same command again" in said
    assert time.monotonic() - began < 30
    while any(Path(f"/proc/{pid}").exists() for pid in processes[1:]):
        assert time.monotonic() - began < 45, "a stage stays behind"
        time.sleep(0.1)
    assert not (tmp_path / "out.jsonl").exists()
    finish([sys.executable, "-m", "flexengine", *given], tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == expected
