"""flexengine plan --cluster: report, JSON, strategy file, and refusals before work starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.plan.stages import Strategy
from flexengine.shell.commands import plan

SIZES = ["--rows", "32", "--prompt-tokens", "512", "--max-tokens", "100"]


def test_report_and_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "strategy.json"
    options = ["--cluster", "llm-pq-3", *SIZES, "--quality", "small", "--batch", "32", "--save", str(saved)]
    assert plan.main(["opt-30b", *options]) == 0
    shown = capsys.readouterr().out
    for part in ("opt-30b on llm-pq-3 (3 x T4, 1 x V100)", "Pipeline", "Layers", "Stages", "Memory", "Prediction",
                 "idle (bubbles)", "pace: V100 in prefill (", "Would help"):  # fmt: skip
        assert part in shown
    strategy = Strategy.load(saved)
    assert strategy.num_layers == 48
    assert strategy.model == "opt, 48 layers of 7168, 56 heads of 128, vocabulary 50272"
    assert {stage.device for stage in strategy.stages} <= {"T4-1", "T4-2", "T4-3", "V100"}
    assert set(strategy.weights) <= {None, "int8", "int4"}


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["opt-13b", "--cluster", "llm-pq-2", *SIZES, "--batch", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["strategy"]["stages"][0]["layers"] == [0, 40]
    assert answer["stages"][0]["memory_bytes"] <= answer["stages"][0]["capacity_bytes"]
    assert answer["simulated_seconds"] == pytest.approx(answer["seconds"], rel=0.02)
    assert answer["batch"] == 8
    assert answer["rounds"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "nowhere"], "there is no cluster file nowhere"),
        (["--cluster", "llm-pq-3", "--hardware", "x"], "--hardware has no effect with --cluster"),
        (["--cluster", "llm-pq-3", "--device-mem", "3G"], "--device-mem has no effect with --cluster"),
        (["--cluster", "llm-pq-3", "--cache", "int8"], "--cache has no effect with --cluster"),
        (["--cluster", "llm-pq-3", "--theta", "-1"], "--theta is -1.0; it must be at least 0"),
        (["--cluster", "llm-pq-3", "--group", "0"], "--group is 0; it must be at least 1"),
        (["--cluster", "llm-pq-3", "--allow", "int8-cache"], "--allow int8-cache has no effect with --cluster"),
        (["--cluster", "llm-pq-3", "--allow", "int7"], "--allow int7 is unknown"),
        (["--cluster", "llm-pq-3", "--weights", "int2"], "--weights is int2; layers of a pipeline may be in"),
        (["--cluster", "llm-pq-3", "--weights", "int4", "--quality", "near"], "--weights fixes the format"),
        (["--cluster", "llm-pq-3", "--indicator", "variance"], "says which numbers of --harm count; give --harm, too"),
        (["--indicator", "variance"], "--indicator is for a plan with --cluster"),
        (["--theta", "2"], "--theta is for a plan with --cluster"),
        (["--batch", "2"], "--batch is for a plan with --cluster"),
        (["--theta", "1"], "--theta is for a plan with --cluster"),
        (["--method", "auto"], "--method is for a plan with --cluster"),
        (["--cluster", "llm-pq-3", "--save", "/nowhere/s.json"], "there is no directory /nowhere"),
    ],
)
def test_refusals(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["opt-30b", *options]) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"devices": [{"name": "a", "memory": "1GB", "flops": 1e12, "bandwidth": 1e11}]}
    (tmp_path / "c.json").write_text(json.dumps(small))
    assert plan.main(["opt-13b", "--cluster", str(tmp_path / "c.json"), *SIZES]) != 0
    error = capsys.readouterr().err
    assert "no stages fit: with layers in exact and one sequence at a time" in error
    assert "raise memory in the cluster file, add devices or host_memory" in error


def test_numbers_that_the_solver_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["opt-1.3b", "--cluster", "llm-pq-3", *SIZES, "--batch", "8", "--theta", "1e30"]) == 2
    shown = capsys.readouterr().err
    assert "theta times harm, differ by too many powers of ten, bring extreme rates of the cluster file" in shown
