"""Tiers: one conformance class that each passes; ledger, limits, checkpoint homes, throttled links, machines."""

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.errors import BadCheckpoint, InvalidInput, OutOfMemory
from flexengine.reading import PAUSES
from flexengine.tier import cuda, disk, limits, machine
from flexengine.tier.base import ALIGN, Home, Tier
from flexengine.tier.cuda import CudaTier, PinnedTier
from flexengine.tier.disk import CHUNK, DiskTier
from flexengine.tier.file import FasterWay
from flexengine.tier.ledger import Ledger
from flexengine.tier.machine import Links, make_machine
from flexengine.tier.memory import MemoryTier, aligned_buffer
from flexengine.tier.wrap import Throttled

CAPACITY = 64 << 20
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


class OneWay(FasterWay):
    """Always the way it is told."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct = direct

    def note(self, nbytes: int, began: float, ended: float) -> None:
        pass


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
    """What every tier must do; a subclass says which tier in `make`."""

    def make(self, folder: Path, ledger: Ledger) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Any:
        tier = self.make(tmp_path / "off", Ledger("toy", CAPACITY))
        yield tier
        tier.close()
        assert not list((tmp_path / "off").glob("*"))

    def put(self, tier: Tier, values: torch.Tensor, what: str = "x") -> Home:
        home = tier.allocate(values.nbytes, what, values.dtype)
        tier.store(values, home)
        return home

    def get(self, tier: Tier, home: Home, dtype: torch.dtype | None = None) -> torch.Tensor:
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
        with pytest.raises(OutOfMemory, match=f"toy memory: cache needs {CAPACITY:,} bytes, but 40,960 of") as caught:
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


class TestMemory(TierTests):
    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return MemoryTier("toy", ledger)


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


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "_forget_error", lambda: None)
    return runtime


class TestPinned(TierTests):
    @pytest.fixture(autouse=True)
    def runtime(self, cudart: Cudart) -> Any:
        yield
        assert not cudart.locked  # `close` comes last

    def make(self, folder: Path, ledger: Ledger) -> Tier:
        return PinnedTier("toy", ledger)


@pytest.mark.parametrize("nbytes", [1, ALIGN, 3 * ALIGN + 5, (33 << 20) + 1])
def test_what_is_locked_is_what_is_booked(cudart: Cudart, nbytes: int) -> None:
    """To the byte, and no power of two."""
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


def test_memory_that_cannot_be_locked_is_used_as_it_is(cudart: Cudart, recwarn: pytest.WarningsRecorder) -> None:
    cudart.most = 4 * ALIGN
    tier = PinnedTier("host", Ledger("host", CAPACITY))
    homes = [tier.allocate(3 * ALIGN, f"layer {i}") for i in range(3)]
    assert list(cudart.locked.values()) == [3 * ALIGN]
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == 1  # once
    assert "(layer 1, 12,288 bytes: out of memory (2))" in said[0]
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
    with pytest.raises(OutOfMemory, match=r"host memory: KV cache needs 8,192 bytes, but the system has no more;"):
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


# Disk beyond the conformance class.


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = DiskTier("disk", Ledger("disk"), tmp_path / "file" / "off")
    with pytest.raises(InvalidInput, match=r"file/off.*--offload-dir"):
        tier.allocate(10, "KV cache")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bytes, a little over two chunks, of a length that is no multiple of anything."""
    path = tmp_path_factory.mktemp("shard") / "model.bin"
    path.write_bytes(np.random.default_rng(1).bytes(2 * CHUNK + 3 * ALIGN + 1237))
    return path


def pattern(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


@pytest.mark.parametrize("throttled", [False, True])
@pytest.mark.parametrize("direct", [True, False])
def test_checkpoint_homes_at_any_offset(shard: Path, tmp_path: Path, direct: bool, throttled: bool) -> None:
    size = shard.stat().st_size
    data = shard.read_bytes()
    disk = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct))
    tier = Throttled(disk, 1e10) if throttled else disk
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    spans = [(0, 16), (1, 1), (8 + 11, 1000), (4095, 2), (4096, 4096), (4097, 8190), (3, 2 * CHUNK), (CHUNK - 2, 4),
             (CHUNK - 5, CHUNK + 8), (size - 1236, 1236), (size - 5, 4), (size - 2 * CHUNK - 2, 2 * CHUNK)]  # fmt: skip
    read = 0
    for start, nbytes in spans:
        for dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32):
            if nbytes % dtype.itemsize:
                continue
            home = tier.checkpoint(shard, start, nbytes, dtype)
            target = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
            tier.load(home, target)
            whole = ints[dtype.itemsize]  # compared as bits: random floats hold NaNs
            assert torch.equal(target.view(whole), pattern(data[start : start + nbytes], whole)), (start, nbytes, dtype)
            read += nbytes
    assert tier.bytes_read == read
    assert tier.ledger.used == 0
    tier.close()


@pytest.mark.parametrize("direct", [True, False])
def test_checkpoint_converts_across_chunks(tmp_path: Path, direct: bool) -> None:
    values = some(CHUNK // 2 + 5001, torch.float16)  # over one chunk, and an odd start below
    path = tmp_path / "x.bin"
    path.write_bytes(b"\x01" * 37 + values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path / "off", OneWay(direct))
    home = tier.checkpoint(path, 37, values.nbytes, torch.float16)
    target = torch.zeros(len(values))
    tier.load(home, target)
    assert torch.equal(target, values.float())
    part = torch.zeros(4000, dtype=torch.float16)
    tier.load(home.part(CHUNK - 4000, 8000), part)
    assert torch.equal(part, values[CHUNK // 2 - 2000 :][:4000])
    tier.close()
    assert not (tmp_path / "off").exists()  # no spill file was needed


@pytest.mark.parametrize("direct", [True, False])
def test_checkpoint_faults(shard: Path, tmp_path: Path, direct: bool) -> None:
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct))
    size = shard.stat().st_size
    with pytest.raises(BadCheckpoint, match=rf"truncated: bytes up to {size + 1:,} are needed, it has {size:,}"):
        tier.checkpoint(shard, size - 3, 4, torch.float32)
    with pytest.raises(BadCheckpoint, match="gone"):
        tier.checkpoint(tmp_path / "gone", 0, 4, torch.float32)
    before = shard.read_bytes()[:4096]
    with pytest.raises(ValueError, match="never written"):
        tier.store(torch.zeros(1024), tier.checkpoint(shard, 0, 4096, torch.float32))
    assert shard.read_bytes()[:4096] == before
    shrinking = tmp_path / "shrinking"
    shrinking.write_bytes(b"x" * 20_000)
    home = tier.checkpoint(shrinking, 10, 16_000, torch.uint8)
    os.truncate(shrinking, 9_000)
    with pytest.raises(BadCheckpoint, match=r"shrinking: the file ended 7,010 bytes early"):
        tier.load(home, torch.zeros(16_000, dtype=torch.uint8))
    tier.close()


def test_throttled_memory_has_no_checkpoints(shard: Path) -> None:
    with pytest.raises(TypeError, match="host is not a disk"):
        Throttled(MemoryTier("host", Ledger("host"))).checkpoint(shard, 0, 4, torch.float32)


def learned(rates: dict[bool, float], turns: int, computing: float = 0.0) -> list[bool]:
    """The way of each turn when reads take the time of these rates (bytes/s, by direct). computing: seconds in which
    the bytes of a turn are used; the next read waits for that."""
    way, used, now, free = FasterWay(), list[bool](), 0.0, 0.0
    for _ in range(turns):
        used.append(way.direct)
        for _ in range(FasterWay.TURN // CHUNK):
            assert way.direct is used[-1]
            now, began = now + CHUNK / rates[way.direct], now
            way.note(CHUNK, began, now)
            free = max(now, free + computing * CHUNK / FasterWay.TURN)
            now = max(now, free)
    return used


@pytest.mark.parametrize("best", [True, False])
def test_the_faster_way_is_learned_and_reviewed(best: bool) -> None:
    used = learned({best: 2e9, not best: 1e9}, 64)
    assert used[:6].count(best) == 3
    assert used[6:].count(not best) == 3  # the turns after the 16th, 32nd and 48th
    assert used[-10:] == [best] * 10


def test_reads_that_nobody_waits_for_are_direct() -> None:
    """Where computing takes longer than direct reads do, cached ones are not even tried."""
    direct = FasterWay.TURN / 1e9  # seconds of a turn
    assert all(learned({True: 1e9, False: 2e9}, 40, computing=1.5 * direct))
    used = learned({True: 1e9, False: 2e9}, 40, computing=1.1 * direct)  # nearly as long as reading
    assert used[:6].count(False) == 3
    assert used[6:].count(True) == 2  # the reviews; cached reads leave the reader idle half of the time


def test_reads_turn_direct_when_computing_takes_longer() -> None:
    way, now = FasterWay(), 0.0
    for step in range(40 * (FasterWay.TURN // CHUNK)):
        late = step >= 20 * (FasterWay.TURN // CHUNK)
        assert step != 20 * (FasterWay.TURN // CHUNK) or not way.direct
        ended = now + CHUNK / (1e9 if way.direct else 2e9)
        way.note(CHUNK, now, ended)
        now = ended + late * 0.01
    assert way.direct


def test_the_way_changes_with_the_disk() -> None:
    way, now = FasterWay(), 0.0
    rates = {True: 1e9, False: 2e9}
    for step in range(200 * (FasterWay.TURN // CHUNK)):
        if step == 40 * (FasterWay.TURN // CHUNK):
            assert not way.direct
            rates = {True: 2e9, False: 0.5e9}
        now, began = now + CHUNK / rates[way.direct], now
        way.note(CHUNK, began, now)
    assert way.direct


def test_both_ways_are_used_for_a_long_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FasterWay, "TURN", 2 * CHUNK)
    monkeypatch.setattr(FasterWay, "BUSY", 0.0)
    path, values = tmp_path / "x", some(9 * CHUNK // 4)
    path.write_bytes(values.numpy().tobytes())
    tier, seen = DiskTier("disk", Ledger("disk"), tmp_path), set()
    real = tier.way.note

    def note(nbytes: int, began: float, ended: float) -> None:
        seen.add(tier.way.direct)
        real(nbytes, began, ended)

    monkeypatch.setattr(tier.way, "note", note)
    for _ in range(3):
        target = torch.zeros(len(values))
        tier.load(tier.checkpoint(path, 0, values.nbytes, torch.float32), target)
        assert torch.equal(target, values)
    assert seen == {True, False}
    tier.close()


def test_a_throttled_tier_owes_what_is_too_short_to_sleep() -> None:
    """A hundred transfers of 0.05 ms that come one every 0.1 ms, and those at once, take their time in all."""
    tier = Throttled(MemoryTier("host", Ledger("host")), read_rate=2e6)
    home, buffer = tier.allocate(100, "x"), torch.zeros(100, dtype=torch.uint8)
    for gap in (0.0, 1e-4):
        began = now = time.perf_counter()
        for _ in range(100):
            tier.load(home, buffer)
            now = max(now, time.perf_counter()) + gap
            while time.perf_counter() < now:
                pass
        assert time.perf_counter() - began >= 100 * (5e-5 + gap) - 2e-4


def test_throttled_takes_the_time_of_the_link() -> None:
    """Transfers of one direction queue; the other direction has a link of its own."""
    tier = Throttled(MemoryTier("host", Ledger("host")), read_rate=2e6, write_rate=4e6)
    home = tier.allocate(100_000, "x")
    began = time.perf_counter()
    buffers = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(4)]
    threads = [threading.Thread(target=tier.load, args=(home, buffer)) for buffer in buffers[:3]]
    threads.append(threading.Thread(target=tier.store, args=(buffers[3], home)))
    for thread in threads:
        thread.start()
    threads[-1].join()
    written = time.perf_counter() - began
    for thread in threads:
        thread.join()
    read = time.perf_counter() - began
    assert read >= 0.15  # three loads, one after the other; a busy machine may add to it
    assert 0.025 <= written < read  # the store is the last to start, and waits for no load


# Ledger.


def test_ledger() -> None:
    ledger = Ledger("host", 100)
    ledger.reserve(60, "a")
    ledger.reserve(40, "b")
    with pytest.raises(OutOfMemory) as caught:
        ledger.reserve(1, "c")
    assert str(caught.value) == "host memory: c needs 1 bytes, but 100 of 100 bytes are taken (1 too many)"
    ledger.release(20, "a")
    assert (ledger.used, ledger.peak, ledger.entries) == (80, 100, {"a": 40, "b": 40})
    for what, nbytes in (("a", 41), ("nobody", 1)):
        with pytest.raises(ValueError, match=f"host: {what} releases {nbytes}"):
            ledger.release(nbytes, what)
    ledger.release(40, "a")
    ledger.release(40, "b")
    ledger.reserve(10, "c")
    assert (ledger.used, ledger.peak, ledger.entries) == (10, 100, {"c": 10})
    ledger.restart_peak()
    assert (ledger.used, ledger.peak) == (10, 10)


def test_ledger_from_many_threads() -> None:
    ledger = Ledger("host", 10_000)
    refused: list[int] = []

    def work(i: int) -> None:
        for _ in range(500):
            try:
                ledger.reserve(1000 + i, f"t{i % 3}")
            except OutOfMemory:
                refused.append(i)
                continue
            assert ledger.used <= 10_000
            ledger.release(1000 + i, f"t{i % 3}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert (ledger.used, ledger.entries) == (0, {})
    assert ledger.peak <= 10_000


# Limits.


def group(folder: Path, version: int, limit: str, used: int, cache: int) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             2: ("memory.max", "memory.current", "inactive_file")}[version]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nactive_file 9\n")


def root_of(tmp_path: Path, lines: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    return tmp_path


def test_cgroup_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of(tmp_path, "0::/user.slice/job\n")
    base = root / "sys/fs/cgroup"
    group(base / "user.slice/job", 2, "max", 500, 0)
    group(base / "user.slice", 2, "4000", 1500, 300)
    group(base / "other", 2, "10", 5, 0)
    assert limits.cgroup_memory(root) == [(4000, 1200)]
    group(base / "user.slice/job", 2, "3000", 900, 1000)  # more cache than use is no debt
    assert limits.cgroup_memory(root) == [(3000, 0), (4000, 1200)]
    for free, usable in ((10**6, 2800), (700, 700)):
        monkeypatch.setattr(limits.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert limits.usable_memory(root) == usable
    for ram, total in ((10**6, 3000), (700, 700)):
        monkeypatch.setattr(limits.psutil, "virtual_memory", lambda ram=ram: SimpleNamespace(total=ram))
        assert limits.total_memory(root) == total


def test_cgroup_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of(tmp_path, "12:cpu,cpuacct:/job\n9:memory:/docker/job\n1:name=systemd:/init\n0::/docker/job\n")
    base = root / "sys/fs/cgroup/memory"
    group(base / "docker/job", 1, "9000", 2500, 500)
    group(base / "docker", 1, str(2**63 - 4096), 1, 0)
    group(base, 1, "8000", 100, 0)
    group(base.parent, 1, "7", 7, 0)  # outside the hierarchy
    assert limits.cgroup_memory(root) == [(9000, 2000), (8000, 100)]
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9))
    assert limits.usable_memory(root) == 7000


def test_cgroup_seen_from_inside_a_container(tmp_path: Path) -> None:
    """/proc names the path outside; what is mounted is the container's own group."""
    root = root_of(tmp_path, "4:memory:/docker/0123abc\n")
    group(root / "sys/fs/cgroup/memory", 1, "5000", 1000, 0)
    assert limits.cgroup_memory(root) == [(5000, 1000)]


def test_no_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.cgroup_memory(tmp_path) == []
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=12345))
    assert limits.usable_memory(tmp_path) == 12345
    root = root_of(tmp_path, "0::/x\n")
    (root / "sys/fs/cgroup/x").mkdir(parents=True)
    (root / "sys/fs/cgroup/x/memory.max").write_text("100\n")  # no memory.current beside it
    assert limits.cgroup_memory(root) == []


@pytest.mark.parametrize("kind", ["cpu", "sim"])
@pytest.mark.parametrize(("given", "ram", "disk"), [(None, 8050, 1150), (4000, 4000, 5200), (9199, 9199, 8.192)])
def test_an_offload_directory_in_ram_takes_from_the_same_memory(
    kind: str, given: int | None, ram: int, disk: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job would be killed by what it thinks lies on a disk. Sizes in thousands of bytes."""
    mounts = [SimpleNamespace(fstype="tmpfs", mountpoint=str(tmp_path / place)) for place in ("not there", ".")]
    given = given and 1000 * given
    monkeypatch.setattr(machine, "usable_memory", lambda: 10_000_000)
    for there in (mounts, mounts[:1]):
        monkeypatch.setattr(limits.psutil, "disk_partitions", lambda all, there=there: there)
        made = make_machine(kind, given, None, tmp_path / "not" / "yet")
        disk_bytes = made.capacity.disk
        assert disk_bytes == made.disk.ledger.capacity
        assert disk_bytes == 1000 * disk if there is mounts else disk_bytes > 10_000_000
        if kind == "cpu":
            assert made.capacity.device == (1000 * ram if there is mounts else given or 9_200_000)
        made.close()


def test_usable_disk_of_a_folder_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def usage(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(free=4321)

    monkeypatch.setattr(limits.shutil, "disk_usage", usage)
    assert limits.usable_disk(tmp_path / "a" / "b") == 4321
    assert asked == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == []


# Machines.


_FREED = """
import torch
from flexengine.tier.memory import give_back_freed, keep_freed
def anonymous(): return int(open("/proc/self/smaps_rollup").read().split("Anonymous:")[1].split()[0]) * 1024
keep_freed(room=False)
torch.ones(100)
give_back_freed()  # what importing left: some blocks below may lie in it
before = anonymous()
short = [torch.ones(6 << 10) for _ in range(200)]  # of 24 KiB: in the heap, its gaps first
blocks = [torch.ones(24 << 10) for _ in range(1000)]  # of 96 KiB
short += [torch.ones(6 << 10) for _ in range(20)]
held = anonymous() - before
del blocks
print(held, anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_with_little_room_freed_blocks_leave_the_process_whatever_was_made_after_them() -> None:
    """In the heap they stayed below a block that was made later and kept: a job took 1.13 of its memory."""
    found = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True)
    assert not found.stderr
    held, kept = map(int, found.stdout.split())
    assert held > 90_000_000
    assert kept < 10_000_000


@pytest.mark.parametrize(
    ("kind", "host", "links", "message"),
    [
        ("tpu", None, None, "device is 'tpu'; it must be one of auto, cpu, cuda, sim"),
        ("cpu", 1 << 20, None, "host memory cannot be set for device 'cpu'.*use --device-mem"),
        ("cpu", None, Links(h2d=1.0), "link rates can be set for device 'sim' only, not 'cpu'"),
        ("cuda", None, None, "torch sees no CUDA GPU; use --device cpu"),
    ],
)
def test_machine_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, host: int | None, links: Links | None, message: str
) -> None:
    monkeypatch.setattr(machine.cuda, "available", lambda: False)
    with pytest.raises(InvalidInput, match=message):
        make_machine(kind, None, host, tmp_path, links)


@pytest.mark.parametrize(
    ("kind", "device", "host", "message"),
    [
        ("cpu", 101, None, "--device-mem: 101 bytes are given, but the machine, or the cgroup .* has 100;"),
        ("sim", 101, None, "--device-mem: 101 bytes are given, but the machine, or the cgroup .* has 100;"),
        ("sim", None, 101, "--host-mem: 101 bytes are given, but the machine, or the cgroup .* has 100;"),
        ("sim", 60, 41, "--device-mem and --host-mem together: 101 bytes are given"),
        ("cuda", 51, None, "--device-mem: 51 bytes are given, but the GPU has 50;"),
        ("cuda", 50, 101, "--host-mem: 101 bytes are given, but the machine, or the cgroup .* has 100;"),
    ],
)
def test_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, device: int | None, host: int | None, message: str
) -> None:
    """Else a plan counts on it, and the system kills the job half-way."""
    monkeypatch.setattr(machine, "total_memory", lambda: 100)
    monkeypatch.setattr(machine.cuda, "available", lambda: True)
    monkeypatch.setattr(machine.cuda, "total_memory", lambda: 50)
    with pytest.raises(InvalidInput, match=message):
        make_machine(kind, device, host, tmp_path)


def test_cpu_machine_is_one_memory(tmp_path: Path) -> None:
    made = make_machine("cpu", 10 * ALIGN, None, tmp_path)
    made.device.allocate(6 * ALIGN, "weights")
    with pytest.raises(OutOfMemory):
        made.host.allocate(5 * ALIGN, "cache")
    assert made.capacity.shared
    assert not made.capacity.staged
    made.close()


def test_sim_machine_is_three(tmp_path: Path) -> None:
    made = make_machine("sim", 10 * ALIGN, 5 * ALIGN, tmp_path, Links(h2d=1e9, disk_write=1e9))
    assert (made.capacity.device, made.capacity.host, made.capacity.staged) == (10 * ALIGN, 5 * ALIGN, True)
    made.device.allocate(10 * ALIGN, "weights")
    home = made.host.allocate(5 * ALIGN, "weights")
    spilled = made.disk.allocate(300, "cache")
    made.host.load(home, torch.zeros(5 * ALIGN, dtype=torch.uint8))
    made.disk.store(torch.zeros(300, dtype=torch.uint8), spilled)
    assert made.traffic() == {"disk_read": 0, "disk_write": 300, "h2d": 5 * ALIGN, "d2h": 0}
    made.close()


# Faults of the disk.


def test_direct_io_that_opens_but_fails(shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some FUSE and network file systems take O_DIRECT at open and refuse the transfers."""
    direct: set[int] = set()
    opened, read, write = os.open, os.preadv, os.pwritev

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        fd = opened(path, flags, *rest, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def refusing(real: Any) -> Any:
        def call(fd: int, *rest: Any) -> int:
            if fd in direct:
                raise OSError(errno.EINVAL, "misaligned")
            return real(fd, *rest)

        return call

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", refusing(read))
    monkeypatch.setattr(os, "pwritev", refusing(write))
    tier = DiskTier("disk", Ledger("disk"), tmp_path / "off", OneWay(True))
    values = some(300_000)
    home = tier.allocate(values.nbytes, "KV cache", torch.float32)
    tier.store(values, home)
    back = torch.zeros_like(values)
    tier.load(home, back)
    assert torch.equal(back, values)
    whole = torch.zeros(2 * CHUNK, dtype=torch.uint8)
    tier.load(tier.checkpoint(shard, 100, len(whole), torch.uint8), whole)
    assert whole.numpy().tobytes() == shard.read_bytes()[100 : 100 + len(whole)]
    assert direct
    tier.close()


def test_a_failed_read_leaves_nothing_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions begun before the error have ended when it is raised, and the buffers serve the next read."""
    values = some(5 * CHUNK // 4)
    path = tmp_path / "x"
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(False))
    real, calls, converting = tier._read, [], []

    def read(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.EIO, "bad sector")
        real(*args)

    def convert(*args: Any) -> None:
        converting.append(1)
        time.sleep(0.05)
        args[1].copy_(args[0])
        converting.pop()

    monkeypatch.setattr(tier, "_read", read)
    monkeypatch.setattr(disk, "load_kernels", lambda: SimpleNamespace(convert=convert))
    home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    with pytest.raises(OSError, match="bad sector"):
        tier.load(home, torch.zeros(len(values)))
    assert not converting
    target = torch.zeros(len(values))
    tier.load(home, target)
    assert torch.equal(target, values)
    tier.close()


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_read_that_fails_is_tried_again(offloaded: bool, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Whichever read it is; one that goes on failing ends in an error that names file and byte."""
    monkeypatch.setattr("flexengine.reading.PAUSES", [0.0] * len(PAUSES))
    values = some(5 * CHUNK // 4)
    path = tmp_path / "x"
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(False))
    home = tier.allocate(values.nbytes, "KV cache", torch.float32)
    tier.store(values, home)
    if not offloaded:
        home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    with Failing([tmp_path], Fault(("read",))) as calls:
        tier.load(home, torch.zeros_like(values))
    assert calls.made == 5
    for number in range(1, 6):
        target = torch.zeros_like(values)
        with Failing([tmp_path], Fault(("read",), number)) as calls:
            tier.load(home, target)
        assert calls.struck
        assert torch.equal(target, values)
    assert len(caplog.records) == 5
    with Failing([tmp_path], Fault(("read",), 3, lasting=True)) as calls, pytest.raises(OSError) as caught:  # noqa: PT011
        tier.load(home, torch.zeros_like(values))
    assert calls.made == 3 + len(PAUSES)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(home.place.path)
    assert f"{len(PAUSES) + 1} times, reading byte {2 * CHUNK:,}" in str(caught.value)
    with Failing([tmp_path], Fault(("read",), 1, "EINTR")), pytest.raises(OSError, match="reading byte 0"):
        tier.load(home, torch.zeros_like(values))
    tier.load(home, target.zero_())
    assert torch.equal(target, values)
    tier.close()


@pytest.mark.parametrize("nameless", [True, False])
def test_a_spill_file_has_no_name(nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody has to remove it; also on file systems that cannot make one without a name."""
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not nameless:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    values = some(1000)
    with Failing([tmp_path], Fault(("unlink",))) as calls:
        home = tier.allocate(values.nbytes, "KV cache", torch.float32)
        tier.store(values, home)
        assert not list(tmp_path.iterdir())
        tier.load(home, target := torch.zeros_like(values))
        tier.close()
    assert torch.equal(target, values)
    assert bool(calls.made) is not nameless


def test_a_write_that_fails_names_file_and_byte(tmp_path: Path) -> None:
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    home = tier.allocate(4 * CHUNK, "KV cache", torch.float32)
    with Failing([tmp_path], Fault(("write",), 2, lasting=True)), pytest.raises(OSError, match="byte 0") as caught:
        tier.store(some(CHUNK), home) or tier.store(some(CHUNK), home)
    assert caught.value.filename == str(home.place.path)
    tier.close()


def test_pages_are_written_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes are under way at once; all bytes arrive, and are counted once."""
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    home = tier.allocate(8 * 4096, "KV cache", torch.float32)
    values, meeting, real = some(8 * 1024), threading.Barrier(2), os.pwritev

    def meet(*args: Any) -> int:
        meeting.wait(30)  # for the other write
        return real(*args)

    monkeypatch.setattr(os, "pwritev", meet)
    tier.store_all([(values[i * 1024 : (i + 1) * 1024], home.part(i * 4096, 4096)) for i in range(8)])
    assert tier.bytes_written == values.nbytes
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    tier.close()


def test_all_writes_have_ended_before_one_that_failed_is_told_of(tmp_path: Path) -> None:
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    home = tier.allocate(8 * 4096, "KV cache", torch.float32)
    values = some(8 * 1024)
    pairs = [(values[i * 1024 : (i + 1) * 1024], home.part(i * 4096, 4096)) for i in range(8)]
    with Failing([tmp_path], Fault(("write",), 3)) as calls, pytest.raises(OSError, match="writing"):
        tier.store_all(pairs)
    assert calls.made == 8
    tier.store_all(pairs)
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    tier.close()


def test_only_reads_that_had_a_choice_are_noted(tmp_path: Path) -> None:
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    noted: list[int] = []
    tier.way.note = lambda nbytes, began, ended: noted.append(nbytes)  # type: ignore[method-assign]
    values = some(CHUNK)
    home = tier.allocate(values.nbytes, "KV cache", torch.float32)
    tier.store(values, home)
    tier.load(home, torch.zeros_like(values))
    assert noted == []
    tier.close()
