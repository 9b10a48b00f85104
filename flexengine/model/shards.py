"""Writers of safetensors files with bounded memory: shards, files written in any order, files of one parameter."""

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

import safetensors.torch
import torch
from torch import Tensor

from flexengine.activity import activity
from flexengine.errors import BadCheckpoint, OutOfMemory, size
from flexengine.model.checkpoint import DTYPES
from flexengine.system.read_retries import located

SHARD_BYTES = 128 * 10**6  # most bytes of a shard of several tensors
PIECE_BYTES = 1 << 24  # of a tensor that are in memory at a time
INDEX = "model.safetensors.index.json"
ALIGNMENT = 8  # bytes; safetensors fills up its header with spaces to a multiple
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_room(directory: Path, what: str, needed: int, remedy: str = "") -> None:
    """Raise OutOfMemory if the disk of `directory` has fewer than `needed` bytes free. remedy: default: that of the
    cache."""
    disk = shutil.disk_usage(directory)
    if disk.free < needed:
        used = disk.total - disk.free
        remedy = remedy or f"they go to {directory.parent}; set FLEXENGINE_CACHE to a directory with room"
        raise OutOfMemory("disk", what, needed, used, disk.total, remedy)


def check_memory(what: str, needed: int, memory: int | None, remedy: str = "") -> None:
    """Raise OutOfMemory if something needs more bytes than `memory`. remedy: besides more memory."""
    if memory is not None and needed > memory:
        raise OutOfMemory("host", what, needed, 0, memory, f"give the engine more (--device-mem, --host-mem){remedy}")


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raise OSError with its name if that fails, also for the library's own errors."""
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # the system's error, such as that of a full disk
        raise OSError(int(code[1]) if code else errno.EIO, str(error), str(path)) from error


def check_finite(name: str, tensor: Tensor, where: str = "") -> None:
    """Raise BadCheckpoint if a floating-point tensor holds NaN or infinity; `where` begins the message. Needs no copy
    of the tensor."""
    plain = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1  # not torch's formats of 8 bits
    if plain and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
        raise BadCheckpoint(f"{where}tensor {name} holds NaN or infinite values")


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint in another format."""

    file: Path  # that holds it, for messages
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]  # elements in order, in contiguous CPU tensors of the dtype, read once and in turn

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in order, in contiguous parts of about PIECE_BYTES at most."""
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), PIECE_BYTES // tensor.itemsize)
    else:
        step = max(1, PIECE_BYTES * len(tensor) // tensor.nbytes)
        for rows in torch.split(tensor, step):
            yield from (rows.contiguous(),) if rows.nbytes <= PIECE_BYTES else pieces_of(rows[0])


def write_shards(source: Path, directory: Path, nbytes: int, tensors: Iterable[StoredTensor], text: str = "") -> None:
    """Write the tensors of a checkpoint in another format as safetensors shards with an index, and report it as an
    activity. One piece of a tensor is in memory, beside what `tensors` keeps there.

    Args:
        source: the checkpoint, for messages.
        directory: to write to.
        nbytes: bytes of all tensors.
        tensors: the tensors. Up to SHARD_BYTES of them are taken before their pieces are read.
        text: says what is done, for the activity; "" for a conversion of the whole checkpoint.

    Raises:
        BadCheckpoint: a tensor is not finite, occurs twice or has a dtype without a name; the message begins with its
            file.
        OutOfMemory: the disk is full.
    """
    check_room(directory, f"weights of {source}", nbytes)
    kind = "file" if source.is_file() else "model"
    text = text or f"converting {source.name} to safetensors, once for this {kind} ({size(nbytes)})"
    held, shard_of = list[StoredTensor](), dict[str, int]()  # tensors of the next shard, and shards by tensor
    held_bytes, total_bytes, shards = 0, 0, 1

    with activity("converting", text, nbytes, "B", logging.INFO) as work:
        for tensor in tensors:
            if tensor.name in shard_of:
                raise BadCheckpoint(f"{tensor.file}: tensor {tensor.name} is there twice")
            if tensor.dtype not in _NAMES:
                raise BadCheckpoint(f"{tensor.file}: tensor {tensor.name} has {tensor.dtype}, which is not supported")
            if held and held_bytes + tensor.nbytes > SHARD_BYTES:
                _write_shard(directory / f"shard-{shards}", held, work.advance)
                held.clear()
                held_bytes, shards = 0, shards + 1
            held.append(tensor)
            shard_of[tensor.name] = shards
            held_bytes += tensor.nbytes
            total_bytes += tensor.nbytes
        _write_shard(directory / f"shard-{shards}", held, work.advance)
    final = {number: f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)}
    for number, name in final.items():
        (directory / f"shard-{number}").rename(directory / name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {n: final[i] for n, i in shard_of.items()}}
    (directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_shard(path: Path, tensors: Iterable[StoredTensor], count_bytes: Callable[[int], object]) -> None:
    """Write a safetensors file, piece by piece. Raise BadCheckpoint if a tensor is not finite."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # so that all are aligned, as in the library
    content, end = dict[str, Any](), 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        content[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
    with path.open("wb", buffering=0) as out:
        _append(out, path, memoryview(_header(content)))
        for tensor in ordered:
            for piece in tensor.pieces:
                check_finite(tensor.name, piece, f"{tensor.file}: ")
                _append(out, path, piece.view(-1).view(torch.uint8).numpy().data)
                count_bytes(piece.nbytes)


def _header(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a safetensors file before its data. content: entries of its tensors by name."""
    whole = {"__metadata__": {"format": "pt"}, **content}
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _append(file: FileIO, path: Path, data: memoryview) -> None:
    """Write bytes to the file at `path`. Raise OSError with the path if that fails."""
    try:
        while data.nbytes:
            data = data[file.write(data) :]
    except OSError as error:
        raise located(error, "writing", path, file.tell()) from error


class PlacedTensors:
    """A safetensors file of known tensors, whose parts are written in any order. Closing it lets the disk have it.

    Args:
        path: of the file, which must not exist.
        tensors: dtype and shape of each tensor, by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        content, self._starts, end = dict[str, Any](), dict[str, int](), 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            start, end = end, end + math.prod(shape) * dtype.itemsize
            content[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
            self._starts[name] = start
        header = _header(content)
        self._starts = {name: len(header) + start for name, start in self._starts.items()}
        self._path, self._file = path, path.open("xb", buffering=0)
        _append(self._file, path, memoryview(header))

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Write bytes of a tensor. Raise OSError with the path if that fails.

        Args:
            name: of the tensor.
            offset: first byte, in the tensor.
            data: contiguous, on the CPU.
        """
        self._file.seek(self._starts[name] + offset)
        _append(self._file, self._path, data.view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Sync and close the file. Raise OSError with the path if that fails."""
        with self._file as file:
            sync_file(file, self._path)


def sync_file(file: FileIO, path: Path) -> None:
    """Write the file at `path` to the disk. Raise OSError with the path if that fails."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        raise located(error, "syncing", path, file.tell()) from error


class TensorPart(NamedTuple):
    """The next bytes of a parameter; data: uint8, contiguous, on the CPU."""

    name: str
    data: Tensor


class TensorFiles:
    """Context manager that writes one file per parameter, under a temporary name until it is complete and on the disk.

    Parts of one parameter must come in a row and in order. At its end, a file that is not complete keeps its temporary
    name, and is overwritten the next time.

    Args:
        files: path of the file of each parameter.
        shapes: shape of each parameter, in bytes.
    """

    def __init__(self, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._files, self.shapes = files, shapes
        self._open: FileIO | None = None
        self._path, self._left = Path(), 0

    def write(self, part: TensorPart) -> None:
        """Write the next part. Raise OSError with the path of the file if that fails."""
        data = part.data.numpy().data
        if self._open is None:
            start, self._left = self.start(part.name)
            self._path = self._files[part.name].with_suffix(".writing")
            self._open = self._path.open("wb", buffering=0)
            _append(self._open, self._path, memoryview(start))
        _append(self._open, self._path, data)
        self._left -= data.nbytes
        if not self._left:
            with self._open as file:
                sync_file(file, self._path)
            self._open = None
            self._path.rename(self._files[part.name])

    def start(self, name: str) -> tuple[bytes, int]:
        """Return the bytes of a file before the data of its parameter, here those of a safetensors file with one uint8
        tensor, and the bytes of the data."""
        shape = self.shapes[name]
        nbytes = math.prod(shape)
        return _header({name: {"dtype": "U8", "shape": shape, "data_offsets": (0, nbytes)}}), nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()
