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

from flexengine import Policy
from flexengine.shell.commands.main import main
from tests.helpers.forked import Forked, children
from tests.helpers.measuring import measure_quickly
from tests.helpers.pages import ROOT

ROWS, NEW = 12, 6
DRIVER = """
import time
from flexengine.job.journal import Journal
from flexengine.guests.wire import link
link.SILENT_SECONDS = 4.0
add = Journal.add
def slow(journal, result):
    add(journal, result)
    time.sleep(0.3)
Journal.add = slow
from flexengine.shell.commands.main import main
sys.exit(main(sys.argv[1:]))
"""
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def job(families: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """The words of a command without -o, and the output of one process."""
    folder, known = tmp_path_factory.mktemp("job"), families("llama")
    rows = [{"prompt_token_ids": known.prompts[i % len(known.prompts)], "seed": i} for i in range(ROWS)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "policy.json").write_text(json.dumps(Policy(1, 2).to_json()))  # rows end in several sweeps
    words = ["run", str(folder / "in.jsonl"), "--policy", str(folder / "policy.json"), "-m", str(known.directory),
             "--max-tokens", str(NEW), "--temperature", "0.8", "--ignore-eos", "--device", "cpu", "--device-mem",
             "300M"]  # fmt: skip
    assert main([*words, "-o", str(folder / "one.jsonl"), "-q"]) == 0
    return words, (folder / "one.jsonl").read_bytes()


def finish(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_torchrun(job: Any, tmp_path: Path) -> None:
    words, expected = job
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
           "flexengine.run", *words[1:], "-o", "out.jsonl"]  # fmt: skip
    finish(run, tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.slow
def test_lost_stages_are_named_and_the_job_continues(job: Any, tmp_path: Path) -> None:
    """A stage that dies is noticed at once, one that hangs after some seconds, and the driver leaves no process behind.
    The job goes on after each."""
    words, expected = job
    given = [*words, "-o", "out.jsonl", "--stages", "2"]
    journal = tmp_path / "out.jsonl.journal"
    for victim, blow in ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)):
        done = journal.read_bytes().count(b'"index"') if journal.exists() else 0
        driver = Forked(DRIVER, given, tmp_path, log := tmp_path / f"{victim} {blow}")
        while driver.poll() is None and not (journal.exists() and journal.read_bytes().count(b'"index"') > done):
            time.sleep(0.01)
        assert driver.poll() is None, driver.said()
        processes = [driver.pid, *children(driver.pid)]
        assert len(processes) == 2
        os.kill(processes[victim], blow)
        code = driver.wait(120)
        if victim:
            assert code == 3
            assert "stage 1 of 0 to 1 (" in log.read_text()
            assert "run the same command again" in log.read_text()
        deadline = time.monotonic() + 60
        while Path(f"/proc/{processes[1]}").exists():
            assert time.monotonic() < deadline, "a stage stays behind"
            time.sleep(0.05)
        assert not (tmp_path / "out.jsonl").exists()
    last = Forked(DRIVER.replace("4.0", "60.0"), given, tmp_path, tmp_path / "last")
    assert last.wait(120) == 0, last.said()
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.slow
def test_a_stage_that_ends_before_it_joins_is_named(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As after an error of its own machine: here it is killed while Python starts, which never ends."""
    assert Forked("", [], tmp_path, tmp_path / "first").wait(120) == 0  # the process that forks has started
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    driver = Forked(DRIVER, [*job[0], "-o", "out.jsonl", "--stages", "2"], tmp_path, log := tmp_path / "log")
    while not children(driver.pid):
        assert driver.poll() is None, driver.said()
        time.sleep(0.01)
    os.kill(children(driver.pid)[0], signal.SIGKILL)
    assert driver.wait(120) == 3
    assert "stage 1 of 0 to 1 (process" in log.read_text()
    assert "it ended with code -9 before it joined" in log.read_text()


@pytest.mark.slow
def test_dry_run_shows_all_stages(
    job: Any, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rates that it measures go to the cache; it writes nothing else."""
    words, _ = job
    measure_quickly(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dry-run", "--stages", "2"]) == 0
    printed = capsys.readouterr().out
    assert "  0: layers 0 to 1, weights 100 % RAM, " in printed
    assert "  1: layers 2 to 3, weights " in printed
    assert "the job takes at least " in printed
    assert list(tmp_path.iterdir()) == [own_cache]
    assert list((own_cache / "hardware").iterdir())
