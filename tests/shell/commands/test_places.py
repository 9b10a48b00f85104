"""A job does not fail because of a directory that it does not use."""

import errno
import json
import os
import pwd
import tempfile
from pathlib import Path
from typing import Any

import pytest

from flexengine.config import cache_root
from flexengine.engine.options import MachineOptions
from flexengine.errors import InvalidInput
from flexengine.kernels import build
from flexengine.measure import store
from flexengine.system.limits import device_of
from tests.helpers.job import Job
from tests.helpers.listening import listening
from tests.helpers.tiny_gguf import tiny_gguf

ON_DISK = {"gpu_batch_size": 8, "num_gpu_batches": 1, "cache": [0, 0, 1]}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def job(families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    made = Job(tmp_path, families("llama"), capsys)
    made.write(made.family.rows)
    (tmp_path / "file").touch()
    return made


def no_space(directory: Any) -> Any:
    return os.statvfs_result([4096, 4096, 100, 0, 0, 100, 0, 0, 0, 255])


@pytest.mark.parametrize("where", ["file", "file/below", "full"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_offload_directory_that_nothing_uses(
    job: Job, where: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan without offloading to disk runs; a policy with offloading is refused before weights are read."""
    if where == "full":
        monkeypatch.setattr("flexengine.system.limits.shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    place = str(job.folder / where)
    reason = "without free space" if where == "full" else "file is no directory to write in"
    assert job("--device", device, "--offload-dir", place) == 0, job.err
    assert [row["token_ids"] for row in job.rows] == job.family.expected
    assert "nothing is offloaded to disk" in job.err
    assert reason in job.err
    policy = job.folder / "policy.json"
    policy.write_text(json.dumps(ON_DISK))
    for more in ((), ("--dry-run",)):
        output = ("--output", str(job.folder / "other.jsonl"))
        assert job("--device", device, "--offload-dir", place, "--policy", str(policy), *output, *more) == 2
        assert f"offload directory {place}" in job.err
        assert reason in job.err
        assert "set --offload-dir" in job.err
        assert not (job.folder / "other.jsonl").exists()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_cache_that_cannot_be_written(job: Job, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs no conversion runs; a model that must be converted or encoded is refused with the remedy."""
    monkeypatch.setenv("FLEXENGINE_CACHE", place := str(job.folder / where))
    assert job() == 0, job.err
    assert [row["token_ids"] for row in job.rows] == job.family.expected
    assert job("--weights", "int8", "--output", str(job.folder / "8.jsonl")) == 2
    assert f"must be encoded or calibrated once, but {place}/prepared cannot be written" in job.err
    assert "set FLEXENGINE_CACHE" in job.err
    model = str(tiny_gguf(job.folder / "m.gguf"))
    assert job("--model", model, "--output", str(job.folder / "g.jsonl")) == 2
    assert f"m.gguf must be converted once, but {place}/prepared cannot be written" in job.err
    assert "set FLEXENGINE_CACHE" in job.err


def test_no_home_directory(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise KeyError("uid not found")

    for name in ("HOME", "FLEXENGINE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(InvalidInput, match=r"home.*set FLEXENGINE_CACHE"):
        cache_root()
    assert job("--device", "cpu") == 0, job.err
    assert "set --offload-dir" in job.err
    assert job("--model", str(tiny_gguf(job.folder / "m.gguf")), "--output", str(job.folder / "g.jsonl")) == 2
    assert "set FLEXENGINE_CACHE" in job.err


def test_built_kernels_are_found_in_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "some.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    with listening() as heard:
        try:
            build.load(sources=[source])
        except build.BuildFailed as error:
            pytest.skip(str(error))
    assert heard.begun() == ["compiling kernels for this CPU, once per machine (one to two minutes)"]
    assert (heard.last("compiling").done, heard.last("compiling").total) == (1, 1)
    heard.clear()

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "cache"))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with listening() as heard, monkeypatch.context() as patched:
        patched.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
        assert build.load(sources=[source]).answer() == 42
    assert not heard
    source.write_text('extern "C" int answer() { return 43; }\n')
    with listening() as heard:
        assert build.load(sources=[source]).answer() == 43
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1
    (said,) = heard.messages
    assert "set FLEXENGINE_CACHE" in said
    assert "Read-only file system" in said


def test_a_machine_is_measured_without_an_offload_directory(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's rates are then assumed, and stored apart from those of a machine with an offload directory."""
    (tmp_path / "file").touch()
    options = (MachineOptions(device="cpu", device_mem="50M", offload_dir=tmp_path / name) for name in ("off", "file"))
    good, bad = (each.machine() for each in options)
    assert not good.no_offload
    assert bad.no_offload
    assert store.fingerprint(good) != store.fingerprint(bad)
    from flexengine.measure import links

    monkeypatch.setattr(links, "COPY_SECONDS", 0.001)
    monkeypatch.setattr(links, "READ_SECONDS", 0.001)
    found = links.measure_links(bad, [families("llama").directory / "model.safetensors"])
    assert found["links"]["disk_write"] == ((1.0, 7e8),)
    assert found["checkpoint_read"]
    assert bad.disk.ledger.used == 0
    for machine in (good, bad):
        machine.close()


def test_the_device_of_a_directory_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: Any) -> None:
    """The device is that of the nearest parent directory that may be read."""
    hidden, expected = tmp_path / "hidden", tmp_path.stat().st_dev
    hidden.mkdir()

    def refusing(real: Any) -> Any:
        def call(path: Any, *how: Any, **more: Any) -> os.stat_result:
            if str(path).startswith(f"{hidden}/"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            found: os.stat_result = real(path, *how, **more)
            return found

        return call

    with monkeypatch.context() as patched:
        for name in ("lstat", "stat"):
            patched.setattr(os, name, refusing(getattr(os, name)))
        found = device_of(hidden / "offload" / "here")
    assert found == expected
