"""Writer of safetensors shards, tensor by tensor, with bounded memory."""

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
    """Raise OutOfMemory if the disk of `directory` has fewer than `needed` bytes free."""
    disk = shutil.disk_usage(directory)
    if disk.free < needed:
        used = disk.total - disk.free
        remedy = f"they go to {directory.parent}; set FLEXENGINE_CACHE to a directory with room"
        raise OutOfMemory("disk", what, needed, used, disk.total, remedy)


def save(tensors: "Mapping[str, torch.Tensor]", path: Path) -> None:
    """Write a safetensors file. Raise OSError with its name if that fails, also for the library's own errors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


class ShardWriter:
    """Writer of tensors, added one at a time, into safetensors shards with an index.

    At most one shard, or one tensor if it is larger, is in memory. Tensors must be contiguous and own their memory.

    Args:
        directory: to write to.
        limit: bytes of a shard.
    """

    def __init__(self, directory: Path, limit: int = SHARD_BYTES) -> None:
        self._directory, self._limit = directory, limit
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: "torch.Tensor") -> None:
        """Add one tensor. Raise BadCheckpoint if it is not finite or its name was added before."""
        if name in self._held or any(name in shard for shard in self._shards):
            raise BadCheckpoint(f"tensor {name} is there twice")
        check_finite(name, tensor)
        if self._held and self._held_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the last shard, rename the shards to their final names and write the index."""
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
    """Raise BadCheckpoint if a floating-point tensor holds NaN or infinity. Needs no copy of the tensor."""
    import torch

    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and tensor.numel():
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise BadCheckpoint(f"tensor {name} holds NaN or infinite values")
