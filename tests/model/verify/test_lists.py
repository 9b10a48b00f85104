"""Lists of checksums: hostile lists lead nowhere, and all that would be read must be listed."""

import json
import os
import re
import signal
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model import verify
from flexengine.model.prepare import prepared
from flexengine.model.source import resolve
from flexengine.model.verify import SUMS, Verifier, read_sums
from tests.helpers.sums import DIGEST, elsewhere, folder, list_sums, pipe

# Lists of sums.


@pytest.mark.parametrize("line", [
    f"{DIGEST}  ../outside", f"{DIGEST}  a/../../outside", f"{DIGEST}  /etc/passwd", f"{DIGEST}  ..", f"{DIGEST}  .",
    f"{DIGEST}  ", f"{DIGEST}  a/", DIGEST, f"{DIGEST} name", f"{DIGEST}\tname", f"{DIGEST[1:]}  short",
    f"{DIGEST}a  long", f"{'g' * 64}  no-hex", f"{'٣' * 64}  digits", f"SHA256 (name) = {DIGEST}", "", "#", "name",
    f"{DIGEST}  crlf\r", f"{DIGEST}  nul\0", f"\\{DIGEST}  bad\\escape", f"\\{DIGEST}  end\\", f"\\\\{DIGEST}  twice",
    f"\\{DIGEST}  ..\\n/../../x", f"{DIGEST}  config.json\n{DIGEST}  ./config.json", "x" * 1_000_000,
])  # fmt: skip
def test_hostile_lists(model: Path, line: str) -> None:
    (model.parent / "outside").touch()
    with (model / SUMS).open("a", newline="") as file:
        file.write(line + "\n")
    with pytest.raises(BadCheckpoint, match=f"{SUMS}, line [45]:") as caught:
        Verifier().directory(model)
    assert len(str(caught.value)) < 600


def test_lists_that_are_no_files_of_a_sane_size(model: Path) -> None:
    text = (model / SUMS).read_bytes()
    for hurt, reason in ((pipe, "a pipe"), (folder, "a directory"), (elsewhere, "is a link to")):
        hurt(model / SUMS)
        with pytest.raises(BadCheckpoint, match=reason):
            Verifier().directory(model)
        (model / SUMS).rmdir() if hurt is folder else (model / SUMS).unlink()
        (model / SUMS).write_bytes(text)
    os.truncate(model / SUMS, 10**12)
    with pytest.raises(BadCheckpoint, match=r"has 1.00 TB; at most"):
        Verifier().directory(model)


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000 + "b", "\udcff", "🦙" * 100])
def test_names_that_cannot_be(model: Path, name: str) -> None:
    with (model / SUMS).open("ab") as file:
        file.write(os.fsencode(f"{DIGEST}  {name}\n"))
    with pytest.raises(BadCheckpoint, match="1 of 4 files"):
        Verifier().directory(model)


def test_what_sha256sum_writes_is_read(model: Path) -> None:
    """As text and as binary, with a second list that has the first, odd names, and files below."""
    for name in (" two  spaces", "*star", "back\\slash", "line\nend", "return\r", "ünï", "#", "sub/x.txt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    for command in ("sha256sum -- * sub/*", "sha256sum -b -- * ./sub/*", "find . -type f -exec sha256sum -- {} +"):
        done = subprocess.run(f"{command} > {SUMS}", shell=True, cwd=model, capture_output=True, text=True)
        assert "not found" not in done.stderr
        Verifier().directory(model)
    (model / SUMS).write_text(re.sub("[0-9a-f]{64}", lambda m: m[0].upper(), (model / SUMS).read_text()))
    Verifier().directory(model)


def test_names_of_our_own_lists_are_read_again(tmp_path: Path, cache: Path) -> None:
    names = {" two  spaces", "back\\slash", "line\nend", "return\r", "\udcff", "ü"}

    def build(directory: Path) -> None:
        for name in names:
            (directory / name).write_bytes(os.fsencode(name))

    (tmp_path / "x").touch()
    directory = prepared(tmp_path / "x", [tmp_path / "x"], build, verifier=Verifier())
    assert set(read_sums(directory / SUMS)) == names | {"prepared.json"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=directory, check=True)


def test_progress_leaves_other_bars_as_they_are(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm's monitor thread is not started for flexengine's bars, and still is for other bars."""
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 10)
    monkeypatch.setattr(tqdm, "monitor", None)
    verify.write_sums(model)
    Verifier().directory(model)
    assert tqdm.monitor_interval == 10
    assert tqdm.monitor is None


def test_the_recipe_lists_all_that_is_wanted(model: Path) -> None:
    """Templates in a folder, and hidden files, which globs find and `sha256sum *` does not."""
    (model / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tool.jinja", "._config.json"):
        (model / name).write_text("x")
    with pytest.raises(BadCheckpoint, match="does not list"):
        Verifier().directory(model)
    (model / SUMS).unlink()
    with pytest.raises(InvalidInput) as told:
        Verifier().directory(model)
    subprocess.run(str(told.value).partition("make them: ")[2], shell=True, check=True)
    Verifier().directory(model)


@pytest.mark.parametrize("content", ["{", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_damaged_index_is_told_by_its_checksum(model: Path, content: str) -> None:
    """The checksum reports it, not the files it names or the JSON parser."""
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    list_sums(model)
    Verifier().directory(model)
    index.write_text(content)
    with pytest.raises(BadCheckpoint, match=r"1 of \d+ files are not as .*index\.json \(has [0-9a-f]{64}, expected"):
        Verifier().directory(model)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_weights_that_an_index_names_must_be_listed(model: Path, index: str) -> None:
    """Weights in an index must be listed under any name."""
    (model / "hidden.weights").write_bytes(b"x")
    (model / index).write_text(json.dumps({"weight_map": {"a": "hidden.weights"}}))
    list_sums(model, [p.name for p in model.iterdir() if p.name not in ("hidden.weights", SUMS)])
    with pytest.raises(BadCheckpoint, match=r"does not list hidden\.weights"):
        Verifier().directory(model)


def test_without_sums_nothing_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / SUMS).unlink()
    monkeypatch.setattr(verify, "digest_of", None)
    recipe = f"find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"
    with pytest.raises(InvalidInput, match=re.escape(f"make them: cd {model} && {recipe}")):
        resolve(str(model), verifier=Verifier())
    gguf = model / "a file.gguf"
    gguf.touch()
    with pytest.raises(InvalidInput, match=r"sha256sum 'a file\.gguf' > 'a file\.gguf'\.sha256"):
        resolve(str(gguf), verifier=Verifier())


def test_memory_is_bounded_and_ctrl_c_is_heard(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    os.truncate(file, 64 << 20)
    tracemalloc.start()
    try:
        verify.digest_of(file, lambda count: None)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    os.truncate(file, 64 << 30)
    (tmp_path / SUMS).write_text(f"{DIGEST}  model.safetensors\n")
    before, verifier = signal.signal(signal.SIGALRM, signal.default_int_handler), Verifier()
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may come at once
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            verifier.directory(tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert verifier.files == 0
