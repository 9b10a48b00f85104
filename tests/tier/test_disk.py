"""The disk tier: checkpoints at any offset, direct and cached reads, faults, writes."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.faults.failing import Failing, Fault
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.system.read_retries import PAUSES
from flexengine.tier import disk
from flexengine.tier.base import Ledger
from flexengine.tier.disk import CHUNK, DiskTier
from flexengine.tier.file import FasterWay
from flexengine.tier.memory import MemoryTier
from flexengine.tier.throttled import Throttled
from tests.helpers.tiers import OneWay, pattern, some, watch_buffers

# Disk beyond the conformance class.


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = DiskTier("disk", Ledger("disk"), tmp_path / "file" / "off")
    with pytest.raises(InvalidInput, match=r"file/off.*--offload-dir"):
        tier.allocate(10, "KV cache")


def test_directory_that_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a directory above it had lost its permissions since the plan."""

    def hidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    tier = DiskTier("disk", Ledger("disk"), tmp_path / "off")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", hidden)
        with pytest.raises(InvalidInput, match=r"off: .*Permission denied.*--offload-dir"):
            tier.allocate(10, "KV cache")
    tier.close()


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_cached_reads_without_conversion_need_no_buffer(
    direct: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two regions that share a read: chunks begin and end inside of them."""
    values = [some(CHUNK // 2 + 5001, torch.float16), some(CHUNK, torch.float16)]
    path = tmp_path / "x.bin"
    path.write_bytes(b"\x01" * 38 + b"".join(x.numpy().tobytes() for x in values))
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(direct))
    buffered = watch_buffers(monkeypatch)
    targets = [torch.zeros(len(x), dtype=dtype) for x in values]
    starts = (38, 38 + values[0].nbytes)
    homes = [tier.checkpoint(path, start, x.nbytes, x.dtype) for start, x in zip(starts, values, strict=True)]
    tier.load_all(list(zip(homes, targets, strict=True)))
    assert all(torch.equal(target, x.to(dtype)) for target, x in zip(targets, values, strict=True))
    assert bool(buffered) is (direct or dtype != torch.float16)
    tier.close()


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
    used = learned({best: 2e9, not best: 1.5e9}, 90)
    assert used[:20] == [True] * 16 + [False, True] * 2
    learning = used[20:].index(best) + 20 if best else 21
    assert used[:learning].count(False) == 3
    first, second = (i for i, way in enumerate(used[learning:]) if way is not best)
    assert first in (16, 17)
    assert second - first - 1 in (32, 33)  # twice as many turns later, as nothing changed
    assert used[-10:] == [best] * 10


def test_one_turn_of_slow_cached_reads_is_enough() -> None:
    used = learned({True: 2e9, False: 1e9}, 31)
    assert used == [True] * 16 + [False] + [True] * 14
    assert learned({True: 1e9, False: 2e9}, 31)[:21] == [True] * 16 + [False, True, False, True, False]


def test_a_short_job_tries_nothing() -> None:
    assert all(learned({True: 1e9, False: 2e9}, 16))


def test_reads_that_nobody_waits_for_are_direct() -> None:
    """If computing takes longer than direct reads, cached reads are not tried."""
    direct = FasterWay.TURN / 1e9  # seconds of a turn
    assert all(learned({True: 1e9, False: 2e9}, 40, computing=1.5 * direct))
    used = learned({True: 1e9, False: 2e9}, 40, computing=1.1 * direct)  # nearly as long as reading
    assert used[:21].count(False) == 3
    assert used[21:].count(True) == 1  # the review; cached reads leave the reader idle half of the time


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
    monkeypatch.setattr(FasterWay, "FIRST", 2)
    path, values = tmp_path / "x", some(9 * CHUNK // 4)
    path.write_bytes(values.numpy().tobytes())
    tier, seen = DiskTier("disk", Ledger("disk"), tmp_path), set()
    real = tier.way.note

    def note(nbytes: int, began: float, ended: float) -> None:
        seen.add(tier.way.direct)
        real(nbytes, began, ended)

    monkeypatch.setattr(tier.way, "note", note)
    home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
    home.place.uncached = True  # it was written just now
    for _ in range(3):
        target = torch.zeros(len(values))
        tier.load(home, target)
        assert torch.equal(target, values)
    assert seen == {True, False}
    tier.close()


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
    values = some(5 * CHUNK // 2, torch.float16)
    path = tmp_path / "x"
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(False))
    real, calls, converting = tier._read, [], []

    def read(*args: Any) -> bool:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.EIO, "bad sector")
        return real(*args)

    def convert(*args: Any) -> None:
        converting.append(1)
        time.sleep(0.05)
        args[1].copy_(args[0])
        converting.pop()

    monkeypatch.setattr(tier, "_read", read)
    monkeypatch.setattr(disk, "load_kernels", lambda: SimpleNamespace(convert=convert))
    home = tier.checkpoint(path, 0, values.nbytes, torch.float16)
    with pytest.raises(OSError, match="bad sector"):
        tier.load(home, torch.zeros(len(values)))
    assert not converting
    target = torch.zeros(len(values))
    tier.load(home, target)
    assert torch.equal(target, values.float())
    tier.close()


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_read_that_fails_is_tried_again(offloaded: bool, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Whichever read it is; one that goes on failing ends in an error that names file and byte."""
    monkeypatch.setattr("flexengine.system.read_retries.PAUSES", [0.0] * len(PAUSES))
    values = some(5 * CHUNK // 4)
    path = tmp_path / "x"
    path.write_bytes(values.numpy().tobytes())
    tier = DiskTier("disk", Ledger("disk"), tmp_path, OneWay(False), readers=1)
    home = tier.allocate(values.nbytes, "KV cache", torch.float32)
    tier.store(values, home)
    if not offloaded:
        home = tier.checkpoint(path, 0, values.nbytes, torch.float32)
        home.place.uncached = True  # it was written just now
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
    """No process has to remove it; also on file systems that cannot create unnamed files."""
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
    home = tier.allocate(16 * 4096, "KV cache", torch.float32)
    values, meeting, real = some(8 * 1024), threading.Barrier(2), os.pwritev

    def meet(*args: Any) -> int:
        meeting.wait(30)  # for the other write
        return real(*args)

    monkeypatch.setattr(os, "pwritev", meet)
    apart = [home.part(i * 8192, 4096) for i in range(8)]
    tier.store_all(list(zip(values.split(1024), apart, strict=True)))
    assert tier.bytes_written == values.nbytes
    target = torch.zeros_like(values)
    tier.load_all(list(zip(apart, target.split(1024), strict=True)))
    assert torch.equal(target, values)
    tier.close()


def test_all_writes_have_ended_before_one_that_failed_is_told_of(tmp_path: Path) -> None:
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    home = tier.allocate(16 * 4096, "KV cache", torch.float32)
    values = some(8 * 1024)
    apart = [home.part(i * 8192, 4096) for i in range(8)]
    pairs = list(zip(values.split(1024), apart, strict=True))
    with Failing([tmp_path], Fault(("write",), 3)) as calls, pytest.raises(OSError, match="writing"):
        tier.store_all(pairs)
    assert calls.made == 8
    tier.store_all(pairs)
    target = torch.zeros_like(values)
    tier.load_all(list(zip(apart, target.split(1024), strict=True)))
    assert torch.equal(target, values)
    tier.close()


def test_neighbouring_pages_are_written_together_even_if_a_write_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier("disk", Ledger("disk"), tmp_path)
    home = tier.allocate(5 * 4096, "KV cache", torch.float32)
    values, made, real = some(5 * 1024), list[tuple[int, int]](), os.pwritev

    def half(file: int, parts: Any, offset: int) -> int:
        made.append((offset - home.start, sum(map(len, parts))))
        return real(file, [*parts[:1], parts[1][:4096]] if len(parts) > 1 else parts, offset)

    monkeypatch.setattr(os, "pwritev", half)
    order = [3, 0, 1, 2, 4]  # their place in memory differs from that in the file
    pairs = [(values[i * 1024 : (i + 1) * 1024], home.part(order[i] * 4096, 4096)) for i in range(5)]
    tier.store_all(pairs)
    assert made == [(0, 5 * 4096), (2 * 4096, 3 * 4096), (4 * 4096, 4096)]
    assert tier.bytes_written == values.nbytes
    target = torch.zeros_like(values)
    tier.load_all([(region, target[i * 1024 : (i + 1) * 1024]) for i, (_, region) in enumerate(pairs)])
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
