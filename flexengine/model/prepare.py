"""The prepared-weights cache: checkpoints in other formats and encoded weights, made once, in safetensors directories.

$FLEXENGINE_CACHE or ~/.cache/flexengine
  prepared/<key>/           a model directory, or encoded weights of one, and SHA256SUMS of all files in it; always
                            complete, as it is made by a rename; locked by the processes that use it (in_use.py)
  prepared/<key>.part/      unfinished encoded weights; the next run continues with them, within ABANDONED seconds
  prepared/<key>.tmp-<pid>/ written by the process that holds the lock; garbage if no process holds it
  prepared/<key>.lock       flock: one writer per key; never deleted, so every process locks the same inode
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flexengine.activity import activity, tick
from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.in_use import hold
from flexengine.read_retries import opened

if TYPE_CHECKING:
    from flexengine.model.verify import Verifier

FORMAT = 1  # part of every key; raise it when the conversion changes
ABANDONED = 30 * 24 * 3600  # seconds after the last change, until unfinished weights are removed
NOTE = "prepared.json"  # file in a prepared directory: the model's path as source, FORMAT and label
_MIB = 2**20
_POLL = 0.1  # seconds between two attempts to lock


def fingerprint(files: Iterable[Path], what: str = "") -> str:
    """Return the cache key of a checkpoint, and of `what` was made from it.

    The key is a hash of FORMAT, `what`, and each file's name, size, modification time, first and last MiB.
    """
    digest = hashlib.sha256(f"flexengine {FORMAT}\n{what}".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        with opened(file) as stream:
            digest.update(stream.read(_MIB))
            stream.seek(max(stat.st_size - _MIB, 0))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()[:32]


def directory_for(files: Iterable[Path], what: str = "") -> Path:
    """Return the directory that `prepared` fills. It exists once it is finished. Arguments as there."""
    return cache_root() / "prepared" / fingerprint(files, what)


def prepared(
    source: Path,
    files: Sequence[Path],
    build: Callable[[Path], None],
    what: str = "",
    verifier: "Verifier | None" = None,
    label: str = "",
) -> Path:
    """Return the finished directory for `files`; if it does not exist, `build` fills one under a temporary name first.

    The directory is locked for use until this process ends, so `flexengine cache clear` does not remove it. Processes
    that need the same directory wait for each other. Remains of killed processes are removed.

    Args:
        source: the model, for messages.
        files: files of the checkpoint.
        build: writes files into the directory that it is called with.
        what: kind of data made from the files; "" for a converted model. If it is not "", an interrupted `build`
            is called again with the unfinished directory.
        verifier: compares the directory with its checksums; None for no check.
        label: format of the data, such as "int4", for `flexengine cache`.

    Raises:
        InvalidInput: the cache cannot be written.
        BadCheckpoint: the files cannot be read.

    Errors of `build` are raised too; if what is "", the unfinished directory is then removed.
    """
    try:
        final = directory_for(files, what)
    except OSError as error:
        raise BadCheckpoint(f"{source} cannot be read: {error}") from error
    root = final.parent
    try:
        while not hold(final):
            _private_directory(root)
            with _lock(final):
                if not final.is_dir():
                    _sweep(final)
                    _build(source, final, build, what, label)
    except OSError as error:
        name = Path(error.filename) if isinstance(error.filename, str) else root
        if name in map(Path, files) or not (name.is_relative_to(root) or root.is_relative_to(name)):
            raise BadCheckpoint(f"{source} cannot be read: {error}") from error
        done = "encoded or calibrated" if what else "converted"
        raise InvalidInput(
            f"{source} must be {done} once, but {root} cannot be written: {error};"
            " set FLEXENGINE_CACHE to a directory that can be written, and has room"
        ) from error
    if verifier:
        verifier.prepared(final)
    return final


def _build(source: Path, final: Path, build: Callable[[Path], None], what: str, label: str) -> None:
    """Fill a temporary directory by `build` and rename it to `final`. If `what` is not "", keep it after an error."""
    keep = bool(what)
    temporary = final.with_name(f"{final.name}.part" if keep else f"{final.name}.tmp-{os.getpid()}")
    temporary.mkdir(mode=0o700, exist_ok=keep)
    try:
        build(temporary)
        note = {"source": str(source.resolve()), "format": FORMAT, "label": label}
        (temporary / NOTE).write_text(json.dumps(note), encoding="utf-8")
        from flexengine.model.verify import write_sums

        write_sums(temporary)
        _seal(temporary)
        temporary.rename(final)
        _sync(final.parent)
    except BaseException:
        if not keep:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _lock(final: Path) -> Iterator[None]:
    descriptor = os.open(final.with_name(f"{final.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"waiting for another process that prepares the same weights in {final.parent}"
            with activity("waiting", text, level=logging.INFO):
                _wait_for(descriptor)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int) -> None:
    """Lock a file that another process has locked."""
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tick()
        time.sleep(_POLL)


def _sweep(final: Path) -> None:
    """Remove temporary directories whose writer has ended, and unfinished weights of other keys after ABANDONED.

    The caller holds the lock of `final`.
    """
    for temporary in final.parent.glob("*.tmp-*"):
        _remove_unlocked(temporary, final.name)
    for part in final.parent.glob("*.part"):
        with suppress(FileNotFoundError):  # another process has finished and renamed it
            if part.stem != final.name and part.stat().st_mtime < time.time() - ABANDONED:
                _remove_unlocked(part, final.name)


def _remove_unlocked(temporary: Path, held: str) -> None:
    """Remove a temporary directory if no process holds its lock. held: key whose lock the caller holds."""
    key = temporary.name.partition(".")[0]
    if key == held:
        shutil.rmtree(temporary, ignore_errors=True)
        return
    descriptor = os.open(temporary.with_name(f"{key}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(temporary, ignore_errors=True)
    except BlockingIOError:
        pass  # another process is writing to it
    finally:
        os.close(descriptor)


def _private_directory(path: Path) -> None:
    for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _seal(directory: Path) -> None:
    """Set every file to mode 0600, then fsync the files and the directory."""
    for file in directory.iterdir():
        file.chmod(0o600)
        _sync(file)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
