"""Files that appear complete or not at all."""

import errno
from pathlib import Path

import pytest

from flexengine.job.whole_file import write_whole


@pytest.mark.parametrize(("number", "words"), [
    (errno.ENOSPC, "bytes are free"), (errno.EIO, "the file cannot be written: Input/output error"),
])  # fmt: skip
def test_a_failed_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    """Python names no file in errors of `write` and `fsync`. The old file stays, and nothing else."""
    (path := tmp_path / "results.json").write_text("old")

    def fail(_: int) -> None:
        raise OSError(number, {errno.ENOSPC: "No space left on device", errno.EIO: "Input/output error"}[number])

    monkeypatch.setattr("flexengine.job.whole_file.os.fsync", fail)
    with pytest.raises(OSError, match=words) as caught:
        write_whole(path, b"new")
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"
