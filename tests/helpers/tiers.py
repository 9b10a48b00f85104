"""The conformance class of tiers, and what tests of tiers share."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine.errors import OutOfMemory, size
from flexengine.tier.base import ALIGN, Ledger, Region, Tier
from flexengine.tier.disk import DiskTier
from flexengine.tier.file import FasterWay
from flexengine.tier.memory import aligned_buffer
from flexengine.tier.throttled import Throttled

CAPACITY = 64 << 20
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


class OneWay(FasterWay):
    """FasterWay stub that keeps one mode, direct or cached."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct = direct

    def note(self, nbytes: int, began: float, ended: float) -> None:
        pass


def watch_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the bytes of each piece of a disk read that is copied from a buffer."""
    copied, deliver = list[int](), DiskTier._deliver

    def delivered(disk: DiskTier, read: Any, buffer: torch.Tensor, low: int, high: int) -> None:
        copied.append(high - low)
        deliver(disk, read, buffer, low, high)

    monkeypatch.setattr(DiskTier, "_deliver", delivered)
    return copied


def some(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count,), generator=generator, dtype=dtype)
    return torch.randn(count, generator=generator).to(dtype)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT, as tmpfs was for long."""
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)


class TierTests:
    """Tests that every tier must pass; a subclass makes the tier in `make`."""

    def make(self, folder: Path, ledger: Ledger) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Any:
        tier = self.make(tmp_path / "off", Ledger("toy", CAPACITY))
        yield tier
        tier.close()
        assert not list((tmp_path / "off").glob("*"))

    def put(self, tier: Tier, values: torch.Tensor, what: str = "x") -> Region:
        home = tier.allocate(values.nbytes, what, values.dtype)
        tier.store(values, home)
        return home

    def get(self, tier: Tier, home: Region, dtype: torch.dtype | None = None) -> torch.Tensor:
        target = torch.full((home.nbytes // home.dtype.itemsize,), 7, dtype=dtype or home.dtype)
        tier.load(home, target)
        return target

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("count", [1, 1000, 4096, 2_500_001])
    def test_round_trip(self, tier: Tier, dtype: torch.dtype, count: int) -> None:
        values = some(count, dtype)
        home = self.put(tier, values)
        assert home.nbytes == values.nbytes
        assert torch.equal(self.get(tier, home), values)

    def test_round_trip_through_aligned_and_shaped_buffers(self, tier: Tier) -> None:
        buffer = aligned_buffer(5 * ALIGN).view(torch.float32).view(5, -1)
        buffer.copy_(some(5 * ALIGN // 4).view(5, -1))
        home = self.put(tier, buffer)
        target = aligned_buffer(5 * ALIGN).view(torch.float32).view(5, -1)
        tier.load(home, target)
        assert torch.equal(target, buffer)

    @pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
    def test_load_converts(self, tier: Tier, stored: torch.dtype) -> None:
        values = some(3001, stored)
        assert torch.equal(self.get(tier, self.put(tier, values), torch.float32), values.float())

    def test_homes_are_apart(self, tier: Tier) -> None:
        values = [some(n, seed=n) for n in (1, 1024, 1025, 5000, 3)]
        homes = [self.put(tier, v, f"t{i}") for i, v in enumerate(values)]
        assert all(torch.equal(self.get(tier, h), v) for h, v in zip(homes, values, strict=True))
        tier.free(homes[1], "t1")
        tier.free(homes[3], "t3")
        values[1], values[3] = some(4500, seed=8), some(900, seed=9)
        homes[1], homes[3] = self.put(tier, values[1], "t1"), self.put(tier, values[3], "t3")
        assert all(torch.equal(self.get(tier, h), v) for h, v in zip(homes, values, strict=True))
        tier.free(homes[1], "t1")
        values[1] = some(1024, seed=10)  # room for four of these
        homes[1] = self.put(tier, values[1], "t1")
        values += [some(1024, seed=11), some(1024, seed=12)]
        homes += [self.put(tier, v, "t1") for v in values[-2:]]
        assert all(torch.equal(self.get(tier, h), v) for h, v in zip(homes, values, strict=True))

    def test_account(self, tier: Tier) -> None:
        one = tier.allocate(1, "one")
        assert tier.ledger.used == 4096
        two = tier.allocate(4097, "two")
        more = tier.allocate(4096, "two")
        assert tier.ledger.entries == {"one": 4096, "two": 8192 + 4096}
        tier.free(two, "two")
        tier.free(one, "one")
        assert tier.ledger.entries == {"two": 4096}
        tier.free(more, "two")
        assert (tier.ledger.used, tier.ledger.peak, tier.ledger.entries) == (0, 16384, {})

    def test_out_of_memory_says_how_much_and_books_nothing(self, tier: Tier) -> None:
        tier.allocate(10 * ALIGN, "weights")
        with pytest.raises(OutOfMemory, match=f"toy memory: cache needs {size(CAPACITY)}, but 41.0 kB of") as caught:
            tier.allocate(CAPACITY, "cache")
        error = caught.value
        assert (error.tier, error.what, error.needed, error.used, error.capacity) == \
            ("toy", "cache", CAPACITY, 40960, CAPACITY)  # fmt: skip
        assert tier.ledger.entries == {"weights": 40960}
        tier.allocate(CAPACITY - 40960, "cache")

    def test_parts(self, tier: Tier) -> None:
        """Any part can be loaded; a part of whole blocks can be stored, and its neighbours stay."""
        values = some(5 * 1024)
        home = self.put(tier, values)
        assert torch.equal(self.get(tier, home.part(1000, 7204)), values[250:2051])
        assert torch.equal(self.get(tier, home.part(2000, 9000).part(100, 8)), values[525:527])
        fresh = some(2048, seed=2)
        tier.store(fresh, home.part(4096, 8192))
        values[1024:3072] = fresh
        assert torch.equal(self.get(tier, home), values)

    @pytest.mark.parametrize(("start", "nbytes"), [(-4, 8), (0, 101), (100, 4), (96, 8)])
    def test_part_outside(self, tier: Tier, start: int, nbytes: int) -> None:
        with pytest.raises(ValueError, match="outside a region of 100"):
            tier.allocate(100, "x").part(start, nbytes)

    def test_load_all(self, tier: Tier) -> None:
        values = [some(n, torch.float16, n) for n in (700_000, 1, 2_500_000, 33, 1024)]
        homes = [self.put(tier, v) for v in values]
        before = tier.bytes_read
        targets = [torch.zeros(len(v)) for v in values]
        tier.load_all(list(zip(homes, targets, strict=True)))
        assert all(torch.equal(t, v.float()) for t, v in zip(targets, values, strict=True))
        assert tier.bytes_read - before == 2 * sum(map(len, values))
        tier.load_all([])

    @pytest.mark.parametrize("width", [2, 48, 256, 6000])
    def test_pick(self, tier: Tier, width: int) -> None:
        """Rows far apart, near and neighbouring, of a home and a part that begins anywhere; only they are counted."""
        values = some(7 << 20, torch.uint8)
        home = self.put(tier, values)
        for part, start in ((home, 0), (home.part(4321, 6 << 20), 4321)):
            many, before = part.nbytes // width, tier.bytes_read
            every = torch.arange(many)
            some_ = torch.rand(many, generator=torch.Generator().manual_seed(width)) < 0.02
            some_[many // 2 : many // 2 + min(30000, many // 3)] = True
            some_[[0, -1]] = True
            for rows in (every[some_], every[:0], every[-1:]):
                target = torch.full((len(rows), width), 7, dtype=torch.uint8)
                tier.pick(part, rows, width, target)
                assert torch.equal(target, values[start:][: many * width].view(-1, width)[rows])
            assert tier.bytes_read - before == width * (int(some_.sum()) + 1)

    def test_traffic_counts_the_home_s_own_bytes(self, tier: Tier) -> None:
        home = self.put(tier, some(1001, torch.float16))
        assert (tier.bytes_read, tier.bytes_written) == (0, 2002)
        self.get(tier, home, torch.float32)
        self.get(tier, home.part(0, 10))
        assert (tier.bytes_read, tier.bytes_written) == (2012, 2002)

    def test_many_threads(self, tier: Tier) -> None:
        values = [some(30_000 + i, seed=i) for i in range(12)]
        homes = [self.put(tier, v) for v in values]

        def work(i: int) -> bool:
            good = True
            for _ in range(5):
                good &= torch.equal(self.get(tier, homes[i]), values[i])
                values[i] = values[i] + 1
                tier.store(values[i], homes[i])
            return good

        before = tier.bytes_read
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(12)))
        assert tier.bytes_read - before == 5 * sum(v.nbytes for v in values)

    def test_view_shares_memory_or_is_refused(self, tier: Tier) -> None:
        values = some(2000)
        home = self.put(tier, values)
        inner = tier.inner if isinstance(tier, Throttled) else tier
        if isinstance(inner, DiskTier):
            with pytest.raises(TypeError, match="cannot be addressed"):
                tier.view(home)
            return
        assert torch.equal(tier.view(home), values)
        assert tier.view(home).data_ptr() % ALIGN == 0
        tier.view(home.part(40, 4)).fill_(3.5)
        assert self.get(tier, home)[10] == 3.5


class Cudart:
    """A CUDA runtime that locks mappings, at most `most` bytes of them."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, most: int = 1 << 40) -> None:
        self.most, self.locked = most, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        pages = set(range(address, address + nbytes, ALIGN))
        assert address % ALIGN == nbytes % ALIGN == flags == 0
        assert all(pages.isdisjoint(range(a, a + n, ALIGN)) for a, n in self.locked.items()), "locked already"
        if sum(self.locked.values()) + nbytes > self.most:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


def pattern(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)
