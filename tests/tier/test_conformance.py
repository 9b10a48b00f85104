"""Every tier passes one conformance class: memory, pinned memory, disk, and throttled ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.errors import OutOfMemory
from flexengine.tier import cuda
from flexengine.tier.base import ALIGN, Ledger, Tier
from flexengine.tier.cuda import CudaTier, PinnedTier
from flexengine.tier.disk import DiskTier
from flexengine.tier.memory import MemoryTier
from flexengine.tier.throttled import Throttled
from tests.helpers.listening import listening
from tests.helpers.tiers import CAPACITY, Cudart, TierTests, refuse_direct, some


class TestMemory(TierTests):
    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return MemoryTier("toy", ledger)


class TestPinned(TierTests):
    @pytest.fixture(autouse=True)
    def runtime(self, cudart: Cudart) -> Any:
        yield
        assert not cudart.locked  # `close` comes last

    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return PinnedTier("toy", ledger)


@pytest.mark.parametrize("nbytes", [1, ALIGN, 3 * ALIGN + 5, (33 << 20) + 1])
def test_what_is_locked_is_what_is_booked(cudart: Cudart, nbytes: int) -> None:
    """Locked bytes equal booked bytes, and are no power of two."""
    ledger = Ledger("host", CAPACITY)
    tier = PinnedTier("host", ledger)
    home = tier.allocate(nbytes, "weights")
    assert sum(cudart.locked.values()) == ledger.used == -(-nbytes // ALIGN) * ALIGN
    assert cudart.locked == {tier.view(home).data_ptr(): ledger.used}
    tier.free(home, "weights")
    assert ledger.used == sum(cudart.locked.values()) == 0


def test_nothing_is_locked_for_nothing(cudart: Cudart) -> None:
    tier = PinnedTier("host", Ledger("host", CAPACITY))
    tier.free(tier.allocate(0, "KV cache"), "KV cache")
    assert not cudart.locked


def test_memory_that_cannot_be_locked_is_used_as_it_is(cudart: Cudart) -> None:
    cudart.most = 4 * ALIGN
    tier = PinnedTier("host", Ledger("host", CAPACITY))
    with listening() as heard:
        homes = [tier.allocate(3 * ALIGN, f"layer {i}") for i in range(3)]
    assert list(cudart.locked.values()) == [3 * ALIGN]
    said = heard.messages
    assert len(said) == 1  # once
    assert "(layer 1, 12.3 kB: out of memory (2))" in said[0]
    assert "ulimit -l" in said[0]
    values = some(3 * ALIGN, torch.uint8)
    tier.store(values, homes[2])
    assert torch.equal(tier.view(homes[2]), values)
    for i, home in enumerate(homes):
        tier.free(home, f"layer {i}")
    assert not cudart.locked


def test_ram_that_is_not_there_is_the_host_s_shortage(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart.most = 0
    monkeypatch.setattr(cuda, "usable_memory", lambda: ALIGN)
    ledger = Ledger("host", CAPACITY)
    with pytest.raises(OutOfMemory, match=r"host memory: KV cache needs 8.19 kB, but the system has no more;"):
        PinnedTier("host", ledger).allocate(2 * ALIGN, "KV cache")
    assert (ledger.used, ledger.entries) == (0, {})


@pytest.mark.parametrize("kind", ["memory", "gpu"])
def test_what_the_system_refuses_is_not_booked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    ledger = Ledger("device", CAPACITY)
    tier = MemoryTier("device", ledger) if kind == "memory" else CudaTier("device", ledger)
    with pytest.raises(RuntimeError):
        tier.allocate(ALIGN, "weights")
    assert (ledger.used, ledger.entries) == (0, {})


def test_elements_are_converted_on_the_gpu_a_piece_at_a_time(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch brings a tensor there as a whole before it converts it."""
    copied = list[int]()
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        copied.append(source.nbytes)
        return copy(target, source)

    tier = PinnedTier("host", Ledger("host", CAPACITY))
    values = some(6 << 20)
    home = tier.allocate(values.nbytes, "weights", values.dtype)
    tier.store(values, home)
    targets = [torch.empty(len(values), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    before = tier.bytes_read
    for target in targets:
        tier.load(home, target)
    assert copied == [cuda.CONVERTED, values.nbytes - cuda.CONVERTED, values.nbytes]
    assert tier.bytes_read - before == 2 * values.nbytes
    assert torch.equal(targets[0], values.bfloat16())
    assert torch.equal(targets[1], values)


class TestDisk(TierTests):
    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return DiskTier("toy", ledger, folder)

    def test_nothing_is_ever_visible(self, tier: DiskTier) -> None:
        self.put(tier, some(100_000))
        assert list(tier.directory.iterdir()) == []


class TestDiskWithoutDirect(TestDisk):
    @pytest.fixture(autouse=True)
    def plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse_direct(monkeypatch)


class TestThrottledMemory(TierTests):
    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return Throttled(MemoryTier("toy", ledger), 5e9, 5e9)


class TestThrottledDisk(TierTests):
    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return Throttled(DiskTier("toy", ledger, folder), 5e9, None)
