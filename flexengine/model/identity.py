"""Marks of a model's files, by which a resumed job detects that the model has changed.

A mark is a dict for JSON:

    bytes      size of the file
    mtime_ns   modification time in nanoseconds since 1970
    sample     digest of the size and of samples; for a file without weights, of the whole content
    sha256     SHA-256 of the whole content; None for weights of a model larger than WHOLE

A modification time alone is no change: a file that was copied or touched keeps its digests. Converted files in the
cache have no marks, as they can be made again.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.activity import activity, advance
from flexengine.errors import size
from flexengine.model.checkpoint import read_header
from flexengine.model.files import SUFFIXES
from flexengine.model.source import ModelSource
from flexengine.system.read_retries import opened

WHOLE = 1 << 30  # bytes; models up to this size are hashed completely, which takes about a second
PLACES = 64  # samples spread evenly over a file of weights
SPACING = 64 << 20  # bytes; the start of one tensor per SPACING bytes is sampled too, and of at least PLACES tensors
SAMPLE = 1 << 16  # bytes of a sample
_READ = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")


def given_files(source: ModelSource) -> dict[str, Path]:
    """Return the files that the user gave as the model, by name relative to its directory."""
    if source.given:
        return {path.name: path for path in source.given}
    directory = source.directory
    paths = [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]
    return {str(path.relative_to(directory)): path for path in sorted(paths) if path.suffix in _READ and path.is_file()}


def marks(files: Mapping[str, Path], loaded: Collection[Path], known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the mark of every file. Raise OSError or BadCheckpoint if a file cannot be read.

    Args:
        files: by name.
        loaded: the safetensors files that weights are read from; their headers have been checked.
        known: earlier marks. A file whose size, time and samples equal those of its earlier mark is not hashed again.
    """
    total = sum(path.stat().st_size for path in files.values())
    text = f"hashing the model's files, to notice a change when the job is continued ({size(total)})"
    with activity("hashing", text, len(files), "files"):
        marks = dict[str, dict[str, Any]]()
        for name, path in files.items():
            marks[name] = _mark(path, path in loaded, total <= WHOLE, known.get(name) or {})
            advance()
    return marks


def digest(files: Mapping[str, Path]) -> str:
    """Return a digest of names, sizes and samples of files. It is equal on machines with copies of the same model."""
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        whole.update(f"{name} {_sampled(path, path.stat().st_size, ())}\n".encode())
    return whole.hexdigest()


def _mark(path: Path, loaded: bool, small: bool, known: Mapping[str, Any]) -> dict[str, Any]:
    stat = path.stat()
    mark: dict[str, Any] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if path.suffix.lower() not in SUFFIXES:
        whole = _hashed(path)
        return {**mark, "sample": whole, "sha256": whole}
    starts = list[int]()  # the first byte of every tensor; none of a .bin file, whose end holds a CRC of each tensor
    if path.suffix.lower() == ".gguf":
        from flexengine.model.gguf_header import read_header as read_gguf

        starts = sorted(tensor.offset for tensor in read_gguf(path).tensors)
    elif loaded:
        starts = sorted(stored.runs[0].start for stored in read_header(path).values())
    mark["sample"] = _sampled(path, stat.st_size, starts)
    same = all(known.get(name) == value for name, value in mark.items())
    sha256 = known.get("sha256") if same else None
    return {**mark, "sha256": (sha256 or _hashed(path)) if small else None}


def _hashed(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path, size: int, starts: Sequence[int]) -> str:
    digest = hashlib.sha256(str(size).encode())
    count = min(len(starts), max(PLACES, size // SPACING))  # of tensors
    even = (i * max(0, size - SAMPLE) // PLACES for i in range(PLACES + 1))
    with opened(path) as file:
        for start in sorted({*even, *(starts[i * len(starts) // count] for i in range(count))}):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
