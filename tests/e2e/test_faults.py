"""A few faults of every kind, as python -m bench.faults tries them by the thousand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from flexengine import kernels
from tests.helpers.forked import Forked

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
PARTS = [["protocol", "crashes", "journal"], ["engine", "shared", "input", "files", "bits"]]  # one process each
# Bits that are flipped.
BITS = {"model": 25, "encoded weights": 25, "found by the command": 2, "converted from GGUF": 25}


def _run(words: list[str], light: bool, log: Path) -> None:
    """Run bench.faults. It forks for each fault, which takes several times as long in a process that has imported
    torch. `light` starts a new process, which does not import torch."""
    if light:
        done = subprocess.run([sys.executable, "-m", "bench.faults", *words], cwd=ROOT, capture_output=True, text=True,
                              timeout=600)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return
    code = "from bench.faults.__main__ import main; sys.exit(main(sys.argv[1:]))"
    forked = Forked(code, words, ROOT, log)
    assert forked.wait(600) == 0, forked.said()


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
def test_survived(families: Any, parts: list[str], tmp_path: Path) -> None:
    """No row is lost or computed twice, every error has a message, and the next run's output is right."""
    light = "protocol" in parts  # a stub replaces the engine
    if not light:
        kernels.load()  # a run that has to compile them first may count as hanging
    place = MEMORY if light and os.access(MEMORY, os.W_OK) else tmp_path
    words = [str(families("llama").directory), "--quick", "--only", *parts, "--out", str(tmp_path / "faults.jsonl")]
    with TemporaryDirectory(dir=place) as work:
        _run([*words, "--work", work], light, tmp_path / "log")
    records = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert {record["part"] for record in records} == set(parts)
    for record in records:
        assert record["tried"] == record["survived"] > 0
        assert record["lost"] == record["repeated"] == 0
    flipped = {record["kind"]: record["tried"] for record in records if record["part"] == "bits"}
    assert flipped == ({f"flipped bits: {kind}": bits for kind, bits in BITS.items()} if "bits" in parts else {})
