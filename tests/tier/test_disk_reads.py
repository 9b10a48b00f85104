"""Long reads from disk by several threads."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.tier.disk import CHUNK, DiskTier
from flexengine.tier.ledger import Ledger
from tests.helpers.tiers import OneWay, some


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_several_threads_read_and_an_error_ends_all(readers: int, direct: bool, tmp_path: Path) -> None:
    path, values = tmp_path / "x", some(4 * CHUNK)
    path.write_bytes(values.numpy().tobytes())
    tier, threads = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct), readers), set[str]()
    fill = tier._fill

    def filled(*how: Any, **more: Any) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.01)
        fill(*how, **more)

    tier._fill = filled  # type: ignore[method-assign]
    home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    assert len(threads) == readers
    fault = Fault(("read",), 3, "EINTR", lasting=True)
    with Failing([tmp_path], fault) as calls, pytest.raises(OSError, match="reading byte"):
        tier.load(home, torch.zeros_like(values))
    assert calls.made < 16  # chunks
    tier.load(home, target.zero_())
    assert torch.equal(target, values)
    tier.close()
