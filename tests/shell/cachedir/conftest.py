"""A cache of its own for each test."""

from pathlib import Path

import pytest

from tests.helpers.caches import Cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cache:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache", capsys)
