"""Fleets on a real Ray of this machine: killed actors, stages and commands leave each row once, with its own bytes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason='needs pip install "flexengine[ray]"')
pytest.importorskip("ray.data", reason='needs pip install "flexengine[ray]"')

from bench.fleet.__main__ import CASES, Case, local_ray, measure


@pytest.fixture(scope="module")
def address(run_cache: Path) -> Iterator[str]:
    """The address of a Ray whose actors have this run's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", os.environ["HOME"])  # `local_ray` sets it
        with local_ray() as found:
            yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kills(case: Case, address: str, tmp_path: Path) -> None:
    record, right = measure(case, 240, tmp_path, address)
    assert right, record
