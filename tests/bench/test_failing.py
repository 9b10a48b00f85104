"""bench.faults.failing counts calls, fails one, and changes no call on other folders or after the block."""

import errno
import os
from pathlib import Path

import pytest

from bench.faults.failing import Failing, Fault


def work(folder: Path) -> None:
    with (folder / "a.part").open("wb") as file:
        file.write(b"x" * 100)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "a.part", folder / "a")


def test_calls_are_counted(tmp_path: Path) -> None:
    with Failing([tmp_path], Fault(("write", "fsync", "rename"))) as failing:
        work(tmp_path)
    assert failing.made == 3
    assert dict(failing.counts) == {"create a.part": 1, "write a.part": 1, "fsync a.part": 1, "rename a.part": 1}


@pytest.mark.parametrize(("number", "struck"), [(1, "write a.part"), (2, "fsync a.part"), (3, "rename a.part")])
def test_the_nth_call_fails(tmp_path: Path, number: int, struck: str) -> None:
    with Failing([tmp_path], Fault(("write", "fsync", "rename"), number, "ENOSPC")) as failing:
        with pytest.raises(OSError) as caught:  # noqa: PT011
            work(tmp_path)
        assert caught.value.errno == errno.ENOSPC
        assert failing.struck == struck
        work(tmp_path)  # it struck once
    work(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"x" * 100


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "here").mkdir()
    with Failing([tmp_path / "here"], Fault(("write",), 1, lasting=True)) as failing:
        work(tmp_path / "other")
        assert failing.made == 0


def test_short_reads_and_writes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    with Failing([tmp_path], Fault(("read",), 1, "short")):
        assert (tmp_path / "a").read_bytes() == bytes(range(100))
    file = os.open(tmp_path / "a", os.O_RDWR)
    with Failing([tmp_path], Fault(("write",), 2, "short")):
        assert [os.pwrite(file, b"y" * n, 0) for n in (10, 10, 9000, 10)] == [10, 5, 9000, 10]
    with Failing([tmp_path], Fault(("write",), 1, "short")):
        assert os.pwritev(file, [b"y" * 9000], 0) == 4096
    os.close(file)
