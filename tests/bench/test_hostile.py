"""bench.hostile: a few hostile files within their memory, and 100,000 hostile rows."""

import json
from pathlib import Path

import pytest

from bench import limit

pytest.importorskip("pyarrow")
from bench.hostile.__main__ import main
from bench.hostile.files import FILES


def test_files_within_their_memory(tmp_path: Path) -> None:
    if reason := limit.why_not():
        pytest.skip(reason)
    names = ["lists.jsonl", "bomb.jsonl.zst", "lines.csv", "list.parquet", "views.arrow"]
    out = tmp_path / "out.jsonl"
    assert main(["--rows", "0", "--only", *names, "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["file"] for record in records] == names
    assert [record["rows"] for record in records] == [f.rows for name in names for f in FILES if f.name == name]


def test_a_hundred_thousand_rows() -> None:
    assert main(["--rows", "100000", "--seed", "3", "--only"]) == 0


def test_names_are_unique() -> None:
    assert len({hostile.name for hostile in FILES}) == len(FILES) >= 40
