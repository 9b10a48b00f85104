"""The prepared-weights cache: checkpoints in other formats and encoded weights, made once, in safetensors directories.

$FLEXENGINE_CACHE or ~/.cache/flexengine
  prepared/<key>/           a model directory, or encoded weights of one, and SHA256SUMS of all files in it; always
                            complete, as it is made by a rename; locked by the processes that use it (`hold`)
  prepared/<key>.part/      unfinished encoded weights; the next run continues with them, within ABANDONED seconds
  prepared/<key>.tmp-<pid>/ written by the process that holds the lock; garbage if no process holds it
  prepared/<key>.lock       flock: one writer per key; never deleted, so every process locks the same inode
  prepared/<key>.sha256     digest of a model's file, with the `file_marks` that the file had; the key is of its path
  prepared/<key>.scales     an empty note: scales of a quantised checkpoint with these marks were checked

A key is a hash of contents, so environments and copies of a model share one directory, and a changed file has another.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from pathlib import Path
from threading import Event

from flexengine.activity import activity, advance, tick
from flexengine.config import cache_root, mark_used, sync_path
from flexengine.errors import BadCheckpoint, InvalidInput, size
from flexengine.model.verify import SUMS, Verifier, digest_of, read_sums, write_sums
from flexengine.system.read_retries import opened

FORMAT = 4  # part of every key; raise it when the conversion changes
ABANDONED = 30 * 24 * 3600  # seconds after the last change, until unfinished weights are removed
NOTE = "prepared.json"  # file in a prepared directory: the model's path as source, FORMAT and label
_HASHERS = 8  # threads at most
_YOUNG = 3.0  # seconds after a change in which another change may leave the same times; digests are not stored then
_END = 2**16  # bytes at each end of a file that are compared
_LONG = 4 << 30  # bytes; hashing more is announced before, as it may take minutes
_POLL = 0.1  # seconds between two attempts to lock
_digests: dict[tuple[Path, str], str] = {}  # digest by path and `file_marks` of a file, hashed by this process
_held: dict[Path, int] = {}  # descriptor by directory that this process uses


def hold(directory: Path) -> bool:
    """Lock a prepared directory for use until this process ends, and mark it as used now.

    The lock is a shared flock on the directory; where the file system has no locks, the directory is used without. A
    process that removes the directory (`flexengine cache clear`) first takes the exclusive lock, and renames the
    directory before it releases the lock.

    Returns:
        False if the directory does not exist, or was removed or replaced while this call waited for the lock.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        same = os.path.samestat(os.fstat(descriptor), os.stat(directory))
    except OSError:
        same = False
    if not same:
        os.close(descriptor)
        return False
    old = _held.pop(directory, None)
    _held[directory] = descriptor
    if old is not None:
        os.close(old)
    mark_used(directory)
    return True


def fingerprint(files: Iterable[Path], what: str = "") -> str:
    """Return the cache key of a checkpoint, and of `what` was made from it: a hash of FORMAT, `what`, and each file's
    name and content. The name of a single file is left out, as users rename models."""
    paths = list(files)
    names = [path.name for path in paths] if len(paths) > 1 else [""]
    parts = [f"{name}\0{digest}\n" for name, digest in zip(names, digests(paths), strict=bool(paths))]
    return hashlib.sha256("".join([f"flexengine {FORMAT}\n{what}", *parts]).encode()).hexdigest()[:32]


def digests(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file. Files whose path and marks (`file_marks`) are those of an earlier call, in this
    process or, unless they had just changed then, in any, are not read again. An error, such as KeyboardInterrupt,
    ends the hashing at the next block.
    """
    known = [_known(file) for file in files]
    unknown = [file for file, digest in zip(files, known, strict=True) if digest is None]
    if not unknown:
        return [str(digest) for digest in known]
    total = sum(file.stat().st_size for file in unknown)
    text = f"hashing the model's files, once, to find what was made from the same content ({size(total)})"
    ended = Event()
    level, threads = logging.INFO if total > _LONG else logging.DEBUG, min(_HASHERS, os.cpu_count() or 1)
    with activity("hashing", text, total, "B", level), ThreadPoolExecutor(threads) as pool:
        try:
            hashed = iter([pool.submit(copy_context().run, _hashed, file, ended) for file in unknown])
            return [digest or next(hashed).result() for digest in known]
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _known(file: Path) -> str | None:
    if file.parent.parent == cache_root() / "prepared":  # converted: `_build` wrote the digests
        with suppress(BadCheckpoint):
            return read_sums(file.parent / SUMS).get(file.name)
    now = file_marks(file)
    try:
        marks, _, digest = _digest_file(file).read_text(encoding="ascii").rpartition(" ")
    except (OSError, ValueError):  # a damaged file is no text
        marks = digest = ""
    return digest if marks == now and len(digest) == 64 else _digests.get((file.resolve(), now))


def _hashed(file: Path, ended: Event) -> str:
    """Return the SHA-256 of a file, and store it unless the file may have changed meanwhile. Raise CancelledError once
    `ended` is set."""

    def count(size: int) -> None:
        if ended.is_set():
            raise CancelledError
        advance(size)

    began, marks = time.time(), file_marks(file)
    digest = digest_of(file, count)
    about = file.stat()
    if marks != file_marks(file):
        return digest
    _digests[file.resolve(), marks] = digest
    if began - max(about.st_mtime, about.st_ctime) > _YOUNG:
        with suppress(OSError):  # the cache cannot be written: the next call hashes again
            make_private(_digest_file(file).parent)
            _digest_file(file).write_text(f"{marks} {digest}", encoding="ascii")
    return digest


def _digest_file(file: Path) -> Path:
    return cache_root() / "prepared" / f"{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]}.sha256"


def file_marks(file: Path) -> str:
    """Return size, times, device and inode of a file, and a hash of its first and last _END bytes.

    Linux sets one of the times, ctime, at every write to a file; programs cannot set it. Marks can be those of other
    content only where ctime does not change: if a program changes the middle of the file through a memory map that it
    had written through before, or if a file system with fixed times (squashfs, some of FUSE) is made anew.
    """
    with opened(file) as stream:
        about = os.fstat(stream.fileno())
        ends = hashlib.sha256(stream.read(_END))
        stream.seek(max(0, about.st_size - _END))
        ends.update(stream.read(_END))
    times = f"{about.st_mtime_ns} {about.st_ctime_ns}"
    return f"{about.st_size} {times} {about.st_dev} {about.st_ino} {ends.hexdigest()}"


def make_private(directory: Path) -> None:
    for missing in reversed([p for p in (directory, *directory.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def directory_for(files: Iterable[Path], what: str = "") -> Path:
    """Return the directory that `prepared` fills, which exists once it is finished. Arguments as there."""
    return cache_root() / "prepared" / fingerprint(files, what)


def prepared(
    source: Path,
    files: Sequence[Path],
    build: Callable[[Path], None],
    what: str = "",
    verifier: Verifier | None = None,
    label: str = "",
) -> Path:
    """Return the finished directory for `files`; if it does not exist, `build` fills one under a temporary name first.

    The directory is locked for use until this process ends, so `flexengine cache clear` does not remove it. Processes
    that need the same directory wait for each other. Remains of killed processes are removed.

    Args:
        source, files: the model, for messages, and its files.
        build: writes files into the directory that it is called with.
        what: kind of data made from the files; "" for a converted model. If it is not "", an interrupted `build`
            is called again with the unfinished directory.
        verifier: compares the directory with its checksums; None for no check.
        label: format of the data, such as "int4", for `flexengine cache`.

    Raises:
        InvalidInput: the cache cannot be written.
        BadCheckpoint: the files cannot be read.
        Errors of `build`; if what is "", the unfinished directory is then removed.
    """
    try:
        final = directory_for(files, what)
    except OSError as error:
        raise BadCheckpoint(f"{source} cannot be read: {error}") from error
    root = final.parent
    try:
        while not hold(final):
            make_private(root)
            with _locked(final):
                if not final.is_dir():
                    _sweep(final)
                    _build(source, final, build, what, label)
    except OSError as error:
        name = Path(error.filename) if isinstance(error.filename, str) else root
        if name in map(Path, files) or not (name.is_relative_to(root) or root.is_relative_to(name)):
            raise BadCheckpoint(f"{source} cannot be read: {error}") from error
        done = "encoded or calibrated" if what else "converted"
        fault = f"{source} must be {done} once, but {root} cannot be written: {error}"
        raise InvalidInput(f"{fault}; set FLEXENGINE_CACHE to a directory that can be written, and has room") from error
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
        write_sums(temporary)
        for file in temporary.iterdir():
            file.chmod(0o600)
            sync_path(file)
        sync_path(temporary)
        temporary.rename(final)
        sync_path(final.parent)
    except BaseException:
        if not keep:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _locked(final: Path, wait: bool = True) -> Iterator[bool]:
    """Lock the key of a prepared directory while the block runs. wait: for a process that holds the lock; if False, do
    not lock then, and yield False."""
    descriptor = os.open(final.with_name(f"{final.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        free = _try_lock(descriptor)
        if not free and wait:
            text = f"waiting for another process that prepares the same weights in {final.parent}"
            with activity("waiting", text, level=logging.INFO):
                while not _try_lock(descriptor):
                    tick()
                    time.sleep(_POLL)
        yield free or wait
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(final: Path) -> None:
    """Remove temporary directories whose writer has ended, and unfinished weights of other keys after ABANDONED.

    The caller holds the lock of `final`.
    """
    root = final.parent
    ended = [*root.glob("*.tmp-*")]
    for part in root.glob("*.part"):
        with suppress(FileNotFoundError):  # another process has finished and renamed it
            if part.stem != final.name and part.stat().st_mtime < time.time() - ABANDONED:
                ended.append(part)
    for temporary in ended:
        key = temporary.name.partition(".")[0]
        with nullcontext(True) if key == final.name else _locked(root / key, wait=False) as free:
            if free:  # else another process is writing to it
                shutil.rmtree(temporary, ignore_errors=True)
