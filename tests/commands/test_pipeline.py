"""Options of pipelines: what is refused before anything is loaded or started."""

import json
from pathlib import Path

import pytest

from flexengine.commands.main import main
from flexengine.policy import Policy
from flexengine.strategy import StagePlan, Strategy


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
    (["--interface", "eth0"], {}, "--interface is eth0, but one process"),
    (["--stages", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "--stages is 2, but WORLD_SIZE is 2"),
    ([], {"RANK": "2", "WORLD_SIZE": "2"}, "the environment has RANK=2 and WORLD_SIZE=2"),
    ([], {"RANK": "one", "WORLD_SIZE": "2"}, "the environment has RANK=one"),
    ([], {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR is 10.0.0.1, another machine"),
    (["--strategy", "none.json"], {}, "none.json"),
    (["--strategy", "gap.json"], {}, "strategy stages end with layer 1, but the model has layers 0 to 2"),
    (["--strategy", "two.json", "--stages", "3"], {}, "--stages is 3, but the strategy has 2 stages"),
    (["--strategy", "two.json", "--policy", "policy.json"], {}, "--strategy has a block of its own"),
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
