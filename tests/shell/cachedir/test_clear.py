"""flexengine cache clear: items that are removed, options and questions."""

import os
import pty
from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.shell import cachedir
from flexengine.shell.commands import cache as command
from tests.helpers.caches import Cache, K, full


def test_all(cache: Cache) -> None:
    full(cache)
    listed = cache("--json")
    cleared = cache.clear()
    assert cache.code == 0
    assert cleared["freed_bytes"] == listed["bytes"] > 0
    assert cleared["removed"] == listed["items"]
    assert cache.left() == {"prepared", "kernels", "hardware", "offload"}
    assert (cache.root / "prepared" / f"{K['a']}.lock").exists()  # so that all processes lock the same inode
    cache("clear", "--yes")
    assert cache.out == "removed 0 items, 0 B freed\n"


@pytest.mark.parametrize(("names", "kinds"), [
    (["kernels"], {"kernels"}), (["rates", "weights"], {"rates", "weights"}), (["leftovers"], {"leftovers"}),
    (["tiny"], {"models", "weights", "calibrations"}), (["tiny.gguf"], {"models", "weights", "calibrations"}),
    (["/models/tiny.gguf"], {"models", "weights", "calibrations"}), (["bbbb"], {"weights"}), ([K["1"]], {"kernels"}),
    (["cccccccc", "2222"], {"calibrations", "rates", "leftovers"}), (["unfinished"], {"unfinished"}),
])  # fmt: skip
def test_some(cache: Cache, names: list[str], kinds: set[str]) -> None:
    full(cache)
    before = cache.left()
    removed = cache.clear(*names)["removed"]
    assert {item["kind"] for item in removed} == kinds
    gone = {item["path"] for item in removed}
    assert cache.left() == {path for path in before if not any(path == g or path.startswith(f"{g}/") for g in gone)}


@pytest.mark.parametrize("line", [
    "clear kernels rates --yes --json", "clear --yes kernels rates --json", "--yes clear kernels --json rates",
    "--json --older-than 1h clear kernels --yes rates",
])  # fmt: skip
def test_options_may_stand_anywhere(cache: Cache, line: str) -> None:
    full(cache)
    assert {item["kind"] for item in cache(*line.split())["removed"]} == {"kernels", "rates"}
    assert cache("--json", "list", "weights")["items"][0]["kind"] == "weights"


@pytest.mark.parametrize("name", ["nothing", "bbb", "", "../x", "*", "prepared", "tin"])
def test_unknown_names_remove_nothing(cache: Cache, name: str) -> None:
    full(cache)
    before = cache.left()
    cache("clear", "weights", name, "--yes")
    assert cache.code == 2
    assert f"{name!r} is not in the cache {cache.root}; give a kind (models, weights, " in cache.err
    assert cache.left() == before


def test_older_than(cache: Cache) -> None:
    cache.finished(K["a"], "config.json", days=40)
    cache.finished(K["b"], "config.json", days=20)
    assert [item["name"] for item in cache("--older-than", "3w", "--json")["items"]] == ["aaaaaaaa"]
    assert [item["name"] for item in cache.clear("--older-than", "30d")["removed"]] == ["aaaaaaaa"]
    assert {Path(path).name for path in cache.left()} >= {K["b"]}
    assert cache.clear("models", "--older-than", "0.5h")["removed"]


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1e9d", "30 days", "1y", "9" * 400 + "d", "nan"])
def test_wrong_ages(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--older-than is .*such as 30d"):
        command.age(text)


def test_ages() -> None:
    assert [command.age(text) for text in ("90m", "2h", "1.5d", "1w")] == [5400, 7200, 129600, 604800]


def test_yes_is_needed_and_only_for_clear(cache: Cache) -> None:
    full(cache)
    before = cache.left()
    for words in (["clear"], ["clear", "models"], ["--yes"], ["list", "--yes"]):
        cache(*words)
        assert cache.code == 2
        assert "--yes" in cache.err
        assert cache.left() == before


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)])
def test_the_question_on_a_terminal(cache: Cache, answer: str, gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    full(cache)
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    with open(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        cache("clear", "kernels")
    os.close(ours)
    assert cache.code == 0
    assert "Remove 1 item, 500 B, from" in cache.err
    assert (f"kernels/cpu-{K['1']}.so" not in cache.left()) == gone
    assert ("nothing was removed" in cache.err) == (not gone)


def test_what_cannot_be_removed_is_named(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    full(cache)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cachedir.os, "unlink", fail)
    text = cache("clear", "rates", "--yes")
    assert cache.code == 1
    assert text == "kept: rates 22222222, 60 B (cannot be removed: Permission denied)\nremoved 0 items, 0 B freed\n"
