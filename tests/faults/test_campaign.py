"""A few faults of every kind, as python -m bench.faults tries them by the thousand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("part", ["protocol", "crashes", "journal", "engine", "shared", "input", "files"])
def test_survived(families: Any, part: str, tmp_path: Path) -> None:
    """Nothing lost, nothing done twice, every error told in words, and the next run right."""
    room = {"TMPDIR": str(MEMORY)} if part in ("protocol", "crashes", "journal") and os.access(MEMORY, os.W_OK) else {}
    model = str(families("llama").directory)
    out = str(tmp_path / "faults.jsonl")
    command = [sys.executable, "-m", "bench.faults", model, "--quick", "--only", part, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, **room})
    assert done.returncode == 0, done.stderr + done.stdout
    records = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert records
    for record in records:
        assert record["tried"] == record["survived"] > 0
        assert record["lost"] == record["repeated"] == 0
