"""What tests of checksums share."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine import Engine, Lossy, SamplingParams
from flexengine.errors import BadCheckpoint
from flexengine.model.verify import SUMS

DIGEST = "a" * 64
PROMPT = {"prompt_token_ids": [5, 6, 7]}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def list_sums(directory: Path, names: Iterable[str] | None = None) -> Path:
    """SHA256SUMS of these files, all by default, written without the code under test."""
    names = sorted(f.name for f in directory.iterdir() if f.is_file()) if names is None else names
    lines = [f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (directory / SUMS).write_text("".join(lines))
    return directory


def git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def snapshot_of(model: Path, place: Path) -> Path:
    """The model as huggingface_hub lays it out: large files named by SHA-256, small ones as git names them."""
    top = place / "models--org--name"
    snapshot = top / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (top / "blobs").mkdir()
    for file in (f for f in model.iterdir() if f.name != SUMS):
        data = file.read_bytes()
        large = file.suffix in (".safetensors", ".gguf")
        blob = hashlib.sha256(data).hexdigest() if large else git_name(data)
        (top / "blobs" / blob).write_bytes(data)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def made(place: Path) -> Path:
    """The only prepared directory."""
    (found,) = (p for p in place.iterdir() if p.is_dir())
    return found


def encoded(directory: Path, bits: str = "int4") -> None:
    with Engine(directory, device="cpu", lossy=Lossy(weights=bits)) as engine:
        engine.prepare()


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def place_of(bit: int, files: list[Path], sizes: list[int]) -> tuple[Path, int]:
    """Return the file that holds a bit of all files together, and its place there."""
    for file, size in zip(files, sizes, strict=True):
        if bit < 8 * size:
            return file, bit
        bit -= 8 * size
    raise IndexError(bit)


def all_found(directory: Path, check: Callable[[Path], None], times: int) -> None:
    """Flip bits one at a time, half of them anywhere, half in files drawn with equal probability."""
    files = sorted(f for f in directory.iterdir() if f.name != SUMS and f.stat().st_size)
    sizes = [f.stat().st_size for f in files]
    check(directory)
    places = st.integers(0, 8 * sum(sizes) - 1).map(lambda bit: place_of(bit, files, sizes))
    in_any_file = st.sampled_from(files).flatmap(
        lambda file: st.tuples(st.just(file), st.integers(0, 8 * file.stat().st_size - 1))
    )

    @given(place=places | in_any_file)
    @settings(max_examples=times)
    def is_found(place: tuple[Path, int]) -> None:
        file, bit = place
        flip(file, bit)
        message = rf"1 of {len(files)} files are not as .*: {re.escape(file.name)} \(has"
        with pytest.raises(BadCheckpoint, match=message):
            check(directory)
        flip(file, bit)

    is_found()
    check(directory)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def elsewhere(file: Path) -> None:
    outside = file.parent.parent / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)
