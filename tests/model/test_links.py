"""Model directories whose files are links to files outside: refused, unless the user allows links."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine
from flexengine.errors import BadCheckpoint
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.files import regular_file, set_links
from flexengine.model.verify import SUMS, Verifier, write_sums
from flexengine.shell.commands import measure, quality, run


@pytest.fixture
def linked(families: Any, tmp_path: Path) -> Path:
    """A model directory in which every file is a link to a file of another directory."""
    (directory := tmp_path / "linked").mkdir()
    for file in families("llama").directory.iterdir():
        (directory / file.name).symlink_to(file)
    return directory


def test_links_are_read_if_they_are_allowed(linked: Path, families: Any) -> None:
    family = families("llama")
    with pytest.raises(BadCheckpoint, match=r"is a link to .*, outside .*give allow_symlinks=True if you trust"):
        Engine(str(linked), device="cpu")
    with Engine(str(linked), device="cpu", allow_symlinks=True) as engine:
        results = engine.generate(family.rows[:2])
        assert [r.token_ids[:2] for r in results] == [tokens[:2] for tokens in family.expected[:2]]
        assert "model.safetensors" in engine.fingerprint({})["model_files"]
    with pytest.raises(BadCheckpoint, match="outside"):  # allowing them once is not allowing them always
        Engine(str(linked), device="cpu")


def test_the_option_of_the_commands(linked: Path, tmp_path: Path, families: Any, capsys: Any) -> None:
    (rows := tmp_path / "in.jsonl").write_text(json.dumps({**families("llama").rows[0], "max_tokens": 1}) + "\n")
    for allowed, code in (([], 2), (["--allow-symlinks"], 0)):
        assert run.main([str(rows), "--model", str(linked), "--device", "cpu", *allowed]) == code
        assert ("--allow-symlinks" in capsys.readouterr().err) == (code == 2)
    assert measure.main(["--allow-symlinks"]) == 2
    assert "--allow-symlinks has no effect without a model; remove it" in capsys.readouterr().err
    assert quality.parser().parse_args([str(linked), "--allow-symlinks"]).allow_symlinks


def test_only_the_links_that_were_there_are_allowed(linked: Path, tmp_path: Path) -> None:
    set_links(linked, True)
    link = linked / "model.safetensors"
    assert regular_file(link) == link
    (other := tmp_path / "other").write_bytes(link.read_bytes())
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(BadCheckpoint, match="outside"):
        regular_file(link)
    (linked / "new.json").symlink_to(other)
    with pytest.raises(BadCheckpoint, match="outside"):
        regular_file(linked / "new.json")
    set_links(linked, True)
    assert regular_file(link) == link
    set_links(linked, False)
    with pytest.raises(BadCheckpoint, match="outside"):
        regular_file(link)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", ".."])
def test_names_in_an_index_stay_plain(linked: Path, tmp_path: Path, name: str) -> None:
    (linked / "model.safetensors").rename(tmp_path / "x.safetensors")
    (linked / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    set_links(linked, True)
    with pytest.raises(BadCheckpoint, match="names"):
        read_checkpoint(linked)


def test_links_to_no_regular_file_stay_refused(linked: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (linked / "a.json").symlink_to(tmp_path / "pipe")
    (linked / "b.json").symlink_to(tmp_path / "gone")
    (linked / "c.json").symlink_to(linked / "c.json")
    set_links(linked, True)
    for name, words in (("a.json", "is a pipe"), ("b.json", "missing"), ("c.json", "cannot be reached")):
        with pytest.raises(BadCheckpoint, match=words):
            regular_file(linked / name)


def test_checksums_of_links(linked: Path) -> None:
    write_sums(linked)
    assert (linked / SUMS).exists()
    with pytest.raises(BadCheckpoint, match="outside"):
        Verifier().directory(linked)
    set_links(linked, True)
    Verifier().directory(linked)
