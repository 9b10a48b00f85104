"""Files of one encoded parameter each: safetensors that are written part by part and appear whole."""

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from flexengine.read_retries import located

ALIGNMENT = 8  # bytes; safetensors fills up its header with spaces to a multiple


class TensorPart(NamedTuple):
    """The next bytes of a parameter; data: uint8, contiguous, on the CPU."""

    name: str
    data: Tensor


class TensorFiles:
    """Context manager that writes one file per parameter, under a temporary name until it is complete and on the disk.

    Parts of one parameter must come in a row and in order. At its end, a file that is not complete keeps its temporary
    name, and is overwritten the next time.

    Attributes:
        shapes: shape of each parameter, in bytes.

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
        if self._open is None:
            start, self._left = self.start(part.name)
            self._path = self._files[part.name].with_suffix(".writing")
            self._open = self._path.open("wb", buffering=0)
            self._append(memoryview(start))
        self._append(part.data.numpy().data)
        self._left -= part.data.nbytes
        if not self._left:
            self._finish(self._files[part.name])

    def start(self, name: str) -> tuple[bytes, int]:
        """Return the bytes of a file before the data of its parameter, and the bytes of the data."""
        return header(name, self.shapes[name])

    def _append(self, data: memoryview) -> None:
        assert self._open is not None
        try:
            while data.nbytes:
                data = data[self._open.write(data) :]
        except OSError as error:
            raise located(error, "writing", self._path, self._open.tell()) from error

    def _finish(self, final: Path) -> None:
        assert self._open is not None
        with self._open as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise located(error, "syncing", self._path, file.tell()) from error
        self._open = None
        self._path.rename(final)

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.close()


def header(name: str, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """Return the bytes before the data of a safetensors file with one uint8 tensor, and the bytes of the tensor."""
    nbytes = 1
    for n in shape:
        nbytes *= n
    tensor = {"dtype": "U8", "shape": shape, "data_offsets": (0, nbytes)}
    content = {"__metadata__": {"format": "pt"}, name: tensor}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, nbytes
