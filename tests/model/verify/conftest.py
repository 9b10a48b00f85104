"""Fixtures of the tests of checksums."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sums import list_sums


@pytest.fixture
def model(families: Any, tmp_path: Path) -> Path:
    """A model directory with its sums."""
    return list_sums(Path(shutil.copytree(families("llama").directory, tmp_path / "model")))
