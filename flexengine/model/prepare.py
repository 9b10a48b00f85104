"""The prepared-weights cache: checkpoints in other formats, converted once to safetensors directories.

    $FLEXENGINE_CACHE or ~/.cache/flexengine
      prepared/<key>/           a model directory, complete because it appears by rename
      prepared/<key>.tmp-<pid>/ being written by the process that holds the lock; garbage if nobody does
      prepared/<key>.lock       flock: one writer per key; never deleted, so every process locks the same inode
"""

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.errors import BadCheckpoint, InvalidInput, OutOfMemory

if TYPE_CHECKING:
    import torch

FORMAT = 1  # part of every key: raise it when the conversion changes
SHARD_BYTES = 128 * 10**6
INDEX = "model.safetensors.index.json"
_MIB = 2**20
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")

log = logging.getLogger(__name__)


def prepared_gguf(path: Path) -> Path:
    """The model directory of a GGUF file, converted now if it was not. Raises BadCheckpoint, UnsupportedModel."""

    def build(directory: Path) -> None:
        from flexengine.model import gguf

        gguf.convert(path, directory)

    return prepared(path, [path], build)


def prepared_bin(path: Path) -> Path:
    """The model directory of a directory with pytorch_model*.bin, converted now if it was not. Raises BadCheckpoint."""
    shards = bin_shards(path)
    small = sorted({file for pattern in _COPIED for file in path.glob(pattern) if file.is_file()} - set(shards))
    copied = [file for file in small if not file.name.endswith(".bin.index.json")]
    return prepared(path, [*shards, *copied], lambda directory: convert_bin(shards, copied, directory))


def cache_root() -> Path:
    """$FLEXENGINE_CACHE, or ~/.cache/flexengine."""
    given = os.environ.get("FLEXENGINE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "flexengine"


def fingerprint(files: Iterable[Path]) -> str:
    """Key of a checkpoint: format version and each file's name, size, mtime and first and last MiB. Reads no more."""
    digest = hashlib.sha256(f"flexengine {FORMAT}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_MIB))
            stream.seek(max(stat.st_size - _MIB, 0))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()[:32]


def prepared(source: Path, files: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """The finished directory for `files`; if there is none, `build` fills one under a temporary name first.

    Racing processes wait for each other; what killed ones left behind is removed.
    Raises InvalidInput if the cache cannot be written, and whatever `build` raises (leaving nothing behind).
    """
    root = cache_root() / "prepared"
    try:
        final = root / fingerprint(files)
    except OSError as error:
        raise BadCheckpoint(f"{source} cannot be read: {error}") from error
    if final.is_dir():
        return final
    try:
        _private_directory(root)
        with _lock(final):
            if not final.is_dir():
                _sweep(final)
                _build(source, final, build)
    except OSError as error:
        if isinstance(error, OutOfMemory):
            raise
        raise InvalidInput(
            f"{source} must be converted once, but {root} cannot be written: {error};"
            " set FLEXENGINE_CACHE to a directory with room"
        ) from error
    return final


def _build(source: Path, final: Path, build: Callable[[Path], None]) -> None:
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    temporary.mkdir(mode=0o700)
    try:
        log.info("converting %s once into %s", source, final)
        build(temporary)
        note = {"source": str(source.resolve()), "format": FORMAT}
        (temporary / "prepared.json").write_text(json.dumps(note), encoding="utf-8")
        _seal(temporary)
        temporary.rename(final)
        _sync(final.parent)
    except BaseException:
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
    """Removes temporary directories whose writer is gone: those of `final`, whose lock the caller holds, and others."""
    for temporary in final.parent.glob("*.tmp-*"):
        key = temporary.name.partition(".")[0]
        if key == final.name:
            shutil.rmtree(temporary, ignore_errors=True)
            continue
        descriptor = os.open(final.with_name(f"{key}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def check_room(directory: Path, what: str, needed: int) -> None:
    """Raises OutOfMemory if the disk under `directory` has fewer than `needed` bytes free."""
    disk = shutil.disk_usage(directory)
    if disk.free < needed:
        used = disk.total - disk.free
        raise OutOfMemory("disk", what, needed, used, disk.total, "set FLEXENGINE_CACHE to a directory with room")


class ShardWriter:
    """Writes tensors, given one at a time, into safetensors shards of at most `limit` bytes and their index.

    It holds at most one shard (or one tensor, if that is larger). Tensors must be contiguous and own their memory.
    """

    def __init__(self, directory: Path, limit: int = SHARD_BYTES) -> None:
        self._directory, self._limit = directory, limit
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        """Takes one tensor; raises BadCheckpoint if it is not finite or was given before."""
        if name in self._held or any(name in shard for shard in self._shards):
            raise BadCheckpoint(f"tensor {name} is there twice")
        check_finite(name, tensor)
        if self._held and self._held_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes the last shard, gives the shards their final names and writes the index."""
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            (self._directory / f"shard-{number}").rename(self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _flush(self) -> None:
        if not self._held:
            return
        from safetensors.torch import save_file

        self._shards.append(list(self._held))
        save_file(self._held, self._directory / f"shard-{len(self._shards)}", metadata={"format": "pt"})
        self._held, self._held_bytes = {}, 0


def check_finite(name: str, tensor: "torch.Tensor") -> None:
    """Raises BadCheckpoint if a floating-point tensor holds NaN or infinity. Needs no memory to speak of."""
    import torch

    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and tensor.numel():
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise BadCheckpoint(f"tensor {name} holds NaN or infinite values")


def bin_shards(path: Path) -> list[Path]:
    """The pytorch_model*.bin files of a directory, by its index if it has one. Raises BadCheckpoint."""
    index = path / "pytorch_model.bin.index.json"
    if not index.is_file():
        return sorted(path.glob("pytorch_model*.bin"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadCheckpoint(f"{index} is not a shard index: {type(error).__name__}: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise BadCheckpoint(f"{index} names the shard {name!r}, which is not a file name in that directory")
        if not (path / name).is_file():
            raise BadCheckpoint(f"{index} names the shard {name!r}, which is missing")
    return [path / name for name in names]


def convert_bin(shards: Sequence[Path], copied: Sequence[Path], directory: Path) -> None:
    """Writes the tensors of .bin files as safetensors and copies the small files. One file is mapped at a time.

    Pickles are read with weights_only=True: one that holds anything but tensors is refused, never executed.
    Raises BadCheckpoint naming the file, OutOfMemory if the disk is too small.
    """
    check_room(directory, f"weights of {shards[0].parent}", sum(file.stat().st_size for file in shards))
    writer = ShardWriter(directory)
    for file in shards:
        state = _load_bin(file)
        while state:
            name, tensor = state.popitem()
            try:
                writer.add(name, tensor.detach().clone().contiguous())
            except BadCheckpoint as error:
                raise BadCheckpoint(f"{file}: {error}") from error
            _forget(tensor)
    writer.close()
    for file in copied:
        shutil.copyfile(file, directory / file.name)


def _load_bin(file: Path) -> "dict[str, torch.Tensor]":
    import zipfile

    import torch

    try:  # files of before torch 1.6 are no zip archives and cannot be mapped
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise BadCheckpoint(f"{file} is refused: {type(error).__name__}: {reason[0]}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise BadCheckpoint(f"{file} is refused: it does not hold a plain dictionary of tensors")
    return dict(reversed(state.items()))


def _forget(tensor: "torch.Tensor") -> None:
    """Drops the resident pages of a mapped, unmodified tensor, which would else count as memory until the file ends.

    Only for tensors of torch.load(mmap=True): a private file mapping is read again when touched. The mapping's
    pages are whole pages inside the storage; memory of the heap is left alone.
    """
    storage = tensor.untyped_storage()
    if storage.filename is None:
        return
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes()) // page * page - start
    if size > 0:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
