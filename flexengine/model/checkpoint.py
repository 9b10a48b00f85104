"""Locations of the tensors of a checkpoint, read from safetensors headers, which are checked. No data is read."""

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from flexengine.errors import BadCheckpoint
from flexengine.model.files import indexed_files, regular_file
from flexengine.read_retries import opened

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_MAX_DIMENSIONS = 64  # torch's limit
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class ByteRange(NamedTuple):
    """The nbytes at byte `start` of the file `path`."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Origin:
    """Location of a tensor or parameter in the checkpoint: byte ranges whose concatenation it is, and the stored
    dtype."""

    runs: tuple[ByteRange, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored parameter."""
        return sum(run.nbytes for run in self.runs)


def read_header(path: Path) -> dict[str, Origin]:
    """Return the tensors of one safetensors file by name.

    The rules of the safetensors library apply: no name occurs twice, and the tensors fill the data of the file without
    overlaps or gaps. Raise BadCheckpoint if the file breaks a rule or cannot be read."""
    regular_file(path)
    try:
        size = os.path.getsize(path)
        with opened(path) as f:
            start = f.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise BadCheckpoint(f"{path}: not a safetensors file (header of {length} bytes in a file of {size})")
            header = json.loads(f.read(length).decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except BadCheckpoint:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: unreadable safetensors header: {error!r}") from error
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].runs):
        first = stored.runs[0].start
        if first != end:
            fault = "overlaps another" if first < end else "lies after a gap"
            raise BadCheckpoint(f"{path}: tensor {name} at byte {first} {fault} (expected at {end})")
        end += stored.nbytes
    if end != size:
        raise BadCheckpoint(f"{path}: {size - end} bytes after the last tensor belong to no tensor")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return entries


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> Origin:
    begin, end = entry["data_offsets"]
    shape: tuple[int, ...] = tuple(entry["shape"])
    if entry["dtype"] not in _DTYPES:
        raise BadCheckpoint(f"{path}: tensor {name} has dtype {entry['dtype']}, which is not supported")
    dtype = _DTYPES[entry["dtype"]]
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape)):
        raise BadCheckpoint(f"{path}: tensor {name} has offsets {begin}..{end} and shape {shape[:_MAX_DIMENSIONS]}")
    if end - begin != math.prod(shape) * dtype.itemsize or base + end > size:
        raise BadCheckpoint(
            f"{path}: tensor {name} of shape {shape} lies at bytes {begin}..{end} of a file of {size}:"
            " the file is truncated or its header wrong"
        )
    return Origin((ByteRange(path, base + begin, end - begin),), dtype, shape)


def read_checkpoint(directory: Path) -> dict[str, Origin]:
    """Return all tensors of a model directory by name, from model.safetensors or the shards of its index.
    Raise BadCheckpoint if a file is missing or damaged, or two files hold the same tensor."""
    tensors: dict[str, Origin] = {}
    for shard in _shards(directory):
        for name, stored in read_header(shard).items():
            if name in tensors:
                raise BadCheckpoint(
                    f"{directory}: tensor {name} is in both {tensors[name].runs[0].path.name} and {shard.name}"
                )
            tensors[name] = stored
    return tensors


def _shards(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if os.path.lexists(single):  # if both exist, transformers reads this one
        return [single]
    if os.path.lexists(index):
        return indexed_files(index)
    if shards := sorted(directory.glob("*.safetensors")):
        return shards
    raise BadCheckpoint(f"{directory} holds no .safetensors file")
