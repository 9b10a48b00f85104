"""No file of a job is written over."""

from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.job.apart import check_apart


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
        check_apart(read, written)


def test_what_may_be_given_twice(tmp_path: Path) -> None:
    """A file that is only read, a device, a directory, and names that are not given."""
    one = str(tmp_path / "x")
    check_apart({"a": one, "b": one}, {"c": None, "d": None, "e": "/dev/null", "f": "/dev/null"})
    check_apart({"a": str(tmp_path)}, {"b": str(tmp_path)})
