"""The bench of two GPUs for one layer: its arithmetic, and one job of one row."""

import re
from pathlib import Path

import pytest

from bench.plan.tensor import PCIE3, Case, run, scaled


def test_tables_are_scaled() -> None:
    assert scaled([[1, 2.0], [4, 3.0]], 2) == [[1, 4.0], [4, 6.0]]
    assert scaled(7, 0.5) == 3.5
    assert scaled(None, 2) is None


@pytest.mark.slow
def test_one_row_gains_by_tensor_parallel_only(tmp_path: Path) -> None:
    """At most twofold, as everything but the all-reduces is halved, and their seconds are those of the bytes."""
    row = run(tmp_path, Case("opt-1.3b", "t4-16gb_208gb_ssd", PCIE3, 512, 32, 1))
    stages, tensor = (float(x) for x in re.findall(r"\((\d+\.\d+)x\)", row))
    assert stages == 1.0
    assert 1.0 < tensor < 2.0
    sums = 544 * 24 * 2 * 2048 * 2  # tokens, layers, all-reduces, hidden size, bytes
    assert f"of which {sums / 1.2e10:.3g} s all-reduce" in row
