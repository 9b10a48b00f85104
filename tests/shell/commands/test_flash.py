"""flexengine flash train: the table, the numbers as JSON, and options that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexengine.guests import calibration
from flexengine.guests.flash.predictors import ABOUT
from flexengine.shell.commands import flash, quality
from flexengine.shell.commands.messages import DONE, REFUSED
from flexengine.shell.commands.run import main
from tests.helpers.relu import LAYERS, make_relu
from tests.helpers.tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_relu(directory := tmp_path / "model")
    return directory


def test_train(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(model), "--tokens", "640", "--rank", "8", "--misses", "0.1"]
    assert flash.main(words) == DONE
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == " ".join(flash._HEAD).split()
    assert len(out) == 1 + LAYERS + 2
    assert flash.main([*words, "--json", "--verify"]) == REFUSED  # the model has no checksums
    assert flash.main([*words, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    total = {n: sum(layer[n] for layer in found["layers"]) for n in ("total", "active", "predicted", "missed")}
    assert found["misses"] == total["missed"] / total["active"]
    assert found["active"] == total["active"] / total["total"]
    assert f"{found['misses']:.1%} misses" in out[-1]
    assert (Path(found["path"]) / ABOUT).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must be train"),
        (["train", "--misses", "0"], "--misses is 0"),
        (["train", "--misses", "0.6"], "at most 0.5"),
        (["train", "--rank", "0"], "--rank is 0"),
        (["train", "--tokens", "0"], "--tokens is 0"),
        (["train", "--tokens", "64"], "give 320 tokens or more"),
        (["train", "--threads", "0"], "--threads is 0"),
        (["train", "--text", "/nowhere"], "/nowhere cannot be read"),
        (["train", "--sparsify", "1.5"], "sparsify is 1.5; it must be a share above 0 and below 1"),
        (["train", "--sparsify", "0.7"], "are exactly 0 already for many neurons: its activation function is ReLU"),
        (["train", "--calibration-text", "/nowhere"], "is for the thresholds of --sparsify"),
    ],
)
def test_refused_options(model: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert flash.main([*words, "--model", str(model)]) == REFUSED
    assert message in capsys.readouterr().err


def test_a_model_without_relu(families: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash.main(["train", str(families("llama").directory)]) == REFUSED
    assert "ReLU-fied checkpoint, or --sparsify SHARE, such as 0.7, which is lossy" in capsys.readouterr().err


def test_sparsified(families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The commands of the page: quality measures the cost, and run takes the predictors of flash train."""
    monkeypatch.setattr(calibration, "TOKENS", 48)
    directory, prompts, output = tmp_path / "llama", tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    shutil.copytree(families("llama").directory, directory)
    byte_tokenizer(directory)
    assert quality.main([str(directory), "--sparsify", "0.5,0.9", "--rows", "2", "--tokens", "64", "--json"]) == DONE
    exact, half, most = json.loads(capsys.readouterr().out)["choices"]
    assert (half["lossy"], most["lossy"]) == ({"sparsify": 0.5}, {"sparsify": 0.9})
    assert (half["nll"], most["nll"]) != (exact["nll"], exact["nll"])
    assert flash.main(["train", str(directory), "--sparsify", "0.8", "--tokens", "2560", "--json"]) == DONE
    trained = json.loads(capsys.readouterr().out)
    assert trained["active"] == pytest.approx(0.2, abs=0.1)
    assert flash.main(["train", str(directory), "--sparsify", "0.3", "--tokens", "2560"]) == REFUSED
    assert "raise --sparsify, which is 0.3, or run without flash mode" in capsys.readouterr().err
    prompts.write_text('{"prompt_token_ids": [5, 6], "max_tokens": 3}\n')
    words = [str(prompts), "--output", str(output), "--model", str(directory), "--flash", "predictors", "--sparsify"]
    assert main([*words, "0.8"]) == DONE
    assert len(json.loads(output.read_text())["token_ids"]) == 3
    assert "lossy: flash predictors, sparsify 0.8; flexengine quality shows" in capsys.readouterr().err
    assert main([*words[:1], "--output", str(tmp_path / "other.jsonl"), *words[3:], "0.5"]) == REFUSED
    assert f"flexengine flash train {directory} --sparsify 0.5" in capsys.readouterr().err
