"""A few flipped bits of a model, of encoded and of converted weights: --verify finds them all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ["model", "encoded weights", "found by the command", "converted from GGUF"]


@pytest.mark.slow
def test_flipped_bits_are_found(families: Any, tmp_path: Path) -> None:
    out = tmp_path / "faults.jsonl"
    command = [sys.executable, "-m", "bench.faults", str(families("llama").directory), "--quick", "--only", "bits",
               "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["kind"] for record in records] == [f"flipped bits: {kind}" for kind in KINDS]
    assert [record["survived"] for record in records] == [record["tried"] for record in records] == [25, 25, 2, 25]
