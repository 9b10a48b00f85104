"""Fixtures of the tests of measurements."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexengine.tier.machine import Links, Machine, make_machine
from tests.helpers.measuring import measure_quickly


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_quickly(monkeypatch)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Machines that are closed again, and leave nothing in their offload directory."""
    made: list[Machine] = []

    def make(kind: str, memory: int | None = None, rates: Links | None = None, disks: int = 1) -> Machine:
        folders = [tmp_path / f"offload{number}" for number in range(disks)]
        made.append(make_machine(kind, memory, None, folders, rates))
        return made[-1]

    yield make
    for machine in made:
        machine.close()
    assert not list(tmp_path.glob("offload*"))
