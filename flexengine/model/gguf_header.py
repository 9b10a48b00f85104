"""The header of a GGUF file: metadata and tensor table. Counts and sizes are checked against the file's size."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.read_retries import opened

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_TEXT_BYTES = 16 * 2**20  # limit in bytes of a string; chat templates are the longest
_ALIGNMENTS = [2**power for power in range(3, 21)]
_MAX_ENTRIES = 10**6  # limit of tensors, and of values; real files have thousands of tensors and tens of values


@dataclass(frozen=True)
class GgufTensor:
    """Location of one tensor in the file: bytes offset .. offset + nbytes - 1. kind: a GGMLQuantizationType; shape: in
    torch's order of dimensions."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file. values: scalar and string metadata, without arrays."""

    path: Path
    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    def text(self, key: str) -> str:
        """Return a metadata value as a string, "" if the key is missing."""
        return str(self.values.get(key, ""))

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return self.text("general.architecture")


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file, with every tensor checked against the file's size. Raise BadCheckpoint if the
    file is no GGUF file, or damaged, or cut off, UnsupportedModel if it is one of several parts.

    gguf.GGUFReader takes seconds and hundreds of megabytes for a file with a vocabulary.
    """
    with opened(path) as file:
        if (magic := file.read(4)) != b"GGUF":
            raise BadCheckpoint(f"{path} is not a GGUF file: it starts with {magic!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = Header(path, *_Cursor(data).tables())
            except (ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
                raise BadCheckpoint(f"{path} is damaged or cut off: {type(error).__name__}: {error}") from error
    if (parts := header.values.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel(f"{path} is one of {parts} parts; join them with `gguf-split --merge` first")
    return header


class _Cursor:
    """Parser of the header of a mapped GGUF file (version 2 or 3, little-endian)."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def tables(self) -> tuple[dict[str, Any], tuple[GgufTensor, ...]]:
        """Return metadata and tensors. Raise ValueError, KeyError or struct.error if the header is not valid."""
        version, tensor_count, value_count = self._numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        if max(tensor_count, value_count) > _MAX_ENTRIES:
            raise ValueError(f"{tensor_count} tensors and {value_count} values are more than any file has")
        values: dict[str, Any] = {}
        for _ in range(value_count):
            key, (kind,) = self._string(), self._numbers("I")
            if key in values:
                raise ValueError(f"{key!r} is there twice")
            values[key] = self._value(kind)
        infos = []
        for _ in range(tensor_count):
            name, (dimensions,) = self._string(), self._numbers("I")
            if not 1 <= dimensions <= 4:
                raise ValueError(f"tensor {name} has {dimensions} dimensions")
            infos.append((name, self._numbers(f"{dimensions}Q")[::-1], *self._numbers("IQ")))
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
            raise ValueError(f"alignment {alignment} is not a power of 2 up to {_ALIGNMENTS[-1]}")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(self._stored(start, *info) for info in infos)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("two tensors have one name")
        for before, after in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
            if before.offset + before.nbytes > after.offset:
                raise ValueError(f"tensors {before.name} and {after.name} overlap")
        return values, tensors

    def _numbers(self, form: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return numbers

    def _skip(self, size: int) -> None:
        if self._at + size > len(self._data):
            raise ValueError(f"{size} bytes at {self._at} go beyond the end of the file")
        self._at += size

    def _string(self) -> str:
        (size,) = self._numbers("Q")
        if size > _MAX_TEXT_BYTES:
            raise ValueError(f"a string at {self._at} has {size} bytes")
        self._skip(size)
        return self._data[self._at - size : self._at].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_SCALARS[kind])[0]
        element, count = self._numbers("IQ")
        if element in _SCALARS:
            self._skip(count * struct.calcsize("<" + _SCALARS[element]))
        elif element == _STRING:
            if 8 * count > len(self._data) - self._at:
                raise ValueError(f"{count} strings at {self._at} go beyond the end of the file")
            for _ in range(count):
                self._skip(self._numbers("Q")[0])
        else:
            raise ValueError(f"array of type {element}")
        return None

    def _stored(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"rows of tensor {name} of shape {shape} are no multiple of the block of {block}")
        stored = GgufTensor(name, GGMLQuantizationType(kind), shape, start + offset, math.prod(shape) // block * size)
        if stored.offset + stored.nbytes > len(self._data):
            raise ValueError(f"tensor {name} goes beyond the end of the file")
        return stored
