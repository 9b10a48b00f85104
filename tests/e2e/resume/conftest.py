"""Fixtures of the tests of resumed jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job import Job
from tests.helpers.resuming import Watch


@pytest.fixture(autouse=True)
def one_thread_everywhere(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes compute with one thread, too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def job(families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """Eight rows, some of them duplicates."""
    made = Job(tmp_path, families("llama"), capsys)
    rows = made.family.rows
    made.write([{**rows[i], "id": i, "max_tokens": 1 + 2 * i} for i in (0, 1, 1, 3, 4, 1, 6, 0)])
    return made


@pytest.fixture
def whole(job: Job) -> Callable[..., bytes]:
    """The output of the same job, undisturbed."""

    def get(*more: str) -> bytes:
        output, job.output = job.output, job.folder / "peace.jsonl"
        assert job(*more) in (0, 1)
        job.output = output
        return (job.folder / "peace.jsonl").read_bytes()

    return get


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)
