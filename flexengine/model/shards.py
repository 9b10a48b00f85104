"""Writing safetensors shards tensor by tensor, with bounded memory."""

import errno
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flexengine.errors import BadCheckpoint, OutOfMemory

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 128 * 10**6
INDEX = "model.safetensors.index.json"


def check_room(directory: Path, what: str, needed: int) -> None:
    """Raises OutOfMemory if the disk under `directory` has fewer than `needed` bytes free."""
    disk = shutil.disk_usage(directory)
    if disk.free < needed:
        used = disk.total - disk.free
        remedy = f"they go to {directory.parent}; set FLEXENGINE_CACHE to a directory with room"
        raise OutOfMemory("disk", what, needed, used, disk.total, remedy)


def save(tensors: "Mapping[str, torch.Tensor]", path: Path) -> None:
    """Write a safetensors file. Raises OSError naming it, where the library has an error of its own (a full disk)."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


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
        self._shards.append(list(self._held))
        save(self._held, self._directory / f"shard-{len(self._shards)}")
        self._held, self._held_bytes = {}, 0


def check_finite(name: str, tensor: "torch.Tensor") -> None:
    """Raises BadCheckpoint if a floating-point tensor holds NaN or infinity. Needs no memory to speak of."""
    import torch

    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and tensor.numel():
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise BadCheckpoint(f"tensor {name} holds NaN or infinite values")
