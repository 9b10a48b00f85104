"""Tokens of layers with each kind of part that native kernels compute equal those of transformers over the policy
grid."""

from typing import Any

import pytest

from flexengine import Engine, Policy
from tests.e2e.test_exactness import GREEDY, GRID
from tests.helpers.families import KINDS, LENGTHS

# Each kind meets a third of the grid; each third puts weights and cache on every tier.
CASES = [(case, kind) for j, kind in enumerate(KINDS) for case in range(len(GRID)) if case % 3 == j % 3]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), CASES)
def test_grid(families: Any, tmp_path: Any, kind: str, case: int) -> None:
    known = families(kind)
    fields, overlap = GRID[case]
    with Engine(
        known.directory, policy=Policy(**fields), device="sim", overlap=overlap, offload_dir=tmp_path
    ) as engine:
        results = engine.generate(known.rows, GREEDY)
        assert not engine.core.skeleton.as_modules
    assert [result.error for result in results] == [None] * len(LENGTHS)
    assert [result.token_ids for result in results] == known.expected


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", KINDS)
def test_cpu(families: Any, kind: str) -> None:
    """All in memory, in large gpu_batches: whole layers are one call."""
    known = families(kind)
    with Engine(known.directory, device="cpu", device_mem="256M") as engine:
        results = engine.generate(known.rows, GREEDY)
    assert [result.token_ids for result in results] == known.expected
