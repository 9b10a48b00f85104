"""Fixtures of the tests of calibration."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flexengine.guests import calibration
from tests.helpers.calibrated import TOKENS
from tests.helpers.tokenizers import byte_tokenizer


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOKENS", TOKENS)


@pytest.fixture(scope="module")
def reader(families: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Copies of families that have a tokenizer."""

    def made(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name) / name
        shutil.copytree(families(name).directory, directory)
        byte_tokenizer(directory)
        return directory

    return made
