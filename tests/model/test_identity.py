"""A job continues if its model is the same, also if files were copied, touched or made again, and not otherwise."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flexengine.job.same_job import differences, rewritten
from flexengine.model import identity
from flexengine.model.identity import SAMPLE
from flexengine.shell.commands.run import main
from tests.helpers.tiny_gguf import tiny_gguf

ROWS = "".join(json.dumps({"prompt_token_ids": [5 + i, 6]}) + "\n" for i in range(3))


pytestmark = pytest.mark.usefixtures("one_thread")


def safetensors_model(families: Any, folder: Path) -> Path:
    return Path(shutil.copytree(families("llama").directory, folder / "m"))


def gguf_model(families: Any, folder: Path) -> Path:
    return tiny_gguf(folder / "m.gguf")


def bin_model(families: Any, folder: Path) -> Path:
    (folder / "m").mkdir()
    shutil.copy(families("llama").directory / "config.json", folder / "m")
    torch.save(families("llama").model.state_dict(), folder / "m" / "pytorch_model.bin")
    return folder / "m"


MODELS: dict[str, Callable[[Any, Path], Path]] = {
    "safetensors": safetensors_model, "gguf": gguf_model, "bin": bin_model,
}  # fmt: skip


def copy_cache(cache: Path, model: Path) -> None:
    """Copies get times of their own."""
    shutil.move(cache / "prepared", cache / "old")
    shutil.copytree(cache / "old", cache / "prepared", copy_function=shutil.copyfile)


def delete_cache(cache: Path, model: Path) -> None:
    shutil.rmtree(cache / "prepared", ignore_errors=True)


def touch(cache: Path, model: Path) -> None:
    for file in model.iterdir() if model.is_dir() else [model]:
        file.touch()


def touch_cache(cache: Path, model: Path) -> None:
    for file in (cache / "prepared").rglob("*.safetensors"):
        file.touch()


def copy_model(cache: Path, model: Path) -> None:
    old = model.rename(model.with_name("old"))
    if old.is_dir():
        shutil.copytree(old, model, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(old, model)


CASES = [(kind, change) for kind in MODELS for change in (touch, copy_model)] + [
    (kind, change) for kind in ("gguf", "bin") for change in (copy_cache, delete_cache, touch_cache)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "change"), CASES, ids=[f"{kind} {change.__name__}" for kind, change in CASES])
def test_the_same_model_goes_on(
    families: Any, tmp_path: Path, own_cache: Path, capsys: Any, kind: str, change: Callable[[Path, Path], None]
) -> None:
    model = MODELS[kind](families, tmp_path)
    (tmp_path / "in.jsonl").write_text(ROWS)
    words = [str(tmp_path / "in.jsonl"), "--model", str(model), "--max-tokens", "3", "--ignore-eos"]
    assert main([*words, "--output", str(tmp_path / "whole.jsonl")]) == 0
    words += ["--output", str(tmp_path / "out.jsonl")]
    assert main([*words, "--limit", "1"]) == 0
    change(own_cache, model)
    capsys.readouterr()
    assert main(words) == 0, capsys.readouterr().err
    assert "1 of 3 rows were done before" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("kind", MODELS)
def test_a_flipped_bit_is_another_model_and_named(
    families: Any, tmp_path: Path, own_cache: Path, capsys: Any, kind: str
) -> None:
    model = MODELS[kind](families, tmp_path)
    (tmp_path / "in.jsonl").write_text(ROWS)
    words = [str(tmp_path / "in.jsonl"), "--model", str(model), "--output", str(tmp_path / "out.jsonl")]
    assert main([*words, "--max-tokens", "1"]) == 0
    (file,) = [model] if model.is_file() else (p for p in model.iterdir() if p.suffix in (".safetensors", ".bin"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main([*words, "--max-tokens", "1"]) == 2
    said = capsys.readouterr().err
    assert f"model file {file.name} has other contents of the same size" in said or "cannot be" in said
    assert "--restart" in said or kind == "bin"  # torch compares the CRC of what it reads


# Marks.


def differ(was: Any, now: Any) -> list[str]:
    return differences({"model_files": was}, {"model_files": now})


def write(path: Path, size: int = 40) -> Path:
    """Three tensors, of which the middle one is large."""
    sizes = {"a": 100, "b": size * SAMPLE, "c": 100}
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randint(0, 255, (k,), dtype=torch.uint8, generator=generator) for n, k in sizes.items()}
    save_file(tensors, path)
    return path


def changed(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_byte_of_a_small_model_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.safetensors")
    monkeypatch.setattr(identity, "PLACES", 2)
    was = identity.marks({"m": file}, [file], {})
    for at in (10 * SAMPLE, 10):  # the latter in a name in the header
        changed(file, at)
        os.utime(file, ns=(0, 7))
        now = identity.marks({"m": file}, [file], was)
        assert differ(was, now) == ["model file m has other contents of the same size"]
        changed(file, at)
        assert not differ(was, identity.marks({"m": file}, [file], was))


def test_samples_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples cover the ends of the file, evenly spread positions and the first bytes of tensors, for any file
    times."""
    file = write(tmp_path / "m.safetensors", 400)
    size, start = file.stat().st_size, file.stat().st_size - 400 * SAMPLE - 100
    monkeypatch.setattr(identity, "WHOLE", size - 1)
    monkeypatch.setattr(identity, "PLACES", 8)
    was = identity.marks({"m": file}, [file], {})
    assert was["m"]["sha256"] is None
    seen = {10: True, size - 1: True, size // 8: True, start + 10: True, size // 2 + 5 * SAMPLE: False}
    for at, found in seen.items():
        changed(file, at)
        os.utime(file, ns=(was["m"]["mtime_ns"],) * 2)
        now = identity.marks({"m": file}, [file], was)
        assert bool(differ(was, now)) is found, at
        assert rewritten({"model_files": was}, {"model_files": now}) == []
        changed(file, at)
    now = identity.marks({"m": file}, [file], was)
    assert not differ(was, now)
    assert rewritten({"model_files": was}, {"model_files": now}) == ["m"]


def test_what_has_its_size_and_time_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.safetensors")
    was = identity.marks({"m": file}, [file], {})
    monkeypatch.setattr(identity, "_hashed", lambda path: pytest.fail(f"{path} was hashed"))
    assert identity.marks({"m": file}, [file], was) == was


def test_messages() -> None:
    same = {"bytes": 1000, "mtime_ns": 1, "sample": "x", "sha256": "y"}
    was = {"a": same, "b": same, "c": same}
    assert differ(was, {"a": {**same, "mtime_ns": 2}, "b": {**same, "bytes": 2000, "sha256": "z"}, "d": same}) == [
        "model file b had 1,000 bytes, and has 2,000 now", "model file c is missing",
        "model file d was added",
    ]  # fmt: skip
    many = differ({str(i): same for i in range(9)}, {})
    assert len(many) == 5
    assert many[-1] == "5 more model files have changed"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 63, 64, 65, 66, 100, 130])
def test_at_least_64_tensors_are_sampled(count: int, tmp_path: Path) -> None:
    """A byte that differs at the start of a tensor is seen for 64 tensors of a file, or for all."""
    path, size = tmp_path / "weights", 1 << 30
    with path.open("wb") as file:
        file.truncate(size)  # a hole: nothing is written
    step = size // (count + 1)
    starts = [identity.SAMPLE + i * step for i in range(count)]
    before, seen = identity._sampled(path, size, starts), 0
    for start in starts:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x")
            file.flush()
            seen += identity._sampled(path, size, starts) != before
            file.seek(start)
            file.write(b"\0")
    assert seen >= min(count, 64)
