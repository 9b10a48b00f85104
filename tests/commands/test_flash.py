"""flexengine flash train: the table, the numbers as JSON, and options that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.commands import flash
from flexengine.commands.exit_codes import DONE, REFUSED
from flexengine.flash.trained import ABOUT
from tests.helpers.relu import LAYERS, make_relu

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
        (["train", "--misses", "0"], "share of misses is 0"),
        (["train", "--misses", "0.6"], "at most 0.5"),
        (["train", "--rank", "0"], "rank of predictors is 0"),
        (["train", "--tokens", "0"], "--tokens is 0"),
        (["train", "--tokens", "64"], "give 320 tokens or more"),
        (["train", "--threads", "0"], "--threads is 0"),
        (["train", "--text", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_refused_options(model: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert flash.main([*words, "--model", str(model)]) == REFUSED
    assert message in capsys.readouterr().err


def test_a_model_without_relu(families: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash.main(["train", str(families("llama").directory)]) == REFUSED
    assert "ReLU" in capsys.readouterr().err
