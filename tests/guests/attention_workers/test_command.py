"""flexengine run with attention workers: the same output, and refusals before anything starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine.guests.attention_workers import workers
from flexengine.plan.formatting import lane_name
from flexengine.plan.hardware import Capacity
from flexengine.plan.rates import assumed
from flexengine.plan.search import waits_for
from flexengine.shell.commands.main import main
from tests.helpers.attention_workers import ThreadWorker
from tests.helpers.measuring import measure_quickly

WORKERS = ["--attention-workers", "2", "--worker-mem", "4M"]


def written(folder: Path, known: Any) -> list[str]:
    """Write an input and a policy. Return the words of the command."""
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known.rows))
    policy = {"gpu_batch_size": 3, "num_gpu_batches": 2, "cache": {"workers": 0.75, "device": 0.25}}
    (folder / "policy.json").write_text(json.dumps(policy))
    return ["run", str(folder / "in.jsonl"), "-m", str(known.directory), "--policy", str(folder / "policy.json"),
            "--max-tokens", "6", "--ignore-eos", "--device", "cpu"]  # fmt: skip


def test_output_and_dry_run(
    families: Any, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    measure_quickly(monkeypatch)
    monkeypatch.setattr(workers, "LocalWorker", ThreadWorker)
    measure_quickly(monkeypatch)
    known = families("llama")
    words = written(tmp_path, known)
    assert main([*words, *WORKERS, "-o", str(tmp_path / "out.jsonl")]) == 0
    found = [json.loads(line)["token_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == known.expected
    assert "worker1" in capsys.readouterr().err
    assert main([*words, *WORKERS, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "  worker1 " in said  # its memory
    assert "questions to worker2" in said
    heads = {"gpu_batch_size": 3, "num_gpu_batches": 2, "cache": {"workers": 1}, "partition": "heads"}
    (tmp_path / "policy.json").write_text(json.dumps(heads))
    assert main([*words, *WORKERS, "--dry-run"]) == 0
    assert "  worker1 to worker2 100 %\n" in capsys.readouterr().out


def test_all_lanes_have_names() -> None:
    hardware = assumed("sim", Capacity(None, None, None, shared=False, staged=True, workers=(1 << 20,)))
    hardware = hardware.with_capacity(replace(hardware.capacity, workers=(1 << 20,)))
    lanes = [lane for lane in hardware.lanes if "worker1" in lane]
    assert len({lane_name(lane, False) for lane in lanes}) == len(lanes) == 7
    assert waits_for("worker1", False) == "attention of worker1"
    assert waits_for("worker1_send", True) == "questions to worker1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORKERS, "--ray", "auto"], "--attention-workers is 2, but the engines of --ray are on several machines"),
        (["--attention-workers", "2"], "--attention-workers needs --worker-mem"),
        (["--worker-mem", "4M"], "--worker-mem is 4M, but there are no attention workers"),
        (["--attention-workers", "here"], "'here' is no address of an attention worker; give HOST:PORT"),
        (["--attention-workers", "-3", "--worker-mem", "4M"], "--attention-workers is -3; it must be 0 to 64"),
        ([], "the policy has a share of the KV cache on workers, but there are no attention workers"),
    ],
)
def test_refusals(
    families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*written(tmp_path, families("llama")), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_worker_that_cannot_listen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLEXENGINE_SECRET", "0123456789abcdef")  # else other machines' connections are refused
    assert main(["serve-attention", "192.0.2.1:29600", "--worker-mem", "4M"]) == 2
    assert "cannot listen at 192.0.2.1:29600 (" in capsys.readouterr().err
    assert main(["serve-attention", "127.0.0.1:29600"]) == 2
    assert "an address and --worker-mem are needed" in capsys.readouterr().err
    assert main(["serve-attention", "29600", "--worker-mem", "4M"]) == 2
    assert "'29600' is no address of an attention worker" in capsys.readouterr().err
