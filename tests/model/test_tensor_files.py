"""Files of one tensor: the bytes that the safetensors library writes, whole or not at all."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.faults.failing import Failing, Fault
from flexengine.model.shards import TensorFiles, TensorPart

NAMES = ("a", "model.layers.0.mlp.down_proj.weight", 'quote" and back\\slash', "naïve 名")


def data(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(1,), (1000,), (3, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_of_the_library(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    made, expected, tensor = tmp_path / "a.safetensors", tmp_path / "b.safetensors", data(*shape)
    with TensorFiles({name: made}, {name: shape}) as files:
        for part in tensor.flatten().split(100):
            files.write(TensorPart(name, part))
    save_file({name: tensor}, expected, metadata={"format": "pt"})
    assert made.read_bytes() == expected.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {made.name, expected.name}


def write(folder: Path, parts: int = 4) -> None:
    """Write the file "a" of 400 bytes, then the first `parts` of 4 parts of "b"."""
    names = ("a", "b")
    with TensorFiles({n: folder / f"{n}.safetensors" for n in names}, dict.fromkeys(names, (400,))) as files:
        for name in names:
            for part in data(400).split(100)[: parts if name == "b" else 4]:
                files.write(TensorPart(name, part))


def test_a_file_that_is_not_complete_has_another_name(tmp_path: Path) -> None:
    write(tmp_path, parts=3)
    assert {file.name for file in tmp_path.iterdir()} == {"a.safetensors", "b.writing"}
    write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors"}
    assert torch.equal(load_file(tmp_path / "b.safetensors")["b"], data(400))


@pytest.mark.parametrize("how", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("kind", ["create", "write", "fsync", "rename"])
def test_a_call_that_fails(tmp_path: Path, kind: str, how: str) -> None:
    """Each of them leaves whole files only, and the error names the file."""
    with Failing([tmp_path], Fault((kind,))) as calls:
        write(tmp_path)
    assert calls.made
    for number in range(1, calls.made + 1):
        for file in tmp_path.iterdir():
            file.unlink()
        with Failing([tmp_path], Fault((kind,), number, how)), pytest.raises(OSError, match=r"\[Errno") as caught:
            write(tmp_path)
        assert caught.value.errno == getattr(errno, how)
        assert str(caught.value.filename).endswith((".writing", ".safetensors"))
        for file in tmp_path.glob("*.safetensors"):
            assert torch.equal(load_file(file)[file.stem], data(400))
        write(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2


def test_short_writes_are_continued(tmp_path: Path) -> None:
    with Failing([tmp_path], Fault(("write",), 1, "short", lasting=True)):
        write(tmp_path)
    assert torch.equal(load_file(tmp_path / "b.safetensors")["b"], data(400))
