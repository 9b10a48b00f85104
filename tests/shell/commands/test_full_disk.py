"""A full disk in one sentence: the path, the bytes that are free, and what to do."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch

from flexengine.errors import FlexError, size
from flexengine.job.inputs import InputRows
from flexengine.job.resume import open_job
from flexengine.model import shards
from flexengine.model.prepare import prepared
from flexengine.shell.commands.messages import FAILED, REFUSED, exit_code
from flexengine.shell.commands.options import write
from flexengine.tier.base import Ledger
from flexengine.tier.disk import DiskTier

FREE = 12_345


@pytest.fixture(autouse=True)
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every disk were full when a file is written."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=FREE))


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def journal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in.txt").write_text("a\n")
    monkeypatch.setattr(os, "pwrite", full)
    with InputRows(folder / "in.txt") as rows, open_job(rows, folder / "out.jsonl") as store:
        store.begin(lambda known: {"model": "m"}, "m")


def conversion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    (folder / "model").touch()
    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    prepared(folder, [folder / "model"], lambda place: shards.save({"a": torch.zeros(1)}, place / "a.safetensors"))


def spill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    DiskTier("disk", Ledger("disk"), folder / "off").allocate(10, "KV cache")


def policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    write(str(folder / "policy.json"), "{}")


@pytest.mark.parametrize(
    ("case", "folder", "remedy"),
    [
        (journal, "", "the same command then continues"),
        (conversion, "cache/prepared", "set FLEXENGINE_CACHE to a directory"),
        (spill, "off", "give another --offload-dir"),
        (policy, "", "free space there"),
    ],
)
def test_every_kind_of_file(
    case: Callable[[Path, pytest.MonkeyPatch], None],
    folder: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> int:
        with monkeypatch.context() as patch:
            case(tmp_path, patch)
        return 0

    code = exit_code(command)
    said = capsys.readouterr().err
    assert code in (FAILED, REFUSED), said
    assert said.count("\n") == 1
    assert said.count(f"is full: {size(FREE)} are free") == 1
    assert f"the disk of {tmp_path / folder}" in said
    assert remedy in said


def test_other_errors_say_nothing_of_disks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for error in (FlexError("no"), OSError(errno.EIO, "bad", str(tmp_path / "file")), OSError("odd")):

        def command(error: Exception = error) -> int:
            raise error

        assert exit_code(command) in (FAILED, REFUSED)
        assert "full" not in capsys.readouterr().err
