"""Reads that fail and are tried again, with the same result, or an error that says where: wherever models are read and
not mapped, as GGUF headers and .bin files are."""

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.faults.failing import Failing, Fault
from flexengine.errors import BadCheckpoint
from flexengine.model import checkpoint, encoding, gguf, gguf_header, prepare, verify
from flexengine.model import identity as identity_of
from flexengine.system.read_retries import PAUSES, opened
from tests.helpers.tiny_gguf import tiny_gguf

CONTENT = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.system.read_retries.PAUSES", [0.0] * len(PAUSES))
    monkeypatch.setattr(identity_of, "PLACES", 3)


def header(folder: Path) -> Any:
    return checkpoint.read_header(folder / "model.safetensors")


def matrix(folder: Path) -> Any:
    return encoding.read_part(header(folder)["x"], 40, 4000).tolist()


def digest(folder: Path) -> Any:
    return verify.digest_of(folder / "model.safetensors", lambda count: None)


def key(folder: Path) -> Any:
    return prepare.fingerprint([folder / "model.safetensors"])


def identity(folder: Path) -> Any:
    files = {path.name: path for path in folder.iterdir()}
    return identity_of.marks(files, [folder / "model.safetensors"], {})


def gguf_tensor(folder: Path) -> Any:
    found = gguf_header.read_header(folder / "model.gguf")
    return gguf._read(found.tensors[0]).tolist()


@pytest.mark.parametrize("read", [header, matrix, digest, key, identity, gguf_tensor], ids=lambda read: read.__name__)
def test_a_failed_read_of_a_model_is_tried_again(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """Whichever it is; one that goes on failing ends in an error that names file and byte."""
    save_file({"x": torch.arange(50_000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    tiny_gguf(tmp_path / "model.gguf")
    expected = read(tmp_path)
    with Failing([tmp_path], Fault(("read",))) as calls:
        read(tmp_path)
    assert calls.made
    for number in range(1, calls.made + 1):
        with Failing([tmp_path], Fault(("read",), number)) as failed:
            assert read(tmp_path) == expected
        assert failed.struck
        with Failing([tmp_path], Fault(("read",), number, "short")):
            assert read(tmp_path) == expected
        lasting = Fault(("read",), number, lasting=True)
        with Failing([tmp_path], lasting) as failed, pytest.raises((OSError, BadCheckpoint)) as caught:
            read(tmp_path)
        assert failed.made == number + len(PAUSES)
        assert "model." in str(caught.value)
        assert f"{len(PAUSES) + 1} times, reading byte" in str(caught.value)


def test_the_error_names_file_and_byte(tmp_path: Path, caplog: Any) -> None:
    (file := tmp_path / "x").write_bytes(CONTENT)
    with Failing([tmp_path], Fault(("read",), 2, lasting=True)), opened(file) as stream:
        stream.read(8192)
        with pytest.raises(OSError, match="4 times, reading byte 8,192") as caught:
            stream.read()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file))
    assert len(caplog.records) == len(PAUSES)
    with Failing([tmp_path], Fault(("read",), 1, "ENOSPC")) as calls, opened(file) as stream:
        with pytest.raises(OSError, match="reading byte 0"):  # other errors do not go away
            stream.read(10)
        assert calls.made == 1


def test_an_open_file_is_like_any_other(tmp_path: Path) -> None:
    (file := tmp_path / "x").write_bytes(CONTENT)
    with opened(file) as stream, file.open("rb") as plain:
        for at, size in ((0, 10), (5000, 20_000), (25_000, 10_000), (3, 0), (100, -1)):
            assert stream.seek(at) == plain.seek(at)
            assert stream.read(size) == plain.read(size)
            assert stream.tell() == plain.tell()
    assert stream.closed
    with opened(file) as stream:
        assert hashlib.file_digest(stream, "sha256").digest() == hashlib.sha256(CONTENT).digest()
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "nothing")


def test_weights_that_cannot_be_read_are_not_called_a_full_cache(tmp_path: Path, cache: Path) -> None:
    save_file({"x": torch.arange(50_000, dtype=torch.float32)}, file := tmp_path / "model.safetensors")
    at = header(tmp_path)["x"].runs[0].start + 40

    def build(directory: Path) -> None:
        with Failing([tmp_path], Fault(("read",), 2, lasting=True)):  # the first is of the header
            matrix(tmp_path)

    with pytest.raises(BadCheckpoint, match=rf"cannot be read: .*reading byte {at}\).*model\.safetensors"):
        prepare.prepared(file, [file], build)
