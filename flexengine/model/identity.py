"""Marks of the files a user gave as a model, by which a job that goes on notices another model.

A mark holds a file's size, its time of change, a digest of samples of its contents and, where the whole model is small
(`WHOLE` bytes), the SHA-256 of all of it. Times alone decide nothing: a file that was copied or touched keeps its
digests. Converted files in the cache have no part in it, as they can be made again.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flexengine.model import gguf_header
from flexengine.model.checkpoint import read_header
from flexengine.model.source import Source
from flexengine.reading import opened

WHOLE = 1 << 30  # bytes of a model up to which all of it is hashed, which takes about a second
PLACES = 64  # samples spread evenly over a file of weights
SPACING = 64 << 20  # bytes of a file per tensor whose first bytes are sampled, too; at least `PLACES` tensors are
SAMPLE = 1 << 16  # bytes of a sample
_READ = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
_WEIGHTS = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True)
class Mark:
    """What is remembered of a file.

    Attributes:
        bytes: its size.
        mtime_ns: its time of change, in nanoseconds since 1970.
        sample: digest of its size and samples; of a file that holds no weights, of all of it.
        sha256: of all of it; None for weights of a model larger than `WHOLE`.
    """

    bytes: int
    mtime_ns: int
    sample: str
    sha256: str | None


def given_files(source: Source) -> dict[str, Path]:
    """Return the files that the user gave as the model, by name relative to its directory."""
    if source.given:
        return {path.name: path for path in source.given}
    directory = source.directory
    found = [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]
    return {str(path.relative_to(directory)): path for path in sorted(found) if path.suffix in _READ and path.is_file()}


def marks(files: Mapping[str, Path], loaded: Collection[Path], known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the mark of every file, as a JSON-able dict.

    Args:
        files: by name.
        loaded: the safetensors files that weights are read from; their headers were found to be right.
        known: earlier marks. A file whose size, time and samples are those of its earlier mark is not hashed again.

    Raises:
        OSError, BadCheckpoint: a file cannot be read.
    """
    small = sum(path.stat().st_size for path in files.values()) <= WHOLE
    return {name: asdict(_mark(path, path in loaded, small, known.get(name) or {})) for name, path in files.items()}


def _mark(path: Path, loaded: bool, small: bool, known: Mapping[str, Any]) -> Mark:
    stat = path.stat()
    if path.suffix.lower() not in _WEIGHTS:
        whole = _hashed(path)
        return Mark(stat.st_size, stat.st_mtime_ns, whole, whole)
    now = Mark(stat.st_size, stat.st_mtime_ns, _sampled(path, stat.st_size, _tensor_starts(path, loaded)), None)
    if not small:
        return now
    same = all(known.get(name) == getattr(now, name) for name in ("bytes", "mtime_ns", "sample"))
    return replace(now, sha256=(known.get("sha256") if same else None) or _hashed(path))


def _hashed(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path, size: int, starts: Sequence[int]) -> str:
    digest = hashlib.sha256(str(size).encode())
    count = min(len(starts), max(PLACES, size // SPACING))  # of tensors
    even = (i * max(0, size - SAMPLE) // PLACES for i in range(PLACES + 1))
    with opened(path) as file:
        for at in sorted({*even, *(starts[i * len(starts) // count] for i in range(count))}):
            file.seek(at)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _tensor_starts(path: Path, loaded: bool) -> list[int]:
    """Return the first byte of every tensor. A .bin file has none here: samples of its end hold a CRC of each."""
    if path.suffix.lower() == ".gguf":
        return sorted(tensor.offset for tensor in gguf_header.read_header(path).tensors)
    return sorted(stored.start for stored in read_header(path).values()) if loaded else []
