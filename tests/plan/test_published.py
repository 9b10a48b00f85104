"""Plans of models that many people run, from their config.json alone: each in seconds, with its card's parameters."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import shipped
from flexengine.errors import UnsupportedModel
from flexengine.model.config import load_config, size_of
from flexengine.plan.hardware import Hardware
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.shell.commands import plan
from flexengine.worker.open_model import OpenModel, open_model
from tests.helpers.published import MODELS

RUN = [name for name, model in MODELS.items() if not model.refused]
REFUSED = [name for name, model in MODELS.items() if model.refused]
MAX_SECONDS = 20  # of processor time, for any plan


def written(tmp_path: Path, name: str) -> Path:
    """Return a directory that holds only the config of a model."""
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODELS[name].fields))
    return directory


def opened(tmp_path: Path, name: str) -> OpenModel:
    return open_model(str(written(tmp_path, name)), None, "cuda", weights=False)


def count(model: OpenModel) -> float:
    return sum(t.elements for t in model.facts.tensors) / 1e9


def test_there_are_thirty() -> None:
    assert len(RUN) >= 30


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3", "gpt-oss-120b"])
def test_experts_need_no_weights_beside_the_config(tmp_path: Path, name: str) -> None:
    """Quantised weights that are not there are planned as plain ones."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name].fields))
    config = load_config(tmp_path, weights=False)
    layers, experts = size_of(config)
    assert layers * experts > 4_000
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1200}, {"num_local_experts": 60_000}])
def test_sizes_that_no_weights_back_are_limited(tmp_path: Path, change: dict[str, int]) -> None:
    fields = {**MODELS["Mixtral-8x7B"].fields, **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=r"states [\d,]+ layers times [\d,]+ experts; without weights.*at most"):
        open_model(str(tmp_path), None, "cpu", weights=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_each_is_planned_in_seconds(tmp_path: Path, name: str) -> None:
    began = time.process_time()
    model = opened(tmp_path, name)
    hardware = Hardware.load(shipped.find_file("hardware", "t4-16gb_208gb_ssd"))
    best = search(
        model.facts, replace(hardware, device_bytes=80 * 10**9, disk_bytes=None), Workload({(512, 32): 200})
    ).best
    seconds = time.process_time() - began
    print(f"{name}: {seconds:.1f} s")
    assert count(model) == pytest.approx(MODELS[name].billions, rel=1e-3)
    assert best.tokens == 200 * 32
    assert seconds < MAX_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_says_why(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=MODELS[name].refused) as caught:
        opened(tmp_path, name)
    assert name in str(caught.value)
    assert "which may be why" not in str(caught.value)


T4 = ("--hardware", "t4-16gb_208gb_ssd", "--prompt-tokens", "64", "--max-tokens", "8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom-7b1", "Qwen3-30B-A3B", "gemma-2-9b"])
def test_the_command_plans_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert plan.main([str(written(tmp_path, name)), *T4, "--rows", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 40 * 8


def test_a_policy_that_was_chosen_is_explained_as_it_is_without_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(written(tmp_path, "Llama-3.2-3B")), *T4, "--rows", "4", "--json", "--verbose"]
    policy = str(tmp_path / "policy.json")
    found = list[Any]()
    for more in (["--save", policy], ["--policy", policy]):
        assert plan.main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["helps"]
    assert found[1]["helps"] == found[0]["helps"]
