"""The prepared-weights cache: checkpoints in other formats and encoded weights, made once, in safetensors directories.

$FLEXENGINE_CACHE or ~/.cache/flexengine
  prepared/<key>/           a model directory, or encoded weights of one, and SHA256SUMS of all files in it; complete
                            because it appears by rename
  prepared/<key>.part/      encoded weights so far: whoever is interrupted goes on with them, within ABANDONED seconds
  prepared/<key>.tmp-<pid>/ being written by the process that holds the lock; garbage if nobody does
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

from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.files import regular_file
from flexengine.model.pickled import bin_shards, convert_bin
from flexengine.model.verify import Verifier, write_sums
from flexengine.reading import opened

FORMAT = 1  # part of every key: raise it when the conversion changes
ABANDONED = 30 * 24 * 3600  # seconds since something was added
_MIB = 2**20
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")

log = logging.getLogger(__name__)


def prepared_gguf(path: Path, verifier: Verifier | None = None) -> Path:
    """The model directory of a GGUF file, converted now if it was not. Raises BadCheckpoint, UnsupportedModel."""

    def build(directory: Path) -> None:
        from flexengine.model import gguf

        gguf.convert(path, directory)

    return prepared(path, [path], build, verifier=verifier)


def prepared_bin(path: Path, trust_remote_code: bool = False, verifier: Verifier | None = None) -> Path:
    """The model directory of a directory with pytorch_model*.bin, converted now if it was not. Raises BadCheckpoint.

    trust_remote_code: its Python files are copied too.
    """
    shards, copied = bin_files(path, trust_remote_code)
    return prepared(
        path, [*shards, *copied], lambda directory: convert_bin(shards, copied, directory), verifier=verifier
    )


def bin_files(path: Path, trust_remote_code: bool) -> tuple[list[Path], list[Path]]:
    """Return the pytorch_model*.bin files of a directory, and its other files that are copied. Raises BadCheckpoint."""
    patterns = (*_COPIED, *(("*.py",) if trust_remote_code else ()))
    small = sorted({file for pattern in patterns for file in path.glob(pattern) if not file.is_dir()})
    return bin_shards(path), [regular_file(file) for file in small if not file.name.endswith(".bin.index.json")]


def fingerprint(files: Iterable[Path], what: str = "") -> str:
    """Key of a checkpoint, and of `what` was made of it: format version and each file's name, size, mtime and first and
    last MiB. Reads no more."""
    digest = hashlib.sha256(f"flexengine {FORMAT}\n{what}".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        with opened(file) as stream:
            digest.update(stream.read(_MIB))
            stream.seek(max(stat.st_size - _MIB, 0))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()[:32]


def prepared(
    source: Path, files: Sequence[Path], build: Callable[[Path], None], what: str = "", verifier: Verifier | None = None
) -> Path:
    """The finished directory for `files`; if there is none, `build` fills one under a temporary name first.

    what: made of the files, if there are several things; then `build` finds what an earlier one had finished.
    verifier: compares the directory with the sums it was written with.
    Racing processes wait for each other; what killed ones left behind is removed.
    Raises InvalidInput if the cache cannot be written, BadCheckpoint if the files cannot be read, and whatever `build`
    raises (leaving nothing behind).
    """
    root = cache_root() / "prepared"
    try:
        final = root / fingerprint(files, what)
    except OSError as error:
        raise BadCheckpoint(f"{source} cannot be read: {error}") from error
    try:
        if not final.is_dir():
            _private_directory(root)
            with _lock(final):
                if not final.is_dir():
                    _sweep(final)
                    _build(source, final, build, keep=bool(what))
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


def _build(source: Path, final: Path, build: Callable[[Path], None], keep: bool) -> None:
    """keep: what there is so far, if it ends early."""
    temporary = final.with_name(f"{final.name}.part" if keep else f"{final.name}.tmp-{os.getpid()}")
    temporary.mkdir(mode=0o700, exist_ok=keep)
    try:
        log.warning("preparing %s in %s", source, final)
        build(temporary)
        note = {"source": str(source.resolve()), "format": FORMAT}
        (temporary / "prepared.json").write_text(json.dumps(note), encoding="utf-8")
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
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(final: Path) -> None:
    """Removes temporary directories whose writer is gone: those of `final`, whose lock the caller holds, and others;
    and others' unfinished weights that nobody went on with."""
    for temporary in final.parent.glob("*.tmp-*"):
        _remove_unlocked(temporary, final.name)
    for part in final.parent.glob("*.part"):
        with suppress(FileNotFoundError):  # it is finished now
            if part.stem != final.name and part.stat().st_mtime < time.time() - ABANDONED:
                _remove_unlocked(part, final.name)


def _remove_unlocked(temporary: Path, held: str) -> None:
    """held: the key whose lock the caller holds."""
    key = temporary.name.partition(".")[0]
    if key == held:
        shutil.rmtree(temporary, ignore_errors=True)
        return
    descriptor = os.open(temporary.with_name(f"{key}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(temporary, ignore_errors=True)
    except BlockingIOError:
        pass  # somebody writes there now
    finally:
        os.close(descriptor)


def _private_directory(path: Path) -> None:
    for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _seal(directory: Path) -> None:
    """Makes every file private and durable, then the directory."""
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
