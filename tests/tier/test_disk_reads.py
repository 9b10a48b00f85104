"""Long reads from disk: several threads, and which bytes pass through a buffer."""

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.tier.base import ALIGN, Ledger
from flexengine.tier.disk import DiskTier
from flexengine.tier.disk_reads import CHUNK
from flexengine.tier.file import File, read_fully
from flexengine.tier.memory import mapped
from tests.helpers.patience import PATIENCE
from tests.helpers.tiers import OneWay, some, watch_buffers


def watched_fills(tier: DiskTier, threads: int, pause: Sequence[float] = (0.01,)) -> list[tuple[str, bool]]:
    """Return a list that receives, of each read, the name of the thread and whether the read is direct. No thread reads
    a second time before so many have begun to read. pause: its only item is the seconds before a read."""
    fills, fill, together, met = list[tuple[str, bool]](), tier._read, threading.Barrier(threads), set[str]()

    def filled(file: Any, targets: Any, low: int, needed: int, direct: bool) -> bool:
        fills.append((name := threading.current_thread().name, direct))
        if len(met) < threads and name not in met:
            met.add(name)
            together.wait(PATIENCE)
        time.sleep(pause[0])
        return fill(file, targets, low, needed, direct)

    tier._read = filled  # type: ignore[method-assign]
    return fills


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_several_threads_read_and_an_error_ends_all(readers: int, direct: bool, tmp_path: Path) -> None:
    path, values = tmp_path / "x", some(4 * CHUNK)
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct), readers)
    fills, real = watched_fills(tier, readers, pause := [0.01]), tier._read
    home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    assert len({name for name, _ in fills}) == readers

    def failing(*args: Any) -> None:
        try:
            real(*args)
        except OSError:
            pause[0] = 1.0  # other threads read on until this one has told of its error
            raise

    tier._read = failing  # type: ignore[method-assign]
    fault = Fault(("read",), 3, "EINTR")
    with Failing([tmp_path], fault) as calls, pytest.raises(OSError, match="reading byte"):
        tier.load(home, torch.zeros_like(values))
    assert calls.made < 16  # chunks
    pause[0] = 0.0
    tier.load(home, target.zero_())
    assert torch.equal(target, values)
    tier.close()


@pytest.mark.parametrize(("cores", "direct", "threads"), [
    (1, True, 2), (2, False, 1), (2, True, 2), (8, False, 2), (8, True, 2), (12, False, 3), (12, True, 3),
])  # fmt: skip
def test_threads_that_read(
    cores: int, direct: bool, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of cores. Two direct reads are under way on any machine."""
    monkeypatch.setattr("flexengine.tier.disk.usable_cores", lambda: cores)
    path, values = tmp_path / "x", some(4 * CHUNK)
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct))
    fills = watched_fills(tier, threads)
    home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    if direct and home.place.direct is None:
        pytest.skip("no direct I/O here")
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    assert len({name for name, _ in fills}) == threads
    tier.close()


def test_one_thread_goes_on_if_reads_become_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.tier.disk.usable_cores", lambda: 2)
    path, values = tmp_path / "x", some(8 * CHUNK)
    path.write_bytes(values.numpy().tobytes())
    way = OneWay(True)
    tier = DiskTier("disk", Ledger("disk"), tmp_path, way)
    fills = watched_fills(tier, 2)
    way.note = lambda *_: setattr(way, "direct", len(fills) < 4)  # type: ignore[method-assign]
    home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    if home.place.direct is None:
        pytest.skip("no direct I/O here")
    home.place.uncached = True  # it was written just now
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    assert len({name for name, direct in fills if direct}) == 2
    cached = [name for name, direct in fills if not direct]
    assert len(cached) >= 4
    assert sum(name != threading.current_thread().name for name in cached) <= 1
    tier.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_few_converted_bytes_do_not_make_the_rest_of_a_cached_read_pass_through_a_buffer(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with biases between them, as in OPT: the biases alone are widened to fp32."""
    counts = [CHUNK, 5001, CHUNK // 2 + 77, 5000, 3]
    dtypes = [torch.float16, torch.float32, torch.float16, torch.float32, torch.float32]
    values = [some(count, torch.float16, seed) for seed, count in enumerate(counts)]
    path = tmp_path / "x"
    path.write_bytes(b"\x01" * 38 + b"".join(x.numpy().tobytes() for x in values))
    tier, buffered = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct)), watch_buffers(monkeypatch)
    pairs, start = [], 38
    for x, dtype in zip(values, dtypes, strict=True):
        pairs.append((tier.checkpoint(path, start, x.nbytes, x.dtype), torch.zeros(len(x), dtype=dtype)))
        start += x.nbytes
    tier.load_all(pairs)
    assert all(torch.equal(target, x.to(target.dtype)) for (_, target), x in zip(pairs, values, strict=True))
    narrow = sum(2 * count for count, dtype in zip(counts, dtypes, strict=True) if dtype == torch.float32)
    assert sum(buffered) >= start - 38 if direct else sum(buffered) == narrow
    tier.close()


def test_direct_reads_go_straight_to_targets_that_lie_as_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three weights with a bias between them, of which the second lies elsewhere in memory: it needs a buffer."""
    counts = [5 * CHUNK, 77, CHUNK, 2 * CHUNK + 13]
    dtypes = [torch.float16, torch.float32, torch.float16, torch.float16]
    values = [some(count, torch.float16, seed) for seed, count in enumerate(counts)]
    path = tmp_path / "x"
    path.write_bytes(b"\x01" * 112 + b"".join(x.numpy().tobytes() for x in values))
    tier, buffered = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(True), readers=1), watch_buffers(monkeypatch)
    if File(path, os.O_RDONLY).direct is None:
        pytest.skip("no direct I/O here")
    room, pairs, start, used = mapped(2 * sum(counts) + 64 * ALIGN, huge=True).fill_(7), [], 112, 0
    for i, (x, dtype) in enumerate(zip(values, dtypes, strict=True)):
        used += (start - used) % ALIGN + (64 if i == 2 else 0)
        target = torch.zeros(len(x)) if dtype != x.dtype else room[used : used + x.nbytes].view(dtype)
        pairs.append((tier.checkpoint(path, start, x.nbytes, x.dtype), target))
        start, used = start + x.nbytes, used + x.nbytes + 2 * ALIGN
    tier.load_all(pairs)
    assert all(torch.equal(target, x.to(target.dtype)) for (_, target), x in zip(pairs, values, strict=True))
    assert values[2].nbytes <= sum(buffered) < values[2].nbytes + 8 * ALIGN
    assert int((room == 7).sum()) >= room.nbytes - sum(x.nbytes for x in values)  # nothing else was written
    tier.close()


def test_a_short_read_goes_on_in_the_middle_of_several_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "x", bytes(some(5000).view(torch.uint8).tolist())
    path.write_bytes(data)
    real, file = os.preadv, File(path, os.O_RDONLY)

    def short(fd: int, parts: list[memoryview], offset: int) -> int:
        first = next(part for part in parts if len(part))
        return real(fd, [first[: min(len(first), 700)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    targets = [bytearray(n) for n in (1000, 1, 8192, 0, 9000, 5000)]
    assert read_fully(file, [memoryview(target) for target in targets], 10, direct=False) == len(data) - 10
    assert b"".join(targets)[: len(data) - 10] == data[10:]
    file.close()


def test_more_regions_than_one_system_call_can_fill(tmp_path: Path) -> None:
    values = some(1500 * 300, torch.float16).view(1500, 300)
    path = tmp_path / "x"
    path.write_bytes(values.numpy().tobytes() * 2)
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(False))
    rows, order = torch.zeros(3000, 300, dtype=torch.float16), torch.randperm(3000).tolist()
    tier.load_all([(tier.checkpoint(path, i * 600, 600, torch.float16), rows[row]) for i, row in enumerate(order)])
    assert torch.equal(rows[order], torch.cat([values, values]))
    tier.close()


def written(path: Path, values: torch.Tensor) -> File:
    """Write a file that is in the page cache, and return it. Skip the test if reads cannot tell that it is there."""
    path.write_bytes(values.numpy().tobytes())
    file = File(path, os.O_RDONLY)
    if file.direct is None or not cached(file, values.nbytes // 2):
        file.close()
        pytest.skip("this file system has no direct I/O, or no reads that do not wait")
    return file


def cached(file: File, offset: int) -> bool:
    """Return whether the page cache holds a byte of the file."""
    file.uncached = None
    return file.read_cached([memoryview(bytearray(1))], offset, 1)


def read_whole(tier: DiskTier, path: Path, values: torch.Tensor) -> File:
    home = tier.checkpoint(path, 0, values.nbytes, values.dtype)
    tier.load(home, target := torch.zeros_like(values))
    assert torch.equal(target, values)
    tier.close()
    return home.place  # type: ignore[no-any-return]


@pytest.mark.parametrize("direct", [True, False])
def test_what_the_page_cache_holds_is_read_from_there(direct: bool, tmp_path: Path) -> None:
    """And stays there, and does not count as a read of the disk; a file that is not there does not get there."""
    path, values = tmp_path / "x", some(3 * CHUNK, torch.float16)
    file, noted = written(path, values), list[int]()
    for evicted in (False, True):
        if evicted:
            os.fsync(file.cached)
            os.posix_fadvise(file.cached, 0, 0, os.POSIX_FADV_DONTNEED)
        tier = DiskTier("disk", Ledger("disk"), tmp_path, way := OneWay(direct))
        way.note = lambda nbytes, *times: noted.append(nbytes)  # type: ignore[method-assign]
        assert bool(read_whole(tier, path, values).uncached) is evicted
        assert bool(noted) is evicted
        assert cached(file, values.nbytes // 2) is not evicted
    assert sum(noted) == values.nbytes
    file.close()


def test_a_file_of_which_the_page_cache_holds_a_part(tmp_path: Path) -> None:
    path, values = tmp_path / "x", some(3 * CHUNK, torch.float16)
    file, middle = written(path, values), values.nbytes // 2 + ALIGN  # within a chunk
    os.fsync(file.cached)
    os.posix_fadvise(file.cached, middle, 0, os.POSIX_FADV_DONTNEED)
    tier, noted = DiskTier("disk", Ledger("disk"), tmp_path, way := OneWay(True)), list[int]()
    way.note = lambda nbytes, *times: noted.append(nbytes)  # type: ignore[method-assign]
    assert read_whole(tier, path, values).uncached
    assert 0 < sum(noted) < values.nbytes
    assert cached(file, 0)
    file.close()


def test_a_measurement_reads_the_disk_whatever_the_page_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values, read, real = tmp_path / "x", some(3 * CHUNK, torch.float16), list[tuple[bool, int]](), os.preadv
    file = written(path, values)
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(True))
    tier.way.held, opened = True, tier.checkpoint(path, 0, values.nbytes, torch.float16).place

    def preadv(fd: int, *rest: Any) -> int:
        read.append((fd == opened.direct, len(rest)))  # two arguments: no flags
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    read_whole(tier, path, values)
    assert read
    assert set(read) == {(True, 2)}
    file.close()


def test_a_read_tells_what_it_found_whatever_other_threads_find(tmp_path: Path) -> None:
    """A read of cached bytes, in which another thread meets a byte that is not there."""
    file, part = written(tmp_path / "x", some(ALIGN, torch.uint8)), memoryview(bytearray(8))
    real = file._resident

    def resident(*args: Any) -> int:
        file.uncached = True
        return real(*args)

    file.uncached, file._resident = False, resident  # type: ignore[method-assign]
    assert file.read_cached([part], 0, 8)
    assert part.tobytes() != bytes(8)
    assert file.uncached
    assert not file.read_cached([part], 0, 8)
    file.close()


@pytest.mark.parametrize("readers", [1, 3])
def test_direct_reads_that_the_file_system_refuses_go_through_the_page_cache(
    readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values, real = tmp_path / "x", some(5 * CHUNK, torch.float16), os.preadv
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(True), readers)
    home, refused = tier.checkpoint(path, 0, values.nbytes, torch.float16), list[int]()

    def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
        if fd == home.place.direct:
            refused.append(sum(map(len, parts)))
            raise OSError(errno.EINVAL, "refused")
        return real(fd, parts, offset)

    if home.place.direct is None:
        pytest.skip("no direct I/O here")
    home.place.uncached = True  # else the bytes come from the page cache, as the file was written just now
    monkeypatch.setattr(os, "preadv", preadv)
    room = mapped(values.nbytes, huge=True)
    tier.load(home, target := room.view(torch.float16))
    assert torch.equal(target, values)
    assert 1 <= len(refused) <= readers
    # Straight to the target, shared evenly. Any of the threads may be the first.
    assert refused[0] in [share * CHUNK for share in {1: [10], 3: [4, 2]}[readers]]
    tier.close()


def test_a_load_does_not_wait_for_the_threads_of_another_one(tmp_path: Path) -> None:
    """A lane reads a layer with all threads; meanwhile a computing thread needs an expert."""
    path, values = tmp_path / "x", some(4 * CHUNK)
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(True), readers=3)
    go, begun = threading.Event(), threading.Barrier(4)
    fill = tier._read

    def filled(file: Any, buffer: torch.Tensor, low: int, *how: Any, **more: Any) -> None:
        if low < 8 * CHUNK and not go.is_set():
            begun.wait(10)
            go.wait(10)
        fill(file, buffer, low, *how, **more)

    tier._read = filled  # type: ignore[method-assign]
    first, second = values[: 2 * CHUNK], values[2 * CHUNK :]
    homes = [tier.checkpoint(path, start, 8 * CHUNK, torch.float32) for start in (0, 8 * CHUNK)]
    targets = [torch.zeros_like(first), torch.zeros_like(second)]
    lane = threading.Thread(target=tier.load, args=(homes[0], targets[0]))
    lane.start()
    begun.wait(10)
    tier._ring = None  # the first load has all buffers
    tier.load(homes[1], targets[1])
    assert torch.equal(targets[1], second)
    assert lane.is_alive()
    go.set()
    lane.join()
    assert torch.equal(targets[0], first)
    tier.close()
