"""The record of the model in the harness's cache of responses. A dict stands for the SQLite file."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

from flexengine.apps.lm_eval.model import RECORD, check_cache
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from tests.helpers.speaker import make_speaker

OPTIONS = {"max_length": 96, "think_end_token": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_speaker(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", device_mem="64M", progress=False) as opened:
        yield opened


def test_a_cache_belongs_to_one_model(engine: Engine, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored: dict[str, Any] = {}
    check_cache(stored, engine, OPTIONS)
    stored["digest"] = "response"
    check_cache(stored, engine, OPTIONS)
    assert set(stored) == {RECORD, "digest"}
    assert not caplog.records
    with pytest.raises(InvalidInput, match="responses of another model: max_length: was 96, now 64; name another file"):
        check_cache(stored, engine, OPTIONS | {"max_length": 64})
    other = Engine(str(folder), device="cpu", device_mem="32M", progress=False, lossy=Lossy("int8"))
    with other, pytest.raises(InvalidInput, match="weights: was not given, now int8"):
        check_cache(stored, other, OPTIONS)


def test_other_weights(engine: Engine, tmp_path: Path) -> None:
    """The same name and size."""
    stored: dict[str, Any] = {}
    check_cache(stored, engine, OPTIONS)
    (model := make_speaker(tmp_path)).model.norm.weight.data.mul_(2)
    model.save_pretrained(tmp_path)
    changed = r"model file model\.safetensors has other contents of the same size"
    other = Engine(str(tmp_path), device="cpu", device_mem="64M", progress=False)
    with other, pytest.raises(InvalidInput, match=changed):
        check_cache(stored, other, OPTIONS)


def test_switches_that_the_planner_chooses(folder: Path) -> None:
    """They are not compared; the names that it may choose from are."""
    stored: dict[str, Any] = {}
    for allow, changed in ((["int8-cache"], False), (["int8-cache"], False), (["int8-weights"], True)):
        with Engine(str(folder), device="cpu", device_mem="64M", progress=False, allow=allow) as engine:
            if changed:
                with pytest.raises(InvalidInput, match="allow: was "):
                    check_cache(stored, engine, OPTIONS)
            else:
                check_cache(stored, engine, OPTIONS)
                engine.generate("ab")
                check_cache(stored, engine, OPTIONS)


def test_responses_without_a_record(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    stored: dict[str, Any] = {"digest": "response"}
    with caplog.at_level(logging.WARNING):
        check_cache(stored, engine, OPTIONS)
    assert "does not say which model gave its responses" in caplog.text
    assert RECORD in stored
