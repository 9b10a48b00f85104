"""The bench of GGUF's block types, in small: its record, and the table that is made of it."""

import json
from pathlib import Path

import pytest
import torch

from bench.kernels import blocks
from bench.report.blocks import formats_block


def test_a_record_becomes_a_table(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    options = ["--kinds", "int4", "q4_k", "--computes", "fp32", "--rows", "1", "3", "--shape", "32", "256"]
    try:
        blocks.main([*options, "--rounds", "1", "--out", str(tmp_path / "formats.jsonl")])
    finally:
        torch.set_num_threads(threads)
    record = json.loads((tmp_path / "formats.jsonl").read_text())
    assert {*record["rates"]} == {"fp32, 1 rows", "fp32, 3 rows"}
    assert all(rate > 0 for rates in record["rates"].values() for rate in rates.values())
    assert "| `q4_k` |" in formats_block(tmp_path)
    assert formats_block(tmp_path / "none") == "Not recorded yet."


def test_an_unknown_compute_is_refused() -> None:
    with pytest.raises(SystemExit):
        blocks.main(["--computes", "fp8"])
