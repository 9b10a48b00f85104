"""flexengine doctor: its output and exit codes, on this machine and on damaged installations."""

import json
import os
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flexengine import __version__
from flexengine.shell.commands import doctor as command
from flexengine.shell.doctor import facts as collected
from flexengine.shell.doctor import machine
from flexengine.shell.doctor.facts import Facts, collect, findings
from flexengine.shell.doctor.machine import Failed


@pytest.fixture(scope="module")
def here(run_cache: Path) -> Facts:
    """The facts of this machine: one process that imports torch, for all tests."""
    return collect()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command with `--json` on given facts that need torch: (exit code, object, standard error)."""

    def call(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = command.main([*words, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return call


def texts(found: Any) -> list[str]:
    return [f"{one['text']}; {one['remedy']}" for one in found["findings"]]


# This machine.


def test_facts_are_those_of_the_system(here: Facts) -> None:
    found = json.loads(json.dumps(here.to_json()))
    assert found["flexengine"] == __version__
    assert found["cpu"]["usable"] == len(os.sched_getaffinity(0))
    assert found["memory"]["total"] == psutil.virtual_memory().total
    assert found["torch"]["version"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
    versions = {library["name"]: library["version"] for library in found["software"]["libraries"]}
    assert versions["transformers"] == metadata.version("transformers")
    assert found["software"]["executable"] == sys.executable
    by_use = {each["use"]: each for each in found["disks"]}
    assert by_use["cache"]["path"] == os.environ["FLEXENGINE_CACHE"] == found["cache"]["path"]
    assert by_use["current"]["path"] == os.getcwd()
    assert by_use["current"]["free"] == pytest.approx(shutil.disk_usage(".").free, rel=0.1)
    assert set(by_use) == {"cache", "offload", "hub", "current"}
    assert found["rates"] is None or found["rates"]["when"] <= time.time()
    assert found["measured"] is None


def test_the_report(here: Facts) -> None:
    text = command.as_text(here, findings(here))
    lines = text.splitlines()
    assert lines[0] == f"flexengine {__version__}"
    subjects = [line.split()[0] for line in lines[2:] if line and not line.startswith(" ")]
    assert subjects[:5] == ["system", "cpu", "memory", "gpu", "kernels"]
    assert f" of {os.cpu_count()} cores" in text
    assert f"torch {torch.__version__}" in text
    assert "unknown" not in text
    assert max(map(len, lines[:20])) < 140
    assert not any(line.endswith(" ") for line in lines)
    assert lines[-1] in ("jobs can run here", "nothing stops or slows jobs here")


def test_a_report_of_other_facts(here: Facts) -> None:
    assert isinstance(here.engine, dict)
    gpu = {"name": "GPU \x1b[2J", "total": 80 * 10**9, "free": 79 * 10**9, "capability": "9.0"}
    rates = {"when": time.time() - 3 * 3600, "disks": {"/d": {"read": 2e9, "write": 1e9, "checkpoint_read": 3e9}},
             "touch": 5e8, "h2d": 2e10, "d2h": 1e10}  # fmt: skip
    engine = here.engine | {"gpus": [gpu], "rates": rates, "measured": {"error": "E"}}
    engine |= {"model": {"name": "a model", "layers": 4, "native": 3, "as_modules": []}}
    text = command.as_text(Facts(*(getattr(here, name) for name in list(Facts.__dataclass_fields__)[:-1]), engine), [])
    assert "GPU \\x1b[2J, 80.0 GB, 79.0 GB free, compute capability 9.0" in text
    assert "measured 3 hours ago, in GB/s" in text
    assert "model        a model: native kernels compute 3 of 4 layers on a CPU" in text
    assert [line.split() for line in text.splitlines() if line.startswith("/d")] == [["/d", "2.00", "1.00"]]
    assert text.endswith("nothing stops or slows jobs here")


def test_a_report_without_facts() -> None:
    failed = Failed("E")
    nothing = Facts(failed, failed, (failed,), failed, failed, failed, failed)
    text = command.as_text(nothing, findings(nothing))
    assert text.count("unknown") == 10
    assert "stops  E" in text
    assert text.endswith("\n\njobs cannot run here")
    assert set(nothing.to_json()) >= {"cpu", "memory", "disks", "engine"}


def test_exit_code_0(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    code, found, err = run()
    assert (code, err) == (0, "")
    assert not any(one["level"] == "stops" for one in found["findings"])


def test_directories_of_the_user(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(collected, "_probed", lambda *args: asked.append(args) or here.engine)
    _, found, err = run("--offload-dir", str(tmp_path / "a"), "--offload-dir", str(tmp_path / "b"), "--measure")
    assert [each["path"] for each in found["disks"] if each["use"] == "offload"] == [
        str(tmp_path / "a"), str(tmp_path / "b")]  # fmt: skip
    assert asked[0][2] is True
    assert "measuring disks and memory" in err


def test_one_directory_of_each_disk_is_measured(tmp_path: Path) -> None:
    found = machine.disk("cache", tmp_path)
    disks = [found, machine.disk("current", Path("/dev/shm")), machine.disk("offload", tmp_path / "offload"),
             machine.disk("hub", Path("/proc")), Failed("E")]  # fmt: skip
    assert machine.apart(disks) == [str(tmp_path / "offload")]
    in_ram = machine.disk("offload", Path("/dev/shm/x"))
    if in_ram.in_ram:
        assert machine.apart([found, in_ram]) == ["/dev/shm/x", str(tmp_path)]


# Damaged installations: a torch that stands before the real one.


@pytest.mark.parametrize(("code", "says"), [
    ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "signal SIGILL"),
    ("import sys; print('hello'); sys.exit(3)", "torch and the kernels cannot be loaded: "),
    ("import os; print('{}', flush=True); os._exit(0)", None), ("import os; os._exit(0)", "IndexError"),
    ("import time; time.sleep(60)", "timed out after 0.5 seconds"),
])  # fmt: skip
def test_a_torch_that_cannot_be_imported(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, says: str | None
) -> None:
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in code:
        monkeypatch.setattr(collected, "_TORCH_SECONDS", 0.5)
    exit_code, found, _ = run()
    assert exit_code == (0 if says is None else 1)
    assert says is None or any(says in text for text in texts(found))
    assert found["cpu"]["usable"] == len(os.sched_getaffinity(0))


def test_a_missing_library(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def missing(name: str) -> str:
        if name in ("greenlet", "transformers"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    monkeypatch.setattr("flexengine.shell.doctor.machine.metadata.version", missing)
    code, found, _ = run()
    assert code == 1
    named = {text.split()[0] for text in texts(found) if "is missing; pip install" in text}
    assert named == {"greenlet", "transformers"}


@pytest.mark.parametrize("root", ["/proc/nowhere", "/dev/null", "/dev/null/x"])
def test_a_cache_that_cannot_be_written(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    monkeypatch.setenv("FLEXENGINE_CACHE", root)
    code, found, _ = run()
    assert code == 1
    assert any("the cache cannot be used" in text and "set FLEXENGINE_CACHE" in text for text in texts(found))


def test_a_folder_of_the_cache_that_cannot_be_written(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch,
                                                      tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    (tmp_path / "prepared").touch()
    code, found, _ = run()
    assert code == 1
    assert any(f"{tmp_path / 'prepared'} cannot be written" in text for text in texts(found))


def test_no_home(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    monkeypatch.setenv("FLEXENGINE_CACHE", "~no-such-user/x")
    code, found, _ = run()
    assert code == 1
    assert any("set FLEXENGINE_CACHE to a directory" in text for text in texts(found))
    assert {each["use"] for each in found["disks"]} == {"hub", "current"}


PROBES = ["cpu", "memory", "disk", "software", "compilers", "_cached", "hub_directory", "_probed"]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("error", [OSError(5, "a\nb"), KeyError("x"), RecursionError(), UnicodeError()])
def test_a_probe_that_fails(
    here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch, probe: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    monkeypatch.setattr(machine if hasattr(machine, probe) else collected, probe, fail)
    code, found, _ = run()
    assert code == (1 if probe in ("_cached", "_probed") else 0)
    if probe != "hub_directory":
        assert any(type(error).__name__ in text or "cannot be examined" in text for text in texts(found))


def test_leftovers_are_named(here: Facts, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(collected, "_probed", lambda *_: here.engine)
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "flexengine-1.spill").write_bytes(b"x" * 12_300)
    assert run()[1]["cache"]["leftovers"] == 0  # it may be in use
    os.utime(tmp_path / "offload" / "flexengine-1.spill", (0, 0))
    _, found, _ = run()
    assert found["cache"]["by_kind"] == {"leftovers": 12_300}
    assert any("left 12.3 kB in the cache; flexengine cache clear leftovers" in text for text in texts(found))
