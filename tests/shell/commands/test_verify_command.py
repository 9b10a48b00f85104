"""flexengine verify: what it compares, what it says of each damaged file, and the checksums that it writes."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexengine.model.prepare import prepared
from flexengine.model.source import resolve
from flexengine.model.verify import SUMS, read_sums
from flexengine.shell.commands import verify as command
from tests.helpers.sums import elsewhere, encoded, flip, list_sums, pipe, snapshot_of
from tests.helpers.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.usefixtures("own_cache")


class Verify:
    """The command, with its code, streams and JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: object) -> str:
        self.capsys.readouterr()
        self.code = command.main([str(word) for word in words])
        self.out, self.err = self.capsys.readouterr()
        return self.out

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    return Verify(capsys)


@pytest.fixture
def bare(families: Any, tmp_path: Path) -> Path:
    """A model directory without sums."""
    return Path(shutil.copytree(families("llama").directory, tmp_path / "model"))


@pytest.fixture
def model(bare: Path) -> Path:
    """A model directory with its sums."""
    return list_sums(bare)


def files_of(*directories: Path) -> list[Path]:
    return [f for directory in directories for f in directory.rglob("*") if f.is_file() and f.name != SUMS]


def sha256sum(directory: Path, name: str) -> int:
    """Return the exit code of coreutils' own comparison."""
    command = ["sha256sum", "--quiet", "--strict", "-c", name]
    return subprocess.run(command, cwd=directory, capture_output=True).returncode


# Comparing.


def test_an_intact_model(verify: Verify, model: Path) -> None:
    text = verify(model)
    assert verify.code == 0
    assert text.startswith(f"intact: model: {len(files_of(model))} files, ")
    assert verify.err == ""
    found = verify.json(model)
    assert found["result"] == "intact"
    assert (found["files"], found["bytes"]) == (len(files_of(model)), sum(f.stat().st_size for f in files_of(model)))
    assert found["damaged"] == found["prepared"] == []


def test_a_missing_config_is_damage(verify: Verify, model: Path) -> None:
    (model / "config.json").unlink()
    (entry,) = verify.json(model)["damaged"]
    assert (entry["file"], entry["reason"]) == (str(model / "config.json"), "missing")


def test_sums_are_written_for_models_only(verify: Verify, tmp_path: Path) -> None:
    verify(tmp_path, "--write")
    assert verify.code == 2
    assert "has no config.json" in verify.err
    assert not (tmp_path / SUMS).exists()


def test_one_line_for_each_damaged_file(verify: Verify, model: Path) -> None:
    """More than a message of a run names, and files of all kinds."""
    for number in range(12):
        (model / f"{number}.json").write_text("{}")
    list_sums(model)
    right = read_sums(model / SUMS)
    for number in range(12):
        flip(model / f"{number}.json", 3)
    flip(model / "model.safetensors", 9999)
    (model / "vocab.txt").touch()
    (model / "generation_config.json").unlink(missing_ok=True)
    gone = {"generation_config.json"} & set(right)
    lines = verify(model).splitlines()
    assert verify.code == 2
    damaged = {f"{n}.json" for n in range(12)} | {"model.safetensors", "vocab.txt"} | gone
    assert len(lines) == len(damaged) + 1
    for line in lines[:-1]:
        name = Path(line.split(": ")[1]).name
        damaged.remove(name)
        if name == "vocab.txt":
            assert line.endswith(f": not listed in {SUMS}")
        elif name in gone:
            assert line.endswith(": missing")
        else:
            has = hashlib.sha256((model / name).read_bytes()).hexdigest()
            assert line == f"damaged: {model / name}: has {has}, expected {right[name]}"
    assert not damaged
    assert lines[-1].startswith("damaged: model: ")
    assert "get the damaged files again" in verify.err


def test_a_damaged_index_hides_no_other_damage(verify: Verify, model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    list_sums(model)
    index.write_text("{")
    flip(model / "model.safetensors", 9)
    found = verify.json(model)
    assert verify.code == 2
    assert [Path(each["file"]).name for each in found["damaged"]] == [index.name, "model.safetensors"]


def cut(file: Path) -> None:
    os.truncate(file, 5)


@pytest.mark.parametrize("hurt", [Path.unlink, cut, pipe, elsewhere])
def test_damage_of_other_kinds(verify: Verify, model: Path, hurt: Callable[[Path], None]) -> None:
    hurt(model / "model.safetensors")
    (entry,) = verify.json(model)["damaged"]
    assert verify.code == 2
    assert entry["file"] == str(model / "model.safetensors")


def test_a_list_that_is_no_list(verify: Verify, model: Path) -> None:
    (model / SUMS).write_text("hello\n")
    text = verify(model)
    assert verify.code == 2
    assert "line 1: 'hello' is not what sha256sum writes" in text


def test_no_checksums(verify: Verify, bare: Path) -> None:
    text = verify(bare)
    assert verify.code == 2
    assert text.startswith("no checksums: model: 0 files")
    assert f"flexengine verify {bare} --write" in verify.err
    assert verify.json(bare)["result"] == "no checksums"
    assert verify.code == 2


def test_the_hub_s_cache(verify: Verify, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = snapshot_of(bare, tmp_path / "hub")
    assert verify.json(snapshot)["result"] == "intact"
    flip(snapshot / "model.safetensors", 9)
    flip(snapshot / "config.json", 9)
    (snapshot / "vocab.txt").touch()
    assert {Path(each["file"]).name for each in verify.json(snapshot)["damaged"]} == {
        "model.safetensors", "config.json", "vocab.txt"}  # fmt: skip


@pytest.mark.parametrize("model", ["no/such", "/nonexistent", "thing.gguf"])
def test_no_model(verify: Verify, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: pytest.fail("a request to the hub"))
    verify(model)
    assert verify.code == 2
    assert model in verify.err


def test_what_was_prepared(verify: Verify, bare: Path, cache: Path, tmp_path: Path) -> None:
    """Converted, and encoded from it; other models' directories are left out. Nothing is converted for it."""
    file = tiny_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf.sha256").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  m.gguf\n")
    assert verify.json(file)["prepared"] == []
    assert not cache.exists()
    converted = resolve(str(file)).directory

    def encode(folder: Path) -> None:
        (folder / "0.safetensors").write_bytes(b"abc")

    codes = prepared(converted, [file], encode, "x", label="int2")
    other = prepared(bare, [bare / "config.json"], lambda folder: (folder / "config.json").write_text("{}"))
    found = verify.json(file)
    assert verify.code == 0
    assert {(each["kind"], each["format"], each["path"]) for each in found["prepared"]} == {
        ("models", None, str(converted)), ("weights", "int2", str(codes))}  # fmt: skip
    assert found["files"] == 1 + len(files_of(converted, codes))
    flip(codes / "0.safetensors", 1)
    flip(other / "config.json", 0)
    text = verify(file)
    assert verify.code == 2
    assert text.startswith(f"damaged: {codes / '0.safetensors'}: has ")
    assert verify.err == ("flexengine: remove the damaged prepared weights, and they are made again: flexengine cache"
                          f" clear {codes.name[:8]}\n")  # fmt: skip


def test_encoded_weights_of_a_job(verify: Verify, model: Path, cache: Path) -> None:
    encoded(model, "int4")
    assert [(each["kind"], each["format"]) for each in verify.json(model)["prepared"]] == [("weights", "int4")]
    (codes,) = (folder for folder in cache.iterdir() if folder.is_dir())
    damaged = min(codes.glob("*.safetensors"))
    flip(damaged, 999)
    flip(model / "config.json", 5)
    assert {each["file"] for each in verify.json(model)["damaged"]} == {str(damaged), str(model / "config.json")}


# Writing.


def test_written_sums_are_sha256sum_s(verify: Verify, bare: Path) -> None:
    (bare / "sub").mkdir()
    (bare / "sub" / "a b\\c\n.txt").write_text("x")
    (bare / ".git").mkdir()
    (bare / ".git" / "index").touch()
    text = verify(bare, "--write")
    assert verify.code == 0
    assert text.startswith(f"wrote {bare / SUMS}: ")
    assert sha256sum(bare, SUMS) == 0
    listed = read_sums(bare / SUMS)
    assert set(listed) == {str(f.relative_to(bare)) for f in files_of(bare) if ".git" not in f.parts}
    assert verify.json(bare)["result"] == "intact"
    flip(bare / "model.safetensors", 5)
    assert sha256sum(bare, SUMS) == 1
    assert verify.json(bare)["result"] == "damaged"


def test_sums_are_never_replaced(verify: Verify, model: Path) -> None:
    before = (model / SUMS).read_bytes()
    flip(model / "model.safetensors", 5)
    verify(model, "--write")
    assert verify.code == 2
    assert f"{model / SUMS} exists" in verify.err
    assert (model / SUMS).read_bytes() == before
    (model / SUMS).unlink()
    (model / SUMS).symlink_to("/nonexistent")
    verify(model, "--write")
    assert verify.code == 2


def test_the_sum_of_a_gguf_file(verify: Verify, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m.gguf")
    tiny_gguf(tmp_path / "n.gguf")
    found = verify.json(file, "--write")
    assert found == {"written": f"{file}.sha256", "files": 1, "bytes": file.stat().st_size}
    assert sha256sum(tmp_path, "m.gguf.sha256") == 0
    assert verify.json(file)["result"] == "intact"
    assert verify.json(tmp_path / "n.gguf")["result"] == "no checksums"
    list_sums(tmp_path, ["n.gguf"])
    verify(tmp_path / "n.gguf", "--write")
    assert verify.code == 2
    assert "has checksums" in verify.err


def test_models_that_have_sums_elsewhere(verify: Verify, bare: Path, tmp_path: Path) -> None:
    snapshot = snapshot_of(bare, tmp_path / "hub")
    verify(snapshot, "--write")
    assert verify.code == 2
    assert "has checksums: the names of its files in the hub's cache" in verify.err
    assert not (snapshot / SUMS).exists()


def test_pipes_and_links_outside_are_not_read(verify: Verify, bare: Path, tmp_path: Path) -> None:
    os.mkfifo(bare / "pipe")
    verify(bare, "--write")
    assert verify.code == 2
    assert "is a pipe" in verify.err
    (bare / "pipe").unlink()
    (bare / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").touch()
    verify(bare, "--write")
    assert verify.code == 2
    assert "outside" in verify.err
    assert not (bare / SUMS).exists()


def test_a_full_disk_leaves_no_part_of_a_list(verify: Verify, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def full(self: Path, *args: Any, **options: Any) -> Any:
        stream = real(self, *args, **options)
        if self.name == SUMS:

            def fail() -> None:
                raise OSError(28, "No space left on device")

            stream.flush = fail
        return stream

    monkeypatch.setattr(Path, "open", full)
    verify(bare, "--write")
    assert verify.code == 2
    assert "No space left on device" in verify.err
    assert not (bare / SUMS).exists()
