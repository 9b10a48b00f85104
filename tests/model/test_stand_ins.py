"""Files and directories in place of a model: pointers, pages, adapters, caches and lone tokenizers, with the remedy."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from flexengine.errors import BadCheckpoint, InvalidInput, ModelNotFound
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.config import load_config
from flexengine.model.source import resolve
from flexengine.model.tokenizer import eos_tokens, load_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976698672\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title>"
READERS = {
    "model.safetensors": read_checkpoint,
    "model.safetensors.index.json": read_checkpoint,
    "pytorch_model.bin": lambda place: resolve(str(place)),
    "m.gguf": lambda place: resolve(str(place / "m.gguf")),
    "config.json": load_config,
    "generation_config.json": lambda place: eos_tokens(place, None),
    "tokenizer.json": load_tokenizer,
    "tokenizer.model": load_tokenizer,
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (POINTER, r"is a Git LFS pointer, not the file itself; run `git lfs pull` .* `hf download`"),
        (PAGE, r"is a page or message of a server, not the file itself; download it again"),
        (b"Entry not found", "is a page or message of a server"),
    ],
)
def test_what_a_failed_download_leaves_is_named(tmp_path: Path, name: str, content: bytes, remedy: str) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=rf"{name} {remedy}"):
        READERS[name](tmp_path)


@pytest.mark.usefixtures("cache")
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"hello", pickle.dumps({"a": Path("/")}), b"PK\x03\x04" + bytes(100), b""])
def test_no_advice_to_run_a_pickle_is_passed_on(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(BadCheckpoint, match="take the model's safetensors checkpoint") as caught:
        resolve(str(tmp_path))
    assert "weights_only" not in str(caught.value)


def adapter(place: Path, **values: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **values}))
    (place / "adapter_model.safetensors").write_bytes(b"")
    return place


def snapshot(root: Path, revision: str) -> Path:
    place = root / "snapshots" / revision
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"")
    return place


def refusal(place: Path) -> str:
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(place))
    return str(caught.value)


def test_a_directory_above_a_model_names_the_model(tmp_path: Path) -> None:
    repository = tmp_path / "models--acme--tiny"
    old, new = snapshot(repository, "1111"), snapshot(repository, "2222")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("2222\n")
    assert f"{new} has one: give that directory" in refusal(repository)
    assert f"{old} has one" in refusal(repository / "snapshots")
    assert f"{old} has one" in refusal(tmp_path)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    said = refusal(adapter(tmp_path / "a", base_model_name_or_path="acme/tiny"))
    assert f"{tmp_path / 'a'} is a LoRA adapter of acme/tiny: merge it first" in said
    assert "is an IA3 adapter of another model" in refusal(adapter(tmp_path / "b", peft_type="IA3"))


def test_an_adapter_below_or_with_a_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    inner = adapter(tmp_path / "trained" / "checkpoint-9", base_model_name_or_path="acme/tiny")
    assert f"{inner} is a LoRA adapter of acme/tiny: merge it first" in refusal(tmp_path / "trained")
    (inner / "config.json").write_text("{}")
    assert "has a config.json, but its only weights are a LoRA adapter of acme/tiny: merge it" in refusal(inner)


def test_a_file_of_a_model_names_what_to_give(tmp_path: Path) -> None:
    place = snapshot(tmp_path, "1")
    assert refusal(place / "model.safetensors").endswith(f"a .gguf file: give its directory, {place}")
    blob = tmp_path / "sha256-12"
    blob.write_bytes(b"GGUF\x03\0\0\0")
    assert refusal(blob).endswith("its content is that of a .gguf file, so give it, or a link to it, this suffix")
    (tmp_path / "quants" / "Q4").mkdir(parents=True)
    (tmp_path / "quants" / "Q4" / "m.gguf").write_bytes(b"")
    assert "it holds Q4/m.gguf: give that file" in refusal(tmp_path / "quants")
    (tmp_path / "quants" / "Q4" / "config.json").write_text("{}")
    assert "it holds m.gguf: give that file as the model" in refusal(tmp_path / "quants" / "Q4")


@pytest.mark.parametrize(
    "address",
    ["https://huggingface.co/acme/tiny", "hf://acme/tiny", "hf.co/acme/tiny", "https://hf.co/acme/tiny/tree/main"],
)
def test_an_address_names_its_hub_id(address: str) -> None:
    with pytest.raises(ModelNotFound, match="is an address: give acme/tiny; a model is"):
        resolve(address)


def test_an_adapter_beside_a_model_is_named_and_no_shard(tmp_path: Path, caplog: Any) -> None:
    place = adapter(snapshot(tmp_path, "1"), base_model_name_or_path="acme/tiny")
    with caplog.at_level(logging.WARNING):
        assert resolve(str(place)).directory == place
    assert "holds a LoRA adapter of acme/tiny, which is not applied; to apply it, merge it first" in caplog.text
    (place / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"holds no \.safetensors file"):
        read_checkpoint(place)


def test_weights_of_another_format_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    assert "no weights (*.safetensors or pytorch_model*.bin); it holds consolidated.00.pth" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "needs", "extra"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "sentencepiece and protobuf", "sentencepiece"),
        ("spiece.model", b"\n\x0e\n\x05<unk>", "sentencepiece and protobuf", "sentencepiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken", "tiktoken"),
        ("tekken.json", b"{}", "mistral-common", "mistral"),
    ],
)
def test_a_lone_tokenizer_file_names_its_package(
    tmp_path: Path, monkeypatch: Any, name: str, content: bytes, needs: str, extra: str
) -> None:
    monkeypatch.setattr("flexengine.model.tokenizer._installed", lambda module: False)
    (tmp_path / name).write_bytes(content)
    remedy = rf"only in {name}, .* without {needs}: type `pip install 'flexengine\[{extra}\]'`.*tokenizer\.json"
    with pytest.raises(InvalidInput, match=remedy):
        load_tokenizer(tmp_path)
