"""The cache of prepared weights: built once, by one process, whole or not at all."""

import fcntl
import hashlib
import logging
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from flexengine.errors import BadCheckpoint, InvalidInput, OutOfMemory
from flexengine.model import prepare
from flexengine.model import shards as shard_files
from flexengine.model.prepare import prepared
from flexengine.model.verify import Verifier, digest_of, read_sums
from flexengine.shell.cachedir import contents
from tests.helpers.listening import listening

pytestmark = pytest.mark.usefixtures("cache")


def small_build(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_built_once_private_and_keyed_by_content(tmp_path, monkeypatch):
    cache = tmp_path / "fresh" / "prepared"  # nothing made its parent before
    monkeypatch.setenv("FLEXENGINE_CACHE", str(cache.parent))
    file, calls = tmp_path / "x.gguf", []
    file.write_bytes(b"a" * 3_000_000)

    def build(directory: Path) -> None:
        calls.append(directory)
        small_build(directory)

    first = prepared(file, [file], build)
    assert prepared(file, [file], build) == first
    assert len(calls) == 1
    assert calls[0] != first
    assert {path.stat().st_mode & 0o777 for path in (cache.parent, cache, first)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in [*first.iterdir(), *cache.glob("*.lock")]} == {0o600}
    stat = file.stat()
    for change in (b"b" + b"a" * 2_999_999, b"a" * 2_999_999 + b"b", b"a" * 3_000_001):
        file.write_bytes(change)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert prepared(file, [file], build) != first
    file.write_bytes(b"a" * 3_000_000)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    copy = shutil.copy(file, tmp_path / "y.gguf")
    assert prepared(file, [file], build) == prepared(copy, [copy], build) == first
    assert len(calls) == 4


def test_a_file_is_hashed_once_and_again_after_any_change(tmp_path, cache, monkeypatch):
    """A digest is stored with size and times, of which a program cannot set the ctime; of a file that has just changed,
    whose next change may leave the same times, for this process only."""
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    file.write_bytes(b"a" * 100)
    other.write_bytes(b"b")
    read = []
    monkeypatch.setattr(prepare, "digest_of", lambda path, count: (read.append(path.name), digest_of(path, count))[1])
    monkeypatch.setattr(prepare, "_YOUNG", 1e6)
    first = prepare.digests([file, other])
    assert first == [hashlib.sha256(path.read_bytes()).hexdigest() for path in (file, other)]
    assert prepare.digests([file]) == first[:1]
    assert sorted(read) == ["a.safetensors", "b.safetensors"]
    for young in (1e6, -1.0, 1e6):  # as another process each
        monkeypatch.setattr(prepare, "_YOUNG", young)
        prepare._digests.clear()
        assert prepare.digests([file, other]) == prepare.digests([file, other]) == first
    assert sorted(read) == 3 * ["a.safetensors"] + 3 * ["b.safetensors"]
    stat = file.stat()
    time.sleep(0.02)  # the clock of the file system has steps of some milliseconds
    file.write_bytes(b"a" * 50 + b"b" + b"a" * 49)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare.digests([file, other])[0] != first[0]
    next(cache.glob("*.sha256")).write_bytes(b"\xff damaged")
    assert prepare.digests([other]) == first[1:]
    assert not [name for name, _ in contents(cache.parent).ignored if name.startswith("prepared")]


def test_long_hashing_is_announced(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"a" * 100)
    for most, level in ((100, logging.DEBUG), (99, logging.INFO)):
        monkeypatch.setattr(prepare, "_LONG", most)
        monkeypatch.setattr(prepare, "_digests", {})
        with listening() as heard:
            prepare.digests([file])
        assert [(entry.name, entry.level) for entry in heard if entry.state == "began"] == [("hashing", level)]


def test_marks_are_of_the_file_and_its_ends(tmp_path):
    """Stores through a memory map need not change the times of a file."""
    file = tmp_path / "a"
    file.write_bytes(b"a" * 300_000)
    found = [prepare.file_marks(file)]
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        for place in (5, 6, 299_999):
            mapped[place] = 0
            size, *_, digest = prepare.file_marks(file).split()
            found.append(digest)
    assert len(set(found)) == 4
    about = file.stat()
    assert (int(size), *map(str, (about.st_dev, about.st_ino))) == (300_000, *prepare.file_marks(file).split()[3:5])


def test_hashing_ends_at_the_next_block_if_it_is_stopped(tmp_path, monkeypatch):
    """Ctrl-C while 40 files are hashed by 2 threads: queued ones are not begun, running ones end."""
    files = [tmp_path / str(number) for number in range(40)]
    began = []

    def endless(file, count):
        began.append(file)
        while True:
            time.sleep(0.01)
            count(1)

    def interrupted(self):
        while len(began) < 2:
            time.sleep(0.001)
        raise KeyboardInterrupt

    for file in files:
        file.write_bytes(b"x")
    monkeypatch.setattr(prepare, "_HASHERS", 2)
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(prepare, "digest_of", endless)
    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.digests(files)
    assert len(began) == 2


def test_converted_files_are_hashed_once(tmp_path, monkeypatch):
    """Weights that are encoded from a converted model are named by the digests that were written with it."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x")
    (weights,) = prepared(file, [file], two_files).glob("*.safetensors")
    monkeypatch.setattr(prepare, "digest_of", lambda *_: pytest.fail("was hashed again"))
    assert prepare.digests([weights]) == [hashlib.sha256(weights.read_bytes()).hexdigest()]


def racer(file: Path, log: Path) -> None:
    def build(directory: Path) -> None:
        with log.open("a") as out:
            out.write("built\n")
        time.sleep(0.3)
        small_build(directory)

    assert (prepared(file, [file], build) / "config.json").read_text() == "{}"


def test_racing_processes_build_once(tmp_path, cache):
    file, log = tmp_path / "x.gguf", tmp_path / "log"
    file.write_bytes(b"x")
    fork = multiprocessing.get_context("fork")
    racers = [fork.Process(target=racer, args=(file, log)) for _ in range(5)]
    for process in racers:
        process.start()
    for process in racers:
        process.join(30)
    assert [process.exitcode for process in racers] == [0] * 5
    assert log.read_text() == "built\n"
    assert sorted(p.suffix for p in cache.iterdir()) == ["", ".lock"]


def killed(file: Path, started: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        started.touch()
        time.sleep(60)

    prepared(file, [file], build)


@pytest.mark.parametrize("same", [True, False])
def test_a_killed_conversion_is_cleaned_up_and_done_again(tmp_path, cache, same):
    file, other, started = tmp_path / "x.gguf", tmp_path / "y.gguf", tmp_path / "started"
    file.write_bytes(b"x")
    other.write_bytes(b"y")
    process = multiprocessing.get_context("fork").Process(target=killed, args=(file, started))
    process.start()
    while not started.exists():
        time.sleep(0.01)
    assert (prepared(other, [other], small_build) / "config.json").is_file()
    assert len(list(cache.glob("*.tmp-*"))) == 1  # it still runs, so its directory was left alone
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if same:
        done = prepared(file, [file], small_build)
        assert sorted(f.name for f in done.iterdir()) == ["SHA256SUMS", "config.json", "prepared.json"]
    else:
        other.write_bytes(b"z")
        prepared(other, [other], small_build)
    assert not list(cache.glob("*.tmp-*"))


def parted(directory: Path) -> None:
    (directory / "one.safetensors").write_bytes(b"1")
    raise KeyboardInterrupt


def test_unfinished_weights_that_nobody_goes_on_with_are_removed(tmp_path, cache):
    """Directories of the last days, directories that a process writes now, and directories that are resumed stay."""
    files = {name: tmp_path / name for name in ("old", "recent", "written", "own", "other")}
    parts = {}
    for name, file in files.items():
        file.write_text(name)
        if name != "other":
            with pytest.raises(KeyboardInterrupt):
                prepared(file, [file], parted, "codes")
            (parts[name],) = set(cache.glob("*.part")) - set(parts.values())
    long_ago = time.time() - 31 * 24 * 3600
    for name in ("old", "written", "own"):
        os.utime(parts[name], (long_ago, long_ago))
    with parts["written"].with_suffix(".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        own = prepared(files["own"], [files["own"]], small_build, "codes")
        assert set(read_sums(own / "SHA256SUMS")) == {"config.json", "one.safetensors", "prepared.json"}
        prepared(files["other"], [files["other"]], small_build, "codes")
        assert set(cache.glob("*.part")) == {parts["recent"], parts["written"]}
    files["other"].write_text("another")
    prepared(files["other"], [files["other"]], small_build, "codes")
    assert set(cache.glob("*.part")) == {parts["recent"]}


COMPLETE = ["SHA256SUMS", "config.json", "model.safetensors", "prepared.json"]
STEPS = ("os.mkdir", "os.open", "os.chmod", "os.fsync", "os.rename", "fcntl.flock")


def dies(file: Path, at: int, after: bool) -> bool:
    """Prepares in a forked child that exits at step `at` (before or after doing it); False if it had no such step."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    try:
        left = iter(range(at, -1, -1))
        for step in STEPS:
            module, name = step.split(".")
            real = getattr(sys.modules[module], name)

            def counted(*args, real=real, **kwargs):
                last = next(left) == 0
                if last and not after:
                    os._exit(9)
                try:
                    return real(*args, **kwargs)
                finally:
                    if last:
                        os._exit(9)

            setattr(sys.modules[module], name, counted)
        prepared(file, [file], two_files)
        os._exit(0)
    finally:  # an exception must not go on into the tests of the parent
        os._exit(1)


def two_files(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"w" * 100_000)
    (directory / "config.json").write_text("{}")


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step_leaves_nothing_or_all(tmp_path, cache, after):
    file, complete, steps = tmp_path / "x.gguf", COMPLETE, 0
    file.write_bytes(b"x")
    while dies(file, steps, after):
        steps += 1
        for final in (place for place in cache.glob("*") if place.is_dir() and ".tmp-" not in place.name):
            assert sorted(part.name for part in final.iterdir()) == complete
            assert (final / "model.safetensors").read_bytes() == b"w" * 100_000
        found = prepared(file, [file], two_files)
        assert sorted(part.name for part in found.iterdir()) == complete
        Verifier().prepared(found)
        assert not list(cache.glob("*.tmp-*"))
        shutil.rmtree(cache.parent)
    assert steps >= 15  # directories, lock, files, directory, rename


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The rename comes after every file and the directory were synced, and the parent is synced after it."""
    file, done = tmp_path / "x.gguf", []
    file.write_bytes(b"x")
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), sync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    final = prepared(file, [file], two_files)
    at = done.index("rename")
    temporary = f"{final.name}.tmp-{os.getpid()}"
    assert sorted(done[: at - 1]) == COMPLETE
    assert done[at - 1 :] == [temporary, "rename", "prepared"]


def test_a_failed_conversion_leaves_nothing(tmp_path, cache):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x")

    def fail(directory: Path) -> None:
        small_build(directory)
        raise BadCheckpoint("no")

    with pytest.raises(BadCheckpoint, match="no"):
        prepared(file, [file], fail)
    assert [f.suffix for f in cache.iterdir()] == [".lock"]


def test_what_cannot_be_read_is_not_called_unwritable(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x")
    with pytest.raises(BadCheckpoint, match=r"x\.gguf cannot be read: .*No such file.*gone"):
        prepared(file, [file], lambda directory: (tmp_path / "gone").read_bytes())
    with pytest.raises(InvalidInput, match="cannot be written"):
        prepared(file, [file], lambda directory: (directory / "no" / "file").write_bytes(b""))


def test_a_disk_that_fills_up_meanwhile(tmp_path, monkeypatch):
    """The library's own error, which is no OSError, becomes one that names the file."""
    (tmp_path / "x").write_bytes(b"x")

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(InvalidInput, match=r"No space left.*one\.safetensors.*set FLEXENGINE_CACHE"):
        prepared(tmp_path / "x", [tmp_path / "x"], lambda d: shard_files.save({}, d / "one.safetensors"))


def test_no_room_and_no_place(tmp_path, monkeypatch):
    with pytest.raises(OutOfMemory, match=r"disk memory: weights.*FLEXENGINE_CACHE"):
        shard_files.check_room(tmp_path, "weights", 10**18)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match="FLEXENGINE_CACHE"):
        prepared(tmp_path / "file", [tmp_path / "file"], small_build)
    with pytest.raises(BadCheckpoint, match="gone"):
        prepared(tmp_path / "gone", [tmp_path / "gone"], small_build)
