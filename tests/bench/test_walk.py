"""bench/walk.py: a prompt, a weight and an error pass few modules, and seldom turn back."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("what", "passes"),
    [
        ("prompt", ["job.prompts", "engine.generation", "worker.worker", "job.results"]),
        ("weight", ["model.checkpoint", "worker.weights"]),
        ("error", ["runtime.execute", "runtime.lane", "engine.stages"]),
    ],
)
def test_a_short_walk(what: str, passes: list[str]) -> None:
    command = [sys.executable, "-m", "bench.walk", what]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    *lines, last = found.stdout.splitlines()
    rooms = [line.partition(":")[0] for line in lines if not line.startswith("turn: ")]
    assert set(passes) <= {*rooms}
    assert last == f"{len(rooms)} rooms, {len(lines) - len(rooms)} turns"
    assert len(rooms) <= 35
    assert len(lines) - len(rooms) <= 12
