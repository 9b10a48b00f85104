"""A few faults of every kind, as python -m bench.faults tries them by the thousand."""

import json
import os
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


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
def test_survived(families: Any, parts: list[str], tmp_path: Path) -> None:
    """No row is lost or computed twice, every error has a message, and the next run's output is right."""
    kernels.load()  # a run that has to compile them first may count as hanging
    place = MEMORY if "protocol" in parts and os.access(MEMORY, os.W_OK) else tmp_path
    words = [str(families("llama").directory), "--quick", "--only", *parts, "--out", str(tmp_path / "faults.jsonl")]
    code = "from bench.faults.__main__ import main; sys.exit(main(sys.argv[1:]))"
    with TemporaryDirectory(dir=place) as work:
        done = Forked(code, [*words, "--work", work], ROOT, tmp_path / "log")
        assert done.wait(600) == 0, done.said()
    records = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert {record["part"] for record in records} == set(parts)
    for record in records:
        assert record["tried"] == record["survived"] > 0
        assert record["lost"] == record["repeated"] == 0
    flipped = {record["kind"]: record["tried"] for record in records if record["part"] == "bits"}
    assert flipped == ({f"flipped bits: {kind}": bits for kind, bits in BITS.items()} if "bits" in parts else {})
