"""flexengine cache clear never removes items that a running process uses."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexengine.model.prepare import hold, prepared
from flexengine.shell import cachedir
from flexengine.shell.cachedir import open_files
from tests.helpers.caches import Cache, K, full, process

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
    (item,) = cachedir.contents(cache.root).items
    assert item.busy == ""
    assert hold(folder)
    with pytest.raises(cachedir.Kept, match="in use"):
        cachedir.remove(cache.root, item)
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
    code = (
        USE
        + """
import time
folder = prepared(file, [file], None)
for _ in range(20):
    assert (folder / "config.json").exists() and (folder / "SHA256SUMS").exists()
    time.sleep(0.005)
"""
    )
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
    (item,) = cachedir.contents(cache.root).items
    with monkeypatch.context() as patch:
        patch.setattr(cachedir.shutil, "rmtree", lambda name, ignore_errors=False, **_: None)
        cachedir.remove(cache.root, item)  # as if killed before rmtree
    assert {item.kind for item in cachedir.contents(cache.root).items} == {"leftovers"}
    (tmp_path / "file").write_text("")
    prepared(tmp_path, [tmp_path / "file"], lambda folder: (folder / "config.json").touch())
    assert {item.kind for item in cachedir.contents(cache.root).items} == {"models"}
