"""Writers of safetensors files with bounded memory: shards of whole tensors, and files of one encoded parameter."""

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

import safetensors.torch
import torch
from torch import Tensor

from flexengine.activity import activity
from flexengine.errors import BadCheckpoint, OutOfMemory
from flexengine.read_retries import located

SHARD_BYTES = 128 * 10**6  # most bytes of a shard of several tensors
INDEX = "model.safetensors.index.json"
ALIGNMENT = 8  # bytes; safetensors fills up its header with spaces to a multiple


def check_room(directory: Path, what: str, needed: int) -> None:
    """Raise OutOfMemory if the disk of `directory` has fewer than `needed` bytes free."""
    disk = shutil.disk_usage(directory)
    if disk.free < needed:
        used = disk.total - disk.free
        remedy = f"they go to {directory.parent}; set FLEXENGINE_CACHE to a directory with room"
        raise OutOfMemory("disk", what, needed, used, disk.total, remedy)


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


def write_shards(source: Path, directory: Path, nbytes: int, tensors: Iterable[tuple[Path, str, Tensor]]) -> None:
    """Write the tensors of a checkpoint in another format as safetensors shards with an index, and report it as an
    activity. At most one shard, or one tensor if it is larger, is in memory.

    Args:
        source: the checkpoint, for messages.
        directory: to write to.
        nbytes: bytes of all tensors.
        tensors: file, name and values of each tensor, which is contiguous and owns its memory.

    Raises:
        BadCheckpoint: a tensor is not finite or occurs twice; the message begins with its file.
        OutOfMemory: the disk is full.
    """
    check_room(directory, f"weights of {source}", nbytes)
    kind = "file" if source.is_file() else "model"
    text = f"converting {source.name} to safetensors, once for this {kind} ({nbytes / 1e9:.2f} GB)"
    held, shards = dict[str, Tensor](), list[list[str]]()  # tensors of the next shard, and names in the others
    held_bytes = total_bytes = 0

    def flush() -> None:
        shards.append([*held])
        save(held, directory / f"shard-{len(shards)}")
        held.clear()

    with activity("converting", text, nbytes, "B", logging.INFO) as work:
        for file, name, tensor in tensors:
            if name in held or any(name in shard for shard in shards):
                raise BadCheckpoint(f"{file}: tensor {name} is there twice")
            check_finite(name, tensor, f"{file}: ")
            if held and held_bytes + tensor.nbytes > SHARD_BYTES:
                flush()
                held_bytes = 0
            held[name] = tensor
            held_bytes += tensor.nbytes
            total_bytes += tensor.nbytes
            work.advance(tensor.nbytes)
        if held:
            flush()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        final = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


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
            self._append(self._open, memoryview(start))
        self._append(self._open, data)
        self._left -= data.nbytes
        if not self._left:
            with self._open as file:
                try:
                    os.fsync(file.fileno())
                except OSError as error:
                    raise located(error, "syncing", self._path, file.tell()) from error
            self._open = None
            self._path.rename(self._files[part.name])

    def start(self, name: str) -> tuple[bytes, int]:
        """Return the bytes of a file before the data of its parameter, here those of a safetensors file with one uint8
        tensor, and the bytes of the data."""
        shape = self.shapes[name]
        nbytes = math.prod(shape)
        tensor = {"dtype": "U8", "shape": shape, "data_offsets": (0, nbytes)}
        content = {"__metadata__": {"format": "pt"}, name: tensor}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text, nbytes

    def _append(self, file: FileIO, data: memoryview) -> None:
        try:
            while data.nbytes:
                data = data[file.write(data) :]
        except OSError as error:
            raise located(error, "writing", self._path, file.tell()) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()
