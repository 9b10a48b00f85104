"""Every damage of a model, and of what was prepared of it, is found."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from flexengine.errors import BadCheckpoint
from flexengine.model import verify
from flexengine.model.source import resolve
from flexengine.model.verify import SUMS, Verifier, read_sums
from tests.helpers.sums import all_found, elsewhere, encoded, flip, folder, list_sums, made, pipe
from tests.helpers.tiny_bin import bin_model
from tests.helpers.tiny_gguf import tiny_gguf

# Damage.


def test_500_flipped_bits_of_a_model(model: Path) -> None:
    all_found(model, Verifier().directory, 500)


def test_500_flipped_bits_of_encoded_weights(model: Path, cache: Path) -> None:
    encoded(model)
    all_found(made(cache), Verifier().prepared, 500)


@pytest.mark.parametrize("kind", ["gguf", "bin"])
def test_200_flipped_bits_of_converted_weights(tmp_path: Path, cache: Path, kind: str) -> None:
    if kind == "gguf":
        resolve(str(tiny_gguf(tmp_path / "m.gguf")))
    else:
        bin_model(tmp_path / "m")
        all_found(list_sums(tmp_path / "m"), Verifier().directory, 200)
        resolve(str(tmp_path / "m"))
    all_found(made(cache), Verifier().prepared, 200)


def test_every_bit_of_a_list_of_sums(model: Path) -> None:
    """What is flipped is found, unless it changes nothing: capital digits mean the same."""
    list_sums(model, ["config.json", "generation_config.json", "model.safetensors"])
    right, found = read_sums(model / SUMS), 0
    for bit in range(8 * (model / SUMS).stat().st_size):
        flip(model / SUMS, bit)
        try:
            Verifier().directory(model)
        except BadCheckpoint:
            found += 1
        else:
            assert read_sums(model / SUMS) == right
        flip(model / SUMS, bit)
    assert found > 8 * 3 * 64 - 400


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grown(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"\0")


def unreadable(file: Path) -> None:
    file.unlink()
    file.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("hurt", [cut, grown, Path.unlink, pipe, folder, elsewhere, unreadable])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_damage(model: Path, hurt: Callable[[Path], None], name: str) -> None:
    (model / "README.md").write_text("listed, though nothing reads it")
    list_sums(model)
    hurt(model / name)
    with pytest.raises(BadCheckpoint, match=re.escape(f"{SUMS} says: {name} (")):
        Verifier().directory(model)


def test_all_that_is_wrong_is_named_up_to_a_number(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.safetensors").write_text(str(number))
    list_sums(tmp_path)
    for number in range(3):
        flip(tmp_path / f"{number:02}.safetensors", 0)
    (tmp_path / "03.safetensors").unlink()
    with pytest.raises(BadCheckpoint) as caught:
        Verifier().directory(tmp_path)
    right, wrong = (hashlib.sha256(text).hexdigest() for text in (b"2", b"3"))
    assert "4 of 20 files" in str(caught.value)
    assert f"02.safetensors (has {wrong}, expected {right}); 03.safetensors (missing); get what is" in str(caught.value)
    for number in range(4, 20):
        flip(tmp_path / f"{number:02}.safetensors", 0)
    with pytest.raises(BadCheckpoint, match=r"20 of 20 files .*07\.safetensors \(.* and 12 more; get what") as caught:
        Verifier().directory(tmp_path)
    assert len(str(caught.value)) < 2000


def test_a_missing_index_is_one_fault_and_hides_no_other(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json", "part.safetensors"):
        (tmp_path / name).write_text(name)
    list_sums(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    flip(tmp_path / "part.safetensors", 0)
    with pytest.raises(BadCheckpoint, match=r"2 of 3 files .*index\.json \(missing\); part\.safetensors"):
        Verifier().directory(tmp_path)
    faults = list[str]()
    Verifier(lambda file, why: faults.append(file.name)).directory(tmp_path)
    assert faults == ["model.safetensors.index.json", "part.safetensors"]


@pytest.mark.parametrize("name", [
    "model-2.safetensors", "tokenizer.json", "tokenizer", "vocab.txt", "spiece.model", "modeling.py", "merges.txt",
    "additional_chat_templates/rag.jinja", ".hidden.json"
])  # fmt: skip
def test_what_would_be_read_must_be_listed(model: Path, name: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).touch()
    with pytest.raises(BadCheckpoint, match=re.escape(f"{SUMS} does not list {name}")):
        Verifier().directory(model)


def test_other_files_need_not_be_listed(model: Path) -> None:
    for name in ("README.md", "LICENSE", "pytorch_model.bin", "model.gguf"):
        (model / name).touch()
    (model / "original").mkdir()
    (model / "original" / "params.json").touch()
    Verifier().directory(model)


def test_vocabularies_of_all_tokenizers_would_be_read() -> None:
    names = set()
    for file in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for files in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", file.read_text(), re.S):
            names |= set(re.findall(r':\s*"([^"]+)"', files))
    assert len(names) > 10
    assert {name for name in names if not any(Path(name).match(pattern) for pattern in verify.READ)} == set()
