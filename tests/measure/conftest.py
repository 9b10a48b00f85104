"""Fixtures of the tests of measurements."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexengine.measure import delegation, kernels, links, model, overhead, streaming
from flexengine.tier.machine import Links, Machine, make_machine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures from a moment each, and little memory."""
    moments = [(links, "COPY_SECONDS"), (links, "SPILL_SECONDS"), (links, "READ_SECONDS"), (kernels, "SECONDS"),
               (kernels, "WINDOW"), (overhead, "SECONDS"), (model, "HEAD_SECONDS")]  # fmt: skip
    for module, name in moments:
        monkeypatch.setattr(module, name, 0.005)
    monkeypatch.setattr(model, "LAYER_SECONDS", 0.1)
    monkeypatch.setattr(streaming, "PASSES_SECONDS", 0.01)
    monkeypatch.setattr(delegation, "SECONDS", 0.01)
    monkeypatch.setattr(kernels, "SMALL", (128, 1 << 20))
    monkeypatch.setattr(kernels, "TURNS", 1)
    for name in ("COPIED", "SPILLED", "WRITTEN"):
        monkeypatch.setattr(links, name, 16 << 20)
    for name in ("COPIES", "READS"):
        monkeypatch.setattr(links, name, (64 << 10, 1 << 20, 4 << 20))


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
