"""Fleets on a real Ray of this machine: killed actors, stages and commands leave each row once, with its own bytes."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason='needs pip install "flexengine[ray]"')
pytest.importorskip("ray.data", reason='needs pip install "flexengine[ray]"')

from bench.fleet.__main__ import CASES, Case, measure  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kills(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cache: Path) -> None:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(run_cache))
    record, right = measure(case, 240, tmp_path)
    assert right, record
