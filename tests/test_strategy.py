"""Strategies: files in and out, and refusals that name value and remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.errors import InvalidInput
from flexengine.plan.stages import StagePlan, Strategy
from flexengine.policy import Policy
from flexengine.records import read

FILE: dict[str, Any] = {
    "model": "opt, 5 layers of 64", "num_layers": 5, "prefill_batch": 2, "decode_batch": 4, "cohorts": 3,
    "stages": [
        {"device": "a", "layers": [0, 3], "weights": [None, "int8", "int8"], "policy": {"gpu_batch_size": 4}},
        {"device": "b", "layers": [3, 5], "weights": ["int4", "int3"]},
    ],
}  # fmt: skip


def changed(**values: Any) -> dict[str, Any]:
    return {**FILE, **values}


def stage(device: str, first: int, end: int, **values: Any) -> dict[str, Any]:
    return {"device": device, "layers": [first, end], "weights": [None] * (end - first), **values}


def test_a_file_holds_what_was_made(tmp_path: Path) -> None:
    made = Strategy("opt, 5 layers of 64", 5,
                    (StagePlan("a", (0, 3), (None, "int8", "int8"), Policy(gpu_batch_size=4)),
                     StagePlan("b", (3, 5), ("int4", "int3"))), 2, 4, 3)  # fmt: skip
    assert read(Strategy, FILE, "file") == made
    (tmp_path / "s.json").write_text(made.text())
    assert Strategy.load(tmp_path / "s.json") == made
    assert json.loads(made.text())["stages"][0]["policy"]["gpu_batch_size"] == 4
    assert [stage.device for stage in made.stages] == ["a", "b"]
    assert made.weights == (None, "int8", "int8", "int4", "int3")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(stages=[stage("a", 0, 3), stage("b", 2, 5)]), "layers 2 to 2 are in two stages"),
        (changed(stages=[stage("a", 0, 2), stage("b", 3, 5)]), "layers 2 to 2 are in no stage"),
        (changed(stages=[stage("a", 0, 3), stage("b", 3, 4)]), "end with layer 3, but the model has layers 0 to 4"),
        (changed(stages=[stage("a", 1, 5)]), "layers 0 to 0 are in no stage"),
        (changed(stages=[stage("a", 0, 3), stage("a", 3, 5)]), "device a has two stages"),
        (changed(stages=[stage("a", 0, 5, weights=["int8"])]), "hold 1 formats, but layers [0, 5] are 5"),
        (changed(stages=[stage("a", 0, 5, weights=["int5"] * 5)]),
         "weights[0] is 'int5'; it must be one of int8, int4, int3, or null (exact)"),
        (changed(stages=[stage("a", 5, 5)]), "[5, 5]; it must be [first, end]"),
        (changed(stages=[stage("a", 0, 5, layers=[0, 2.5])]), "[0, 2.5]; it must be [first, end]"),
        (changed(stages=[stage("a", 0, 5, policy=3)]), "stages[0]: policy is 3; it must be an object of fields"),
        (changed(stages=[stage("a", 0, 5, policy={"batch": 3})]), "stages[0]: policy has unknown fields ['batch']"),
        (changed(stages=[stage("a", 0, 5, speed=3)]), "stages[0] has unknown fields ['speed']"),
        (changed(stages=[{"device": "a"}]), "stages[0] lacks fields ['layers', 'weights']"),
        (changed(stages=[]), "must be a list of at least one stage"),
        (changed(stages=7), "must be a list of at least one stage"),
        (changed(stages=["a"]), "stages[0] is 'a'; it must be an object"),
        (changed(prefill_batch=5), "prefill_batch is 5 and decode_batch 4"),
        (changed(cohorts=0), "cohorts is 0; it must be a whole number of at least 1"),
        (changed(num_layers=True), "num_layers is true"),
        (changed(model=""), "model is ''"),
        (changed(theta=1), "unknown fields ['theta']"),
        ({"model": "x"}, "lacks fields ['cohorts', 'decode_batch', 'num_layers', 'prefill_batch', 'stages']"),
    ],
)  # fmt: skip
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read(Strategy, values, "strategy file s.json")
    assert message in str(error.value)
    assert str(error.value).startswith("strategy file s.json")


@pytest.mark.parametrize(
    ("model", "layers", "devices", "message"),
    [
        ("opt, 5 layers of 64", 6, 2, "a model of 5 layers, but this one has 6; make a strategy with flexengine plan"),
        ("llama, 5 layers of 64", 5, 2, "made for the model opt, 5 layers of 64, but this one is llama"),
        ("opt, 5 layers of 64", 5, 1, "has 2 stages, but there are 1 devices"),
    ],
)
def test_a_strategy_is_for_one_model_and_its_devices(model: str, layers: int, devices: int, message: str) -> None:
    strategy = read(Strategy, FILE, "file")
    strategy.check(FILE["model"], 5, 3)
    strategy.check(FILE["model"], 5, 2)
    with pytest.raises(InvalidInput) as error:
        strategy.check(model, layers, devices)
    assert message in str(error.value)
