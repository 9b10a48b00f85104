"""flexengine cache: what it lists, what it removes, and what it never removes."""

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.cachedir import items as listing
from flexengine.cachedir import removal
from flexengine.cachedir.open_files import open_files
from flexengine.commands import cache as command
from flexengine.errors import InvalidInput
from flexengine.model.in_use import hold
from flexengine.model.prepare import prepared
from flexengine.model.source import resolve
from tests.helpers.tiny_gguf import tiny_gguf

DAY = 24 * 3600
K = {name: name * 32 for name in "abcdef0123456789"}  # keys


class Cache:
    """A cache directory, and the command on it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def __call__(self, *words: str) -> Any:
        self.capsys.readouterr()
        self.code = command.main(words)
        self.out, self.err = self.capsys.readouterr()
        return json.loads(self.out) if "--json" in words else self.out

    def clear(self, *words: str) -> Any:
        return self("clear", *words, "--yes", "--json")

    def file(self, name: str, nbytes: int = 10, days: float = 1.0) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * nbytes)
        os.utime(path, (time.time() - days * DAY,) * 2)
        return path

    def finished(self, key: str, name: str, source: str = "", label: str = "", days: float = 1.0) -> Path:
        """Make a prepared directory with one file `name` of 1,000 bytes and a note."""
        folder = self.root / "prepared" / key
        self.file(f"prepared/{key}/{name}", 1000)
        (folder / "prepared.json").write_text(json.dumps({"source": source, "format": 1, "label": label}))
        os.utime(folder, (time.time() - days * DAY,) * 2)
        return folder

    def left(self) -> set[str]:
        """Return all paths below the root, except locks."""
        return {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.suffix != ".lock"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cache:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return Cache(tmp_path / "cache", capsys)


@contextmanager
def process(code: str, *arguments: object) -> Iterator[None]:
    """Run Python code in a process of its own, from the line it prints to the end of the block."""
    child = subprocess.Popen([sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()", *map(str, arguments)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "\n"
    try:
        yield
    finally:
        child.communicate("\n")


def full(cache: Cache) -> None:
    """One item of each kind and origin, a day old."""
    cache.finished(K["a"], "config.json", "/models/tiny.gguf")
    cache.finished(K["b"], "00000.safetensors", str(cache.root / "prepared" / K["a"]), "int4")
    cache.finished(K["c"], "importances.safetensors", str(cache.root / "prepared" / K["a"]), "float32")
    cache.file(f"prepared/{K['d']}.part/00000.safetensors", 300)
    cache.file(f"prepared/{K['e']}.tmp-77/config.json", 20)
    cache.file(f"prepared/{K['a']}.lock", 0)
    cache.file(f"kernels/cpu-{K['1']}.so", 500)
    cache.file("kernels/tmpab12_x9z/cpu.o", 40)
    cache.file(f"hardware/{K['2']}.json", 60)
    cache.file(f"hardware/{K['2']}.ab12_x9z", 70)
    cache.file("offload/flexengine-ab12.spill", 80)
    cache.file("offload/flexengine-ab12.measuring", 90)
    for path in cache.root.rglob("*"):
        os.utime(path, (time.time() - DAY,) * 2)


# Listing.


def test_no_cache_and_an_empty_one(cache: Cache) -> None:
    assert "0 items, 0 B" in cache()
    assert not cache.root.exists()
    cache.root.mkdir()
    assert cache("--json")["items"] == []
    assert cache.clear()["freed_bytes"] == 0
    assert cache.code == 0


def test_a_cache_that_is_a_file_is_refused(cache: Cache) -> None:
    cache.root.write_text("")
    cache()
    assert cache.code == 2
    assert f"{cache.root} cannot be read" in cache.err


def test_kinds_models_and_sizes(cache: Cache) -> None:
    full(cache)
    found = cache("--json")
    kinds = [(item["kind"], item["model"], item["format"]) for item in found["items"]]
    user = "/models/tiny.gguf"
    assert kinds[:5] == [("models", user, None), ("weights", user, "int4"), ("calibrations", user, "float32"),
                         ("kernels", None, None), ("rates", None, None)]  # fmt: skip
    assert [kind for kind, *_ in kinds[5:]] == ["unfinished"] + 5 * ["leftovers"]
    du = subprocess.run(["du", "-sb", "--apparent-size", cache.root], capture_output=True, text=True).stdout.split()[0]
    folders = sum(p.stat().st_size for p in (cache.root, *cache.root.rglob("*")) if p.is_dir())
    assert found["bytes"] == int(du) - folders
    assert {item["path"] for item in found["items"]} < cache.left()
    assert all(0.99 * DAY < time.time() - item["last_use"] < 1.01 * DAY for item in found["items"])
    assert all(item["busy"] is None for item in found["items"])


def test_the_table(cache: Cache) -> None:
    full(cache)
    lines = cache().splitlines()
    assert lines[0].startswith(f"{cache.root}: 11 items, ")
    head = next(line for line in lines if line.startswith("kind"))
    weights = next(line for line in lines if line.startswith("weights"))
    assert weights[head.index("model") :].startswith("tiny (int4) ")
    assert weights[head.index("last use") :].startswith("1 day ago")
    assert weights[head.index("path") :] == f"prepared/{K['b']}"
    assert lines[-1].startswith("not included: downloads from the hub")


def test_a_model_of_the_hub_has_its_name(cache: Cache) -> None:
    cache.finished(K["a"], "config.json", "/hub/models--org--name/snapshots/0123abcd")
    assert "  org/name  " in cache()


def test_downloads_are_named_and_not_counted(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0").write_bytes(b"x" * 3000)
    (tmp_path / "hub" / "link").symlink_to(blobs / "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = cache("--json")
    assert found["hub"] == {"path": str(tmp_path / "hub"), "bytes": 3000}
    assert found["bytes"] == 0
    cache.clear()
    assert (blobs / "0").stat().st_size == 3000


def test_prepared_weights_of_a_job(cache: Cache, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "small.gguf")
    source = resolve(str(file))
    prepared(source.directory, [file], lambda folder: (folder / "00000.safetensors").touch(), "codes", label="int3")
    found = cache("--json")["items"]
    assert [(item["kind"], item["model"], item["format"]) for item in found] == [
        ("models", str(file), None), ("weights", str(file), "int3")]  # fmt: skip
    assert [item["busy"] for item in found] == 2 * ["in use"]  # by this process


def test_using_what_is_prepared_counts_as_use(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def build(folder: Path) -> None:
        (folder / "config.json").touch()

    made = prepared(tmp_path, [tmp_path / "file"], build)
    os.utime(made, (0, 0))
    assert cache("--older-than", "30d", "--json")["items"]
    assert prepared(tmp_path, [tmp_path / "file"], build) == made
    assert not cache("--older-than", "1h", "--json")["items"]


@pytest.mark.parametrize("note", [b"", b"[1]", b"{", b"[" * 10**5, b'{"source": 5, "label": []}', b"\xff", None])
def test_damaged_notes(cache: Cache, note: bytes | None) -> None:
    folder = cache.finished(K["a"], "config.json")
    (folder / "prepared.json").unlink()
    if note is None:
        os.mkfifo(folder / "prepared.json")
    else:
        (folder / "prepared.json").write_bytes(note)
    assert [item["kind"] for item in cache("--json")["items"]] == ["models"]
    assert cache()
    assert cache.code == 0


def test_names_cannot_write_to_the_terminal(cache: Cache) -> None:
    cache.finished(K["a"], "config.json", "/x/evil\x1b[2J\nname", "\x1b[31m")
    (cache.root / "\x1b[2Jfile").touch()
    text = cache()
    assert "\x1b" not in text
    assert "evil\\x1b[2J\\nname (\\x1b[31m)" in text


def test_notes_in_a_circle_end(cache: Cache) -> None:
    for one, other in ("ab", "ba"):
        cache.finished(K[one], "config.json", os.path.realpath(cache.root / "prepared" / K[other]))
    assert len(cache("--json")["items"]) == 2


# Clearing.


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

    monkeypatch.setattr(removal.os, "unlink", fail)
    text = cache("clear", "rates", "--yes")
    assert cache.code == 1
    assert text == "kept: rates 22222222, 60 B (cannot be removed: Permission denied)\nremoved 0 items, 0 B freed\n"


# Never what a job uses.


USE = """
import sys
from pathlib import Path
from flexengine.model.prepare import prepared
file = Path(sys.argv[1])
prepared(file, [file], lambda folder: (folder / "config.json").touch())
"""


def test_a_model_that_another_process_uses(cache: Cache, tmp_path: Path) -> None:
    """Also one that it has only opened, and reads later."""
    (tmp_path / "file").write_text("")
    with process(USE, tmp_path / "file"):
        (item,) = cache("--json")["items"]
        assert (item["kind"], item["busy"]) == ("models", "in use")
        cleared = cache.clear()
        assert cleared["removed"] == []
        assert [kept["reason"] for kept in cleared["kept"]] == ["in use"]
        assert cache.code == 0
        text = cache("clear", "--yes")
        assert text.startswith(f"kept: models {item['name']} of file, ")
        assert "removed 0 items, 0 B freed" in text
    assert len(cache.clear()["removed"]) == 1


def test_a_job_that_starts_after_the_list_was_made(cache: Cache) -> None:
    folder = cache.finished(K["a"], "config.json")
    (item,) = listing.contents(cache.root).items
    assert item.busy == ""
    assert hold(folder)
    with pytest.raises(removal.Kept, match="in use"):
        removal.remove(cache.root, item)
    assert folder.is_dir()


def test_directories_that_are_being_written(cache: Cache) -> None:
    full(cache)
    with (cache.root / "prepared" / f"{K['d']}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [kept["reason"] for kept in cache.clear("unfinished")["kept"]] == ["being written"]
    assert len(cache.clear("unfinished")["removed"]) == 1


def test_jobs_that_start_while_the_cache_is_cleared(cache: Cache, tmp_path: Path) -> None:
    """A job whose directory is removed before the job has locked it makes the directory again."""
    (tmp_path / "file").write_text("")
    code = USE + """
import time
folder = prepared(file, [file], None)
for _ in range(20):
    assert (folder / "config.json").exists() and (folder / "SHA256SUMS").exists()
    time.sleep(0.005)
"""
    jobs: list[subprocess.Popen[bytes]] = []
    codes, cleared = [], 0
    for _ in range(3):
        jobs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file")]) for _ in range(3)]
        while any(job.poll() is None for job in jobs):
            cleared += len(cache.clear("models")["removed"])
        codes += [job.returncode for job in jobs]
    assert codes == [0] * 9
    assert cleared + len(cache.clear()["removed"]) > 0


LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
OPEN = "import sys; file = open(sys.argv[1])"


def test_kernels_and_files_that_a_process_has_open(cache: Cache) -> None:
    full(cache)
    library, spill = cache.root / f"kernels/cpu-{K['1']}.so", cache.root / "offload/flexengine-ab12.spill"
    system = next(path for path in open_files() if "libc.so" in path or "libc-" in path)
    shutil.copyfile(system, library)
    with process(LOAD, library), process(OPEN, spill), process(OPEN, cache.root / "kernels/tmpab12_x9z/cpu.o"):
        kept = cache.clear("kernels", "leftovers")["kept"]
        assert {(item["path"], item["reason"]) for item in kept} == {
            (f"kernels/{library.name}", "in use"), (f"offload/{spill.name}", "in use"),
            ("kernels/tmpab12_x9z", "in use")}  # fmt: skip
    assert len(cache.clear("kernels", "leftovers")["removed"]) == 3


def test_young_temporary_files_may_be_in_use(cache: Cache) -> None:
    young = cache.file("offload/flexengine-1.measuring", days=0)
    assert [kept["reason"] for kept in cache.clear()["kept"]] == ["written lately"]
    assert young.exists()
    os.utime(young, (time.time() - 700,) * 2)
    assert len(cache.clear()["removed"]) == 1


def test_a_model_that_is_removed_is_made_again(cache: Cache, tmp_path: Path) -> None:
    """In the same process, too, which has the removed directory locked."""
    (tmp_path / "file").write_text("")
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "config.json").touch()

    made = prepared(tmp_path, [tmp_path / "file"], build)
    shutil.rmtree(made)
    assert prepared(tmp_path, [tmp_path / "file"], build) == made
    assert len(built) == 2
    assert cache("--json")["items"][0]["busy"] == "in use"  # the new directory is locked, not only the old one


def test_a_removal_that_was_killed_is_finished_by_the_next_job(cache: Cache, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    cache.finished(K["a"], "config.json")
    (item,) = listing.contents(cache.root).items
    with monkeypatch.context() as patch:
        patch.setattr(removal.shutil, "rmtree", lambda name, ignore_errors=False, **_: None)
        removal.remove(cache.root, item)  # as if killed before rmtree
    assert {item.kind for item in listing.contents(cache.root).items} == {"leftovers"}
    (tmp_path / "file").write_text("")
    prepared(tmp_path, [tmp_path / "file"], lambda folder: (folder / "config.json").touch())
    assert {item.kind for item in listing.contents(cache.root).items} == {"models"}


# Never anything outside the cache.


@pytest.fixture
def outside(tmp_path: Path) -> SimpleNamespace:
    """A directory beside the cache with names that items have."""
    folder = tmp_path / "outside"
    (folder / K["a"]).mkdir(parents=True)
    names = [f"{K['a']}/config.json", f"cpu-{K['1']}.so", f"{K['2']}.json", "flexengine-1.spill", "precious"]
    for name in names:
        (folder / name).write_text("precious")
        os.utime(folder / name, (0, 0))
    return SimpleNamespace(folder=folder, intact=lambda: all((folder / n).read_text() == "precious" for n in names))


@pytest.mark.parametrize("folder", ["prepared", "kernels", "hardware", "offload"])
def test_a_folder_that_is_a_link(cache: Cache, outside: SimpleNamespace, folder: str) -> None:
    cache.root.mkdir()
    (cache.root / folder).symlink_to(outside.folder)
    listed = cache("--json")
    assert listed["items"] == []
    assert listed["ignored"] == [{"path": folder, "reason": "a link, which is not followed"}]
    assert cache.clear()["removed"] == []
    assert outside.intact()
    assert (cache.root / folder).is_symlink()


def test_items_that_are_links(cache: Cache, outside: SimpleNamespace) -> None:
    links = {f"prepared/{K['a']}": K["a"], f"prepared/{K['b']}.part": K["a"], f"prepared/{K['c']}.tmp-1": K["a"],
             f"kernels/cpu-{K['1']}.so": f"cpu-{K['1']}.so", "kernels/tmpab12_x9z": K["a"],
             f"hardware/{K['2']}.json": f"{K['2']}.json",
             "offload/flexengine-1.spill": "flexengine-1.spill"}  # fmt: skip
    for link, target in links.items():
        (cache.root / link).parent.mkdir(parents=True, exist_ok=True)
        (cache.root / link).symlink_to(outside.folder / target)
    assert cache.clear()["removed"] == []
    assert {entry["path"] for entry in cache("--json")["ignored"]} == set(links)
    assert outside.intact()
    assert all((cache.root / link).is_symlink() for link in links)


def test_links_inside_an_item_are_removed_and_not_followed(cache: Cache, outside: SimpleNamespace) -> None:
    folder = cache.finished(K["a"], "config.json")
    for number, target in enumerate((outside.folder, outside.folder / "precious", "/", "/nonexistent", folder)):
        (folder / f"link{number}").symlink_to(target)
    assert cache("--json")["bytes"] < 2000  # nothing outside is counted
    assert len(cache.clear()["removed"]) == 1
    assert not folder.exists()
    assert outside.intact()


def test_a_cache_that_is_itself_a_link_is_the_cache(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    cache.root.symlink_to(tmp_path / "disk")
    cache.finished(K["a"], "config.json")
    assert len(cache.clear()["removed"]) == 1
    assert cache.root.is_symlink()


@pytest.mark.parametrize("what", ["item", "folder"])
def test_a_link_that_takes_an_items_place(cache: Cache, outside: SimpleNamespace, what: str) -> None:
    """Between listing and removing."""
    folder = cache.finished(K["a"], "config.json")
    (item,) = listing.contents(cache.root).items
    (moved,) = (folder,) if what == "item" else (folder.parent,)
    moved.rename(cache.root / "moved")
    moved.symlink_to(outside.folder / K["a"] if what == "item" else outside.folder)
    with pytest.raises(removal.Kept, match="changed since it was listed"):
        removal.remove(cache.root, item)
    assert outside.intact()


def test_another_directory_that_takes_an_items_place(cache: Cache) -> None:
    folder = cache.finished(K["a"], "config.json")
    (item,) = listing.contents(cache.root).items
    folder.rename(cache.root / "moved")
    other = cache.finished(K["a"], "config.json")
    with pytest.raises(removal.Kept, match="changed since it was listed"):
        removal.remove(cache.root, item)
    assert (other / "config.json").exists()


def test_a_link_in_place_of_a_lock(cache: Cache, outside: SimpleNamespace) -> None:
    folder = cache.finished(K["a"], "config.json")
    folder.with_suffix(".lock").symlink_to(outside.folder / "new")
    assert cache.clear()["removed"] == []
    assert not (outside.folder / "new").exists()


def test_only_names_that_flexengine_gives(cache: Cache) -> None:
    """A cache set to a directory with other things in it."""
    names = ["thesis.txt", f"{K['a']}/file", "prepared/thesis.txt", f"prepared/{K['a'].upper()}/config.json",
             f"prepared/{K['a'][:-1]}/config.json", f"prepared/{K['b']}", f"prepared/{K['c']}.part",
             f"prepared/{K['d']}.tmp-x/config.json", f"prepared/{K['e']}.backup/config.json", "kernels/cpu.so",
             f"kernels/cpu-{K['1']}.so.bak", f"kernels/cpu-{K['2']}.so/file", "kernels/tmp/file", "hardware/mine.json",
             f"hardware/{K['1']}.json/file", f"hardware/{K['2']}.json.old", "offload/spill",
             "offload/my.spill"]  # fmt: skip
    for name in names:
        cache.file(name, days=100)
    os.mkfifo(cache.root / "prepared" / K["f"])
    os.mkfifo(cache.root / "hardware" / f"{K['f']}.json")
    before = cache.left()
    assert cache.clear()["removed"] == []
    assert cache.left() == before
    assert len(cache("--json")["ignored"]) == len(names) + 2


def test_folders_that_cannot_be_read(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    full(cache)
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if path in ("prepared", K["a"]):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(listing.os, "open", refuse)
    listed = cache("--json")
    assert {"path": "prepared", "reason": "cannot be read: Permission denied"} in listed["ignored"]
    assert {item["kind"] for item in listed["items"]} == {"kernels", "rates", "leftovers"}
