"""Conversion of old checkpoints, pytorch_model*.bin, into safetensors. They are read with weights_only=True."""

import ctypes
import mmap
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexengine.errors import BadCheckpoint
from flexengine.model.files import indexed_files, model_file
from flexengine.model.shards import write_shards

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")


def conversion(path: Path, trust_remote_code: bool) -> tuple[list[Path], Callable[[Path], None]]:
    """Return the files of a directory with pytorch_model*.bin, and the function that writes their conversion.
    trust_remote_code: copy its Python files too."""
    patterns = (*_COPIED, *(("*.py",) if trust_remote_code else ()))
    small = sorted({file for pattern in patterns for file in path.glob(pattern) if not file.is_dir()})
    copied = [model_file(file) for file in small if not file.name.endswith(".bin.index.json")]
    shards = bin_shards(path)
    return [*shards, *copied], partial(convert_bin, shards, copied)


def bin_shards(path: Path) -> list[Path]:
    """Return the pytorch_model*.bin files of a directory, from its index if it has one. Raise BadCheckpoint if a file
    is missing or no regular file."""
    index = path / "pytorch_model.bin.index.json"
    if os.path.lexists(index):
        return indexed_files(index)
    return [model_file(file) for file in sorted(path.glob("pytorch_model*.bin"))]


def convert_bin(shards: Sequence[Path], copied: Sequence[Path], directory: Path) -> None:
    """Write the tensors of .bin files as safetensors, and copy small files. One .bin file is mapped at a time.

    Pickles are read with weights_only=True: a file with other objects than tensors is refused with BadCheckpoint, never
    executed. Raise OutOfMemory if the disk is too small."""
    write_shards(shards[0].parent, directory, sum(file.stat().st_size for file in shards), _tensors(shards))
    for file in copied:
        shutil.copyfile(file, directory / file.name)


def _tensors(shards: Sequence[Path]) -> Iterator[tuple[Path, str, torch.Tensor]]:
    for file in shards:
        state = _load_bin(file)
        while state:
            name, tensor = state.popitem()
            yield file, name, tensor.detach().clone().contiguous()
            _forget(tensor)


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, the last one first. Raise BadCheckpoint if it holds others than dense ones."""
    try:  # files written before torch 1.6 are no zip archives and cannot be mapped
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_stored_zip(file))
    except BadCheckpoint:
        raise
    except Exception as error:
        # torch's own text advises to load the file with weights_only=False, which would run code in it.
        fault = "it holds objects other than tensors" if "GLOBAL" in str(error) else "it is damaged or no file of torch"
        fault = str(error) if isinstance(error, OSError) else f"{fault} ({type(error).__name__})"
        remedy = "download it again, or take the model's safetensors checkpoint"
        raise BadCheckpoint(f"{file} is refused: {fault}; {remedy}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise BadCheckpoint(f"{file} is refused: it does not hold a plain dictionary of tensors")
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise BadCheckpoint(f"{file} is refused: tensor {name} is {kind}; only dense tensors are converted")
        if tensor.nbytes > (held := tensor.untyped_storage().nbytes()):
            claim = f"tensor {name} claims {tensor.nbytes:,} bytes of a storage of {held:,}"
            raise BadCheckpoint(f"{file} is refused: {claim}")
    return dict(reversed(state.items()))


def _is_stored_zip(file: Path) -> bool:
    """Return whether the file is a zip archive. Raise BadCheckpoint if it is compressed: its content is unbounded."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        if packed := [part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]:
            raise BadCheckpoint(f"{file} is refused: {packed[0]!r} in it is compressed, which torch.save never does")
    return True


def _forget(tensor: torch.Tensor) -> None:
    """Drop the resident pages of a mapped, unmodified tensor, which otherwise count as memory until the file is closed.

    Only for tensors of torch.load(mmap=True), as a private file mapping is read again on access. Only whole pages
    inside the storage are dropped; heap memory is not touched.
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
