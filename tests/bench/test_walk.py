"""bench/walk.py: a prompt, a weight and an error pass few modules, as docs/architecture.md draws them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = re.compile(r" *(\d+) ([\w.]+)(?: +back to((?: \d+)+))?")  # number, module, turns


@pytest.mark.parametrize(
    ("what", "passes"),
    [
        ("prompt", ["job.rows", "engine.generation", "worker.worker", "job.results"]),
        ("weight", ["model.checkpoint", "worker.weights"]),
        ("error", ["runtime.execute", "runtime.lane", "engine.stages"]),
    ],
)
def test_a_short_walk(what: str, passes: list[str]) -> None:
    command = [sys.executable, "-m", "bench.walk", what]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    *lines, last = found.stdout.splitlines()
    walk = [ROOM.match(line) for line in lines]
    rooms = [room[2] for room in walk if room]
    turns = sum(len(room[3].split()) for room in walk if room and room[3])
    assert set(passes) <= {*rooms}
    assert last == f"{len(rooms)} rooms, {turns} turns"
    assert len(rooms) <= 35
    assert turns <= 12
    drawn = (ROOT / "docs" / "architecture.md").read_text().partition(f"`python -m bench.walk {what}`")[2]
    block = drawn.split("```")[1].splitlines()[1:]
    assert [room[0].strip() for line in block if (room := ROOM.match(line))] == [line.strip() for line in lines]
