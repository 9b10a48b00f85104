"""No file of a job is written over, and files appear complete or not at all."""

import errno
from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.job.files import check_model_kept, check_not_overwritten, write_whole


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
