"""Options of pipelines: what is refused before anything is loaded or started."""

import json
import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flexengine.guests.wire import processes
from flexengine.plan.stages import StagePlan, Strategy
from flexengine.policy import Policy
from flexengine.shell.commands import distributed, run
from flexengine.shell.commands.main import main


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    stages = tuple(StagePlan(f"gpu{i}", (i, i + 1), (None,)) for i in range(2))
    Path("two.json").write_text(Strategy("llama", 2, stages, 1, 1, 2).text())
    Path("gap.json").write_text(json.dumps(Strategy("llama", 2, stages, 1, 1, 2).to_json() | {"num_layers": 3}))
    Path("policy.json").write_text(json.dumps(Policy().to_json()))


@pytest.mark.parametrize(("words", "environment", "why"), [
    (["--stages", "0"], {}, "--stages is 0; it must be at least 1"),
    (["--stages", "auto", "--ray", "local"], {}, "--stages is auto, which counts the GPUs of one machine; give --ray"),
    (["--stages", "auto"], {"RANK": "0", "WORLD_SIZE": "2"}, "--stages is auto, but WORLD_SIZE is 2"),
    (["--interface", "eth0"], {}, "--interface is eth0, but one process"),
    (["--stages", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "--stages is 2, but WORLD_SIZE is 2"),
    ([], {"RANK": "2", "WORLD_SIZE": "2"}, "the environment has RANK=2 and WORLD_SIZE=2"),
    ([], {"RANK": "one", "WORLD_SIZE": "2"}, "the environment has RANK=one"),
    ([], {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR is 10.0.0.1, another machine"),
    (["--strategy", "none.json"], {}, "none.json"),
    (["--strategy", "gap.json"], {}, "strategy stages end with layer 1, but the model has layers 0 to 2"),
    (["--strategy", "two.json", "--stages", "3"], {}, "--stages is 3, but the strategy has 2 stages"),
    (["--strategy", "two.json", "--policy", "policy.json"], {}, "--strategy has a block of its own"),
    (["--strategy", "two.json", "--attention-workers", "a:1"], {}, "--strategy, whose stages keep the KV cache"),
])  # fmt: skip
def test_refusals(
    words: list[str], environment: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "in.jsonl", "-o", "out.jsonl", *words]) == 2
    assert why in capsys.readouterr().err
    assert not Path("out.jsonl.journal").exists()


@pytest.mark.parametrize(("words", "why"), [
    (["--stages", "4"], "there are 4 stages, but the model has 3 layers; give at most 3 stages"),
    (["--strategy", "two.json"], "the strategy is for 2 layers, but the model has 3"),
])  # fmt: skip
def test_layers_are_counted_before_processes_start(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("processes are started")

    monkeypatch.setattr(processes, "local_stages", started)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"text_config": {"num_hidden_layers": 3}, "num_hidden_layers": 7}')
    assert main(["run", "in.jsonl", "-m", "model", "-o", "out.jsonl", *words]) == 2
    assert why in capsys.readouterr().err


def test_stages_are_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "in.jsonl", "--stages", "all"])
    assert "--stages: 'all' is neither a whole number nor auto" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "device", "layers", "stages", "said"), [
    (4, "auto", 12, 4, "--stages auto: 4 GPUs, so 4 processes compute"),
    (8, "cuda", 3, 3, "--stages auto: 8 GPUs for 3 layers, so 3 processes compute"),
    (1, "auto", 12, 1, "--stages auto: 1 GPU, so one process computes"),
    (0, "auto", 12, 1, "--stages auto: no GPU is used, so one process computes"),
    (4, "cpu", 12, 1, "--stages auto: no GPU is used, so one process computes"),
])  # fmt: skip
def test_auto_takes_a_stage_for_each_gpu(
    gpus: int, device: str, layers: int, stages: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    class Started(Exception):
        """Processes would be started."""

    def start(count: int, argv: list[str]) -> None:
        assert "auto" in argv  # they know their number from the environment
        assert os.environ[distributed.LAUNCHED] == str(count)
        raise Started(count)

    monkeypatch.setattr(processes, "local_stages", start)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    words = ["in.jsonl", "-m", "model", "-o", "out.jsonl", "--stages", "auto", "--device", device]
    args = run.parser().parse_args(words)
    args.command = ["run", *args.words]
    with pytest.raises(Started, match=str(stages)) if stages > 1 else nullcontext():
        assert distributed.rank_of(args) == 0
        with distributed.pipeline(args) as group:
            assert group is None
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.usefixtures("sigint")
def test_an_interrupt_while_stages_start_ends_those_that_run(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before the third process is started, or after its fork but before Popen returns."""
    real, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def starting(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(started) == 2 and when == "before":
            raise KeyboardInterrupt
        started.append(real(*args, **options))
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", starting)
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        processes.local_stages(5, ["-c", "import time; time.sleep(60)"]).__enter__()
    assert [process.poll() for process in started] == [-signal.SIGKILL] * (2 if when == "before" else 3)
    assert dict(os.environ) == before
