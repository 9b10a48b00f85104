"""A few faults of every kind, as python -m bench.faults tries them by the thousand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexengine import kernels

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
PARTS = [["protocol", "crashes", "journal"], ["engine", "shared", "input", "files", "bits"]]  # one process each
# Bits that are flipped.
BITS = {"model": 25, "encoded weights": 25, "found by the command": 2, "converted from GGUF": 25}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
def test_survived(families: Any, parts: list[str], tmp_path: Path) -> None:
    """No row is lost or computed twice, every error has a message, and the next run's output is right."""
    kernels.load()  # a run that has to compile them first may count as hanging
    room = {"TMPDIR": str(MEMORY)} if "protocol" in parts and os.access(MEMORY, os.W_OK) else {}
    model = str(families("llama").directory)
    out = str(tmp_path / "faults.jsonl")
    command = [sys.executable, "-m", "bench.faults", model, "--quick", "--only", *parts, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, **room})
    assert done.returncode == 0, done.stderr + done.stdout
    records = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert {record["part"] for record in records} == set(parts)
    for record in records:
        assert record["tried"] == record["survived"] > 0
        assert record["lost"] == record["repeated"] == 0
    flipped = {record["kind"]: record["tried"] for record in records if record["part"] == "bits"}
    assert flipped == ({f"flipped bits: {kind}": bits for kind, bits in BITS.items()} if "bits" in parts else {})
