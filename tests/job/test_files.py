"""No file of a job is written over, and files appear complete or not at all."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.job.files import check_model_kept, check_not_overwritten, write_whole
from flexengine.job.own_process import started

WRITER = """
import signal
from flexengine.job.files import whole_stdout
signal.signal(signal.SIGUSR1, lambda *_: None)
out = whole_stdout()
out.write(b"x" * 2_000_000)
out.flush()
"""


@pytest.mark.parametrize(("read", "written", "pair"), [
    ({"a": "x"}, {"b": "x"}, "a and b"), ({"a": "x"}, {"b": "./x"}, "a and b"), ({"a": "link"}, {"b": "x"}, "a and b"),
    ({}, {"b": "new", "c": "new"}, "b and c"), ({"a": None, "b": "x"}, {"c": "y", "d": "x"}, "b and d"),
])  # fmt: skip
def test_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: dict[str, str], written: dict[str, str], pair: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").touch()
    Path("link").symlink_to("x")
    with pytest.raises(InvalidInput, match=f"^{pair} are one file, .*; give each a file of its own$"):
        check_not_overwritten(read, written)


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    check_not_overwritten({"in": str(tmp_path / "a")}, {"out": str(tmp_path / "c")})
    check_model_kept(str(tmp_path), {"out": str(tmp_path / "a")})


def test_files_of_a_model_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    for name in ("m/config.json", "m/model.safetensors", "m/tokenizer_config.json", "m.gguf", "m/trace.json"):
        Path(name).touch()
    Path("link").symlink_to("m")
    pairs = [("m", "m/config.json"), ("link", "m/config.json"), ("m", "link/config.json"), ("m.gguf", "m.gguf"),
             ("m", "m/model.safetensors"), ("m", "m/tokenizer_config.json")]  # fmt: skip
    for model, written in pairs:
        with pytest.raises(InvalidInput, match=f"^--trace {written} would replace a file of the model {model}; name"):
            check_model_kept(model, {"--trace": written})
    check_model_kept("m", {"--trace": "m/trace.json", "--plot": "m/new.json", "--report": "m.gguf", "--save": None})
    check_model_kept("a/hub-id", {"--trace": "m/config.json"})
    check_model_kept(None, {"--trace": "m/config.json"})


def test_what_may_be_given_twice(tmp_path: Path) -> None:
    """A file that is only read, a device, a directory, and names that are not given."""
    one = str(tmp_path / "x")
    check_not_overwritten({"a": one, "b": one}, {"c": None, "d": None, "e": "/dev/null", "f": "/dev/null"})
    check_not_overwritten({"a": str(tmp_path)}, {"b": str(tmp_path)})


@pytest.mark.parametrize(("number", "words"), [
    (errno.ENOSPC, "B are free"), (errno.EIO, "the file cannot be written: Input/output error"),
])  # fmt: skip
def test_a_failed_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    """Python names no file in errors of `write` and `fsync`. The old file stays, and nothing else."""
    (path := tmp_path / "results.json").write_text("old")

    def fail(_: int) -> None:
        raise OSError(number, {errno.ENOSPC: "No space left on device", errno.EIO: "Input/output error"}[number])

    monkeypatch.setattr("flexengine.job.files.os.fsync", fail)
    with pytest.raises(OSError, match=words) as caught:
        write_whole(path, b"new")
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


def _signalled(process: "subprocess.Popen[bytes]") -> bytes:
    """Return the output of a process that gets signals while it writes to a full pipe."""
    assert process.stdout is not None
    start = process.stdout.read(1)
    for number in (signal.SIGUSR1, signal.SIGSTOP, signal.SIGCONT):
        time.sleep(0.1)  # it waits for the pipe
        process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait() == 0
    process.stdout.close()
    return start + rest


def test_a_signal_takes_no_bytes_of_an_unbuffered_output() -> None:
    """Python's own stream would write about 65 kB, the size of a pipe."""
    command = [sys.executable, "-u", "-c", WRITER]
    assert len(_signalled(subprocess.Popen(command, stdout=subprocess.PIPE))) == 2_000_000


def test_output_of_a_process_of_its_own_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "writes_much.py").write_text(WRITER.replace("whole_stdout()", "__import__('sys').stdout.buffer"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with open(os.devnull, "rb") as null:
        process = started("writes_much", stdin=null, stderr=subprocess.DEVNULL)
        assert len(_signalled(process)) == 2_000_000
