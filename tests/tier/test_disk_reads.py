"""Long reads from disk: bytes that the page cache holds, and several threads."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.tier.disk import CHUNK, DiskTier
from flexengine.tier.ledger import Ledger
from tests.helpers.tiers import OneWay, some, uncached


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_the_page_cache_holds_is_not_read_from_the_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    """The bytes stay in the page cache, and such reads do not count as reads of the disk."""
    path, values = tmp_path / "x", some(CHUNK, torch.float16)
    path.write_bytes(values.numpy().tobytes())
    tier, noted = DiskTier("disk", Ledger("disk"), tmp_path), list[int]()
    tier.way.note = lambda nbytes, began, ended: noted.append(nbytes)  # type: ignore[method-assign]
    home = tier.checkpoint(path, 0, values.nbytes, values.dtype)
    counts = []
    for _ in range(3):
        if len(counts) == 2:
            uncached(path)
        tier.load(home, target := torch.zeros(len(values), dtype=dtype))
        assert torch.equal(target, values.to(dtype))
        counts.append(sum(noted))
    assert counts[:2] == [0, 0]
    assert counts[2]  # the kernel may keep some bytes
    tier.close()


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
    home = tier.checkpoint(uncached(path), 0, values.nbytes, torch.float32)
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    assert len(threads) == readers
    uncached(path)
    fault = Fault(("read",), 3, "EINTR", lasting=True)
    with Failing([tmp_path], fault) as calls, pytest.raises(OSError, match="reading byte"):
        tier.load(home, torch.zeros_like(values))
    assert calls.made < 16 + 3  # reads that ask the page cache count, too
    tier.load(home, target.zero_())
    assert torch.equal(target, values)
    tier.close()
