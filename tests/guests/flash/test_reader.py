"""The reader of records, native and in Python, direct and cached, against the bytes of the file."""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.faults.failing import Failing, Fault
from flexengine.codec.records import CODED, PLAIN, RecordForm
from flexengine.errors import BadCheckpoint
from flexengine.guests.flash import reader as module
from flexengine.guests.flash.bundles import Bundle
from flexengine.guests.flash.reader import GAP, MOST, THREADS, RecordReader, requests
from flexengine.kernels import reads
from flexengine.plan.neurons import RECORD_READ, RECORD_READERS
from flexengine.system.read_retries import PAUSES
from flexengine.tier.base import ALIGN
from flexengine.tier.memory import aligned_buffer
from tests.helpers.patience import in_time
from tests.helpers.tiers import refuse_direct

WAYS = ["native", "python"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(reads, "library", lambda: None)
    elif reads.library() is None:
        pytest.skip("the native kernels cannot be built")
    return str(request.param)


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "library", lambda: None)


def written(folder: Path, form: RecordForm, neurons: int, seed: int = 0) -> tuple[Bundle, torch.Tensor]:
    """A bundle of random bytes, and its records."""
    data = np.random.default_rng(seed).integers(0, 256, (neurons, form.nbytes), dtype=np.uint8)
    path = folder / "0123456789abcdef" / f"{seed}.records"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data.tobytes())
    return Bundle(path, form, neurons), torch.from_numpy(data)


def rows(bundle: Bundle, room: int, skip: int = 0) -> torch.Tensor:
    """Zeroed rows, which begin `skip` bytes after a multiple of ALIGN."""
    buffer = aligned_buffer(room * bundle.form.nbytes + skip)[skip:]
    return buffer.view(room, bundle.form.nbytes).zero_()


def filled(reader: RecordReader, bundle: Bundle, numbers: list[int], target: torch.Tensor, places: list[int]) -> int:
    return reader.read(bundle, torch.tensor(numbers, dtype=torch.int64), target,
                       torch.tensor(places, dtype=torch.int64))  # fmt: skip


def drawn(rng: np.random.Generator, neurons: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` numbers, half of them near each other, and as many places among 2 x neurons."""
    near = min(neurons, 2 * count)
    numbers = np.unique(np.concatenate((rng.choice(near, count // 2, replace=False), rng.integers(0, neurons, count))))
    return torch.from_numpy(numbers), torch.from_numpy(rng.permutation(2 * neurons)[: len(numbers)])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", [*PLAIN, *CODED])
@pytest.mark.usefixtures("way")
def test_any_set_of_records(tmp_path: Path, kind: str, gated: bool) -> None:
    """Rows that are not targets stay as they were."""
    bundle, data = written(tmp_path, RecordForm(kind, 200, gated), 300)
    rng = np.random.default_rng(1)
    with RecordReader([bundle], threads=5) as reader:
        for count in (1, 2, 3, 10, 50, 150):
            numbers, places = drawn(rng, bundle.neurons, count)
            target = rows(bundle, 600)
            nbytes = reader.read(bundle, numbers, target, places)
            expected = torch.zeros_like(target)
            expected[places] = data[numbers]
            assert torch.equal(target, expected)
            assert len(numbers) * bundle.form.nbytes <= nbytes <= bundle.nbytes


MANNERS = {  # records of 4096 x n bytes or not, rows at a multiple of 4096, 512 or 8
    "blocks": (1024, 0), "half blocks": (768, 0), "rows at 512": (1024, 512), "rows at 8": (1024, 8),
}  # fmt: skip


@pytest.mark.parametrize("align", [512, ALIGN, 1])
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.usefixtures("way")
def test_whatever_the_disk_and_the_rows_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str, align: int
) -> None:
    """A disk that takes multiples of 4096 bytes only, or no direct reads, and rows at other addresses."""
    width, skip = MANNERS[manner]
    bundle, data = written(tmp_path, RecordForm("float32", width), 200)
    if align == 1:
        refuse_direct(monkeypatch)
    with RecordReader([bundle], threads=4) as reader:
        file = reader._files[bundle.path]
        if file.align not in (align, 512):
            pytest.skip(f"this file system needs multiples of {file.align} bytes")
        file.align = align
        numbers, places = drawn(np.random.default_rng(2), bundle.neurons, 100)
        target = rows(bundle, 400, skip)
        reader.read(bundle, numbers, target, places)
        assert torch.equal(target[places], data[numbers])


def test_the_alignment_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 512 and 4096 bytes that a direct read takes."""
    bundle, _ = written(tmp_path, RecordForm("float16", 512), 20)
    real = os.preadv
    for least, align in ((512, 512), (1024, ALIGN), (2 * ALIGN, 1)):

        def preadv(fd: int, buffers: Any, offset: int, least: int = least) -> int:
            if offset % least or len(buffers[0]) % least:
                raise OSError(errno.EINVAL, "not a multiple")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        with RecordReader([bundle], threads=1) as reader:
            assert reader._files[bundle.path].align == align


SETS = st.lists(st.integers(0, 400), min_size=1, unique=True).map(sorted)


@given(SETS, st.sampled_from([512, 4096, 16384, 24576, 200_000]), st.integers(0, 40_000), st.integers(1, 300_000))
def test_requests(numbers: list[int], nbytes: int, gap: int, most: int) -> None:
    """Every record is in one request; no request or gap is too large; no two neighbours could be one request."""
    bounds = requests(np.array(numbers), nbytes, gap, most).tolist()
    assert (bounds[0], bounds[-1]) == (0, len(numbers))
    parts = [numbers[a:b] for a, b in pairwise(bounds)]
    assert all(parts)
    for part in parts:
        assert len(part) == 1 or (part[-1] - part[0] + 1) * nbytes <= most
        assert all((b - a - 1) * nbytes <= gap for a, b in pairwise(part))
    for part, after in pairwise(parts):
        close = (after[0] - part[-1] - 1) * nbytes <= gap
        assert not (close and (after[-1] - part[0] + 1) * nbytes <= most)


@pytest.mark.parametrize(
    ("numbers", "traffic"),
    [
        ([], (0, 0)), ([7], (1, 1)), ([7, 8, 9], (3, 1)),
        ([7, 9], (3, 1)), ([7, 11], (5, 1)), ([7, 12], (2, 2)),  # gaps of 1, of GAP bytes, of more
        (list(range(32)), (32, 1)), (list(range(33)), (33, 2)),  # MOST bytes, and more
    ],
)  # fmt: skip
@pytest.mark.usefixtures("way")
def test_traffic(tmp_path: Path, numbers: list[int], traffic: tuple[int, int]) -> None:
    """Records of 4096 bytes: the bytes of all requests, gaps included."""
    assert (GAP, MOST) == (3 * 4096, 32 * 4096)
    assert (RECORD_READERS, RECORD_READ) == (THREADS, MOST)
    bundle, data = written(tmp_path, RecordForm("float32", 512), 40)
    with RecordReader([bundle], threads=3) as reader:
        target = rows(bundle, 40)
        places = list(reversed(range(len(numbers))))
        assert filled(reader, bundle, numbers, target, places) == traffic[0] * 4096
        assert not numbers or len(requests(np.array(numbers), 4096)) - 1 == traffic[1]
        assert torch.equal(target[places], data[numbers])


@pytest.mark.usefixtures("way")
def test_several_bundles_and_callers(tmp_path: Path) -> None:
    """Threads that read at the same time wait for each other."""
    made = [written(tmp_path, RecordForm("float16", 256, gated), 64, seed) for seed, gated in enumerate((True, False))]
    failures = list[int]()
    with RecordReader([bundle for bundle, _ in made], threads=3) as reader:

        def work(index: int) -> None:
            bundle, data = made[index % 2]
            for seed in range(20):
                numbers, places = drawn(np.random.default_rng(100 * index + seed), 64, 30)
                target = rows(bundle, 128)
                reader.read(bundle, numbers, target, places)
                if not torch.equal(target[places], data[numbers]):
                    failures.append(index)

        callers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert failures == []


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.usefixtures("way")
def test_a_file_that_becomes_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    bundle, data = written(tmp_path, RecordForm("float32", 512), 40)
    with RecordReader([bundle], threads=2) as reader:
        os.truncate(bundle.path, 20 * 4096 + 700)
        target = rows(bundle, 40)
        filled(reader, bundle, [3, 19], target, [0, 1])
        assert torch.equal(target[:2], data[[3, 19]])
        with pytest.raises(BadCheckpoint) as caught:
            filled(reader, bundle, [3, 20, 39], target, [0, 1, 2])
        for word in (str(bundle.path), "ends before byte", f"are {bundle.nbytes:,} bytes", "cache clear 01234567"):
            assert word in str(caught.value)


@pytest.mark.parametrize("size", [0, 40 * 4096 - 1, 40 * 4096 + 512])
def test_a_file_of_another_size_is_refused_when_it_is_opened(tmp_path: Path, size: int) -> None:
    bundle, _ = written(tmp_path, RecordForm("float32", 512), 40)
    os.truncate(bundle.path, size)
    with pytest.raises(BadCheckpoint, match=f"has {size:,} bytes, but 40 neurons of 4,096 bytes are 163,840 bytes"):
        RecordReader([bundle])


@pytest.mark.usefixtures("python")
def test_a_read_that_fails_is_tried_again(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """One that goes on failing ends in an error that names file and byte, after all other reads have ended."""
    monkeypatch.setattr("flexengine.system.read_retries.PAUSES", [0.0] * len(PAUSES))
    bundle, data = written(tmp_path, RecordForm("float32", 512), 40)
    with RecordReader([bundle], threads=3) as reader:
        for number in (1, 2, 3):
            target = rows(bundle, 40)
            with Failing([tmp_path], Fault(("read",), number)) as calls:
                filled(reader, bundle, [0, 10, 20], target, [0, 1, 2])
            assert calls.struck
            assert torch.equal(target[:3], data[[0, 10, 20]])
        assert len(caplog.records) == 3
        with Failing([tmp_path], Fault(("read",), 1, lasting=True)), pytest.raises(OSError, match="reading byte") as e:
            filled(reader, bundle, [10], target, [0])
        assert (e.value.errno, e.value.filename) == (errno.EIO, str(bundle.path))
        assert f"{len(PAUSES) + 1} times, reading byte {10 * 4096:,}" in str(e.value)
        filled(reader, bundle, [39], target, [5])
        assert torch.equal(target[5], data[39])


def test_native_reads_that_fail_are_tried_again_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all of them fail, as the descriptor is of another file that has no bytes."""
    if reads.library() is None:
        pytest.skip("the native kernels cannot be built")
    bundle, data = written(tmp_path, RecordForm("float32", 512), 40)
    (tmp_path / "empty").touch()
    empty = os.open(tmp_path / "empty", os.O_RDONLY)
    redone, real = list[int](), module._BundleFile.read
    monkeypatch.setattr(module._BundleFile, "manner", lambda file, rows: (empty, 1, True))
    monkeypatch.setattr(
        module._BundleFile, "read", lambda file, records, k, buffer: redone.append(k) or real(file, records, k, buffer)
    )
    with RecordReader([bundle], threads=3) as reader:
        target = rows(bundle, 40)
        filled(reader, bundle, [0, 10, 20], target, [0, 1, 2])
        assert torch.equal(target[:3], data[[0, 10, 20]])
    os.close(empty)
    assert sorted(redone) == [0, 1, 2]


BAD: dict[str, tuple[Callable[[Bundle], Any], str]] = {
    "a number too high": (lambda b: ([3, 40], rows(b, 9), [0, 1]), "records 3 to 40 of 40"),
    "a negative number": (lambda b: ([-1, 3], rows(b, 9), [0, 1]), "records -1 to 3 of 40"),
    "a place too high": (lambda b: ([1, 3], rows(b, 9), [0, 9]), "rows 0 to 9 of 9"),
    "a negative place": (lambda b: ([1, 3], rows(b, 9), [-1, 0]), "rows -1 to 0 of 9"),
    "falling numbers": (lambda b: ([3, 1], rows(b, 9), [0, 1]), "must rise"),
    "equal numbers": (lambda b: ([3, 3], rows(b, 9), [0, 1]), "must rise"),
    "fewer places": (lambda b: ([1, 3], rows(b, 9), [0]), "int64"),
    "narrow rows": (lambda b: ([1], rows(b, 9)[:, :512], [0]), "contiguous uint8"),
    "other rows": (lambda b: ([1], rows(b, 9).view(torch.int8), [0]), "contiguous uint8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    bundle, _ = written(tmp_path, RecordForm("float32", 512), 40)
    make, says = BAD[case]
    numbers, target, places = make(bundle)
    with RecordReader([bundle], threads=1) as reader, pytest.raises(ValueError, match=says):
        filled(reader, bundle, numbers, target, places)


@pytest.mark.usefixtures("way")
def test_threads_and_files_end_with_the_reader(tmp_path: Path) -> None:
    bundle, _ = written(tmp_path, RecordForm("float32", 512), 40)
    before = tasks()
    with RecordReader([bundle], threads=4) as reader:
        filled(reader, bundle, [0, 10, 20], rows(bundle, 3), [0, 1, 2])
        begun = tasks() - before
        assert begun
        assert str(bundle.path) in open_files()
        assert reader.nbytes == 4 * (MOST + 2 * ALIGN)
    assert str(bundle.path) not in open_files()
    in_time(lambda: [time.sleep(0.01) for _ in iter(lambda: bool(begun & tasks()), False)])


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def open_files() -> set[str]:
    files = set[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            files.add(os.readlink(f"/proc/self/fd/{name}"))
    return files
