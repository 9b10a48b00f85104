"""Conversion of old checkpoints, pytorch_model*.bin, into safetensors. They are read with weights_only=True."""

import ctypes
import mmap
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexengine.errors import BadCheckpoint, FlexError
from flexengine.model.config import parsed_config
from flexengine.model.files import check_complete, indexed_files, model_file
from flexengine.model.shards import StoredTensor, check_memory, pieces_of, write_shards

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")


def conversion(
    path: Path, trust_remote_code: bool, memory: int | None = None
) -> tuple[list[Path], Callable[[Path], None]]:
    """Return the files of a directory with pytorch_model*.bin, and the function that writes their conversion.

    Raise as `parsed_config`.

    Args:
        trust_remote_code: copy its Python files too.
        memory: as for `convert_bin`.
    """
    patterns = (*_COPIED, *(("*.py",) if trust_remote_code else ()))
    small = sorted({file for pattern in patterns for file in path.glob(pattern) if not file.is_dir()})
    copied = [model_file(file) for file in small if not file.name.endswith(".bin.index.json")]
    shards = bin_shards(path)
    parsed_config(path, trust_remote_code)  # before the conversion, which takes time
    return [*shards, *copied], partial(convert_bin, shards, copied, memory=memory)


def bin_shards(path: Path) -> list[Path]:
    """Return the pytorch_model*.bin files of a directory, from its index if it has one. Raise BadCheckpoint if a file
    is missing or no regular file."""
    index = path / "pytorch_model.bin.index.json"
    if os.path.lexists(index):
        return indexed_files(index)
    check_complete(files := sorted(path.glob("pytorch_model*.bin")))
    return [model_file(file) for file in files]


def convert_bin(shards: Sequence[Path], copied: Sequence[Path], directory: Path, memory: int | None = None) -> None:
    """Write the tensors of .bin files as safetensors, and copy small files. The .bin files are mapped, except those of
    before torch 1.6.

    Pickles are read with weights_only=True: a file with other objects than dense tensors is refused with BadCheckpoint,
    never executed. Raise OutOfMemory if the disk is too small, or a file that cannot be mapped has more bytes than
    `memory`, if given."""
    write_shards(shards[0].parent, directory, sum(file.stat().st_size for file in shards), _tensors(shards, memory))
    for file in copied:
        shutil.copyfile(file, directory / file.name)


def _tensors(shards: Sequence[Path], memory: int | None) -> Iterator[StoredTensor]:
    for file in shards:
        state = _load_bin(file, memory)
        mapped = _mapping(file)
        while state:
            name, tensor = state.popitem()
            yield StoredTensor(file, name, tensor.dtype, tuple(tensor.shape), _pieces(tensor.detach(), mapped))


def _pieces(tensor: torch.Tensor, mapped: range) -> Iterator[torch.Tensor]:
    for piece in pieces_of(tensor):
        yield piece
        _forget(piece, mapped)
    _forget(tensor.untyped_storage(), mapped)  # of a tensor whose pieces are copies


def _load_bin(file: Path, memory: int | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, the last one first. Raise as `convert_bin`."""
    try:
        if not (mapped := _is_stored_zip(file)):  # files from before torch 1.6 are read whole
            remedy = "; or take the model's safetensors checkpoint, or save the file again with a newer torch"
            check_memory(f"{file} of a format that cannot be read in parts", file.stat().st_size, memory, remedy)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except FlexError:
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
        odd = tensor.is_quantized or tensor.is_neg()
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or odd:
            kind = "quantised or negated" if odd else f"{tensor.layout} on {tensor.device}"
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


def _mapping(file: Path) -> range:
    """Return the addresses at which a file is mapped; none if it is not."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            if line.endswith(f" {file.resolve()}"):
                return range(*(int(address, 16) for address in line.partition(" ")[0].split("-")))
    return range(0)


def _forget(data: torch.Tensor | torch.UntypedStorage, mapped: range) -> None:
    """Drop the resident pages of a part of a mapped, unmodified file, which otherwise count as memory until the file is
    closed. Only whole pages inside the part are dropped, and read again on access; heap memory is not touched."""
    begin, nbytes = data.data_ptr(), data.nbytes if isinstance(data, torch.Tensor) else data.nbytes()
    start = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (begin + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0 and begin in mapped and begin + nbytes <= mapped.stop:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
