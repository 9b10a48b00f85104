"""Layers that a model's files name."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.model.source import named_layers


@pytest.mark.parametrize(("config", "count"), [
    ({"num_hidden_layers": 3}, 3),
    ({"n_layer": 12}, None),
    ({"num_hidden_layers": 7, "text_config": {"num_hidden_layers": 3}}, 3),
    ({"num_hidden_layers": 7, "text_config": {}}, None),
    ({"num_hidden_layers": "many"}, None),
    ({"num_hidden_layers": True}, None),
    ([3], None),
])  # fmt: skip
def test_directories(config: Any, count: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert named_layers(str(tmp_path)) == count


@pytest.mark.parametrize("model", ["directory", "file.gguf", "owner/name", "~no-such-user/model"])
def test_what_cannot_be_read(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that is cut off, a GGUF file that is cut off, a model of the hub, and the home of an unknown user."""
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    Path("directory/config.json").write_text("{")
    Path("file.gguf").write_bytes(b"GGUF")
    assert named_layers(model) is None


@pytest.mark.demo
def test_gguf() -> None:
    assert named_layers(None) == 30
