"""Hostile rows of every format are those that independent parsers find: none is lost or invented."""

import random
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
from bench.hostile.rows import MAKERS, Found, _differing, differences, write


def test_rows_of_every_format(tmp_path: Path) -> None:
    """python -m bench.hostile reads 100,000."""
    seen = set[str]()
    for name, count, faults in differences(seed=7, rows=60 * len(MAKERS), each=60, folder=tmp_path):
        assert (name, faults) == (name, [])
        assert count >= 30
        seen.add(name.split(".")[1])
    assert seen == set(MAKERS)


def test_a_difference_is_found(tmp_path: Path) -> None:
    content, expected = MAKERS["csv"](random.Random(1), 50)
    write(tmp_path / "t.csv", content, random.Random(1))
    assert _differing(tmp_path / "t.csv", expected) == []
    assert _differing(tmp_path / "t.csv", [*expected, Found("x", True)]) == ["50 rows, not 51"]
    assert "row 3: Found(" in _differing(tmp_path / "t.csv", [*expected[:3], Found("zzz", True), *expected[4:]])[0]
