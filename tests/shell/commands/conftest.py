"""Fixtures of the tests of commands."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job import Job


@pytest.fixture
def job(families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    made = Job(tmp_path, families("llama"), capsys)
    made.write(made.family.rows)
    return made
