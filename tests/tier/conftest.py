"""Fixtures of the tests of tiers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flexengine.tier import cuda
from flexengine.tier.base import ALIGN
from flexengine.tier.disk import CHUNK
from tests.helpers.tiers import Cudart


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "_forget_error", lambda: None)
    return runtime


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bytes, a little over two chunks, of a length that is no multiple of anything."""
    path = tmp_path_factory.mktemp("shard") / "model.bin"
    path.write_bytes(np.random.default_rng(1).bytes(2 * CHUNK + 3 * ALIGN + 1237))
    return path
