"""The header of a GGUF file: metadata and tensor table. Counts and sizes are checked against the file's size."""

import math
import mmap
import os
import re
import struct
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.files import AGAIN, check_content
from flexengine.system.read_retries import opened

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)  # name of a part of a GGUF file
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_TEXT_BYTES = 16 * 2**20  # limit in bytes of a string; chat templates are the longest
_ALIGNMENTS = [2**power for power in range(3, 21)]
_MAX_ELEMENTS = 2**24  # limit of an array; the largest vocabularies have under a million tokens
_MAX_OUTLINED = 2**16  # bytes of a value in an outline
_TOKENS = "tokenizer.ggml.tokens"
_COUNTED = ("gpt2", "starcoder2")  # for these transformers counts the tokens, whatever vocab_size is
_PLAUSIBLE = 256  # versions and types below are those of other releases; others are damage
_MAX_ENTRIES = 10**6  # limit of tensors, and of values; real files have thousands of tensors and tens of values


@dataclass(frozen=True)
class GgufTensor:
    """Location of one tensor in the file at `path`: bytes offset .. offset + nbytes - 1. kind: a GGMLQuantizationType;
    shape: in torch's order of dimensions."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path = Path()


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file. values: scalar and string metadata, and the arrays that were to be read. places: first and
    last byte + 1 of each key with its value; table: those of the table of tensors. others: headers of the other parts
    of a model in several files, whose tensors are among `tensors`."""

    path: Path
    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    places: Mapping[str, tuple[int, int]]
    table: tuple[int, int]
    others: tuple["Header", ...] = ()

    def text(self, key: str) -> str:
        """Return a metadata value as a string, "" if the key is missing."""
        return str(self.values.get(key, ""))

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return self.text("general.architecture")


def gguf_parts(file: Path) -> list[Path]:
    """Return the files of a GGUF model, of which `file` is one, by the names that llama.cpp gives to parts."""
    if (match := _SPLIT.fullmatch(file.name)) is None:
        return [file]
    begin, own, count, end = match.groups()
    if not 1 <= int(own) <= int(count):
        return [file]
    return [file.with_name(f"{begin}-{number:05}-of-{count}{end}") for number in range(1, int(count) + 1)]


def read_header(path: Path, arrays: Collection[str] = ()) -> Header:
    """Return the header of a GGUF file, with every tensor checked against the file's size. Raise BadCheckpoint if the
    file is no GGUF file, or damaged, or cut off, UnsupportedModel as `_tables`. arrays: keys of the arrays to read;
    others are skipped.

    gguf.GGUFReader takes seconds and hundreds of megabytes for a file with a vocabulary.
    """
    with opened(path) as file:
        if (magic := file.read(4)) != b"GGUF":
            check_content(path)
            fault = f"is not a GGUF file: it starts with {magic!r}" if magic else "is empty"
            raise BadCheckpoint(f"{path} {fault}; {AGAIN}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return Header(path, *_tables(path, data, arrays))
            except UnsupportedModel:
                raise
            except (ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
                fault = f"is damaged or cut off, {AGAIN}: {type(error).__name__}: {error}"
                raise BadCheckpoint(f"{path} {fault}") from error


def read_model(files: Sequence[Path], arrays: Collection[str] = ()) -> Header:
    """Return the header of a model in one or more files: that of the first one, with the tensors of all. Raise as
    `read_header`, BadCheckpoint if the parts do not fit each other, UnsupportedModel if `files` are not all of them."""
    first = read_header(files[0], arrays)
    if (count := first.values.get("split.count", 1)) != len(files) and (count, len(files)) != (0, 1):
        fault = f"{files[0]} is one of {count!s:.20} parts, but its name counts {len(files)}"
        raise UnsupportedModel(f"{fault}; name them ...-00001-of-0000N.gguf, or join them with `gguf-split --merge`")
    if len(files) == 1:
        return first
    others = tuple(read_header(file) for file in files[1:])
    for number, header in enumerate((first, *others)):
        if (header.values.get("split.no"), header.values.get("split.count")) != (number, count):
            raise BadCheckpoint(f"{header.path} is not part {number + 1} of {count} by its metadata; {AGAIN}")
    tensors = {tensor.name: tensor for header in (first, *others) for tensor in header.tensors}
    stated, total = first.values.get("split.tensors.count"), sum(len(header.tensors) for header in (first, *others))
    if not len(tensors) == total == stated:
        fault = f"{files[0]} states {stated!s:.20} tensors in all parts, but they hold {total}, {len(tensors)} by name"
        raise BadCheckpoint(f"{fault}; {AGAIN}")
    return replace(first, tensors=tuple(tensors.values()), others=others)


def write_outline(header: Header, path: Path) -> None:
    """Write a GGUF file that has the header of another one, except values of more than _MAX_OUTLINED bytes, such as a
    vocabulary, and a hole in place of the tensors. The size of the vocabulary is in `vocab_size` instead.

    gguf.GGUFReader, with which transformers reads the config, takes 2 kB for each token and merge."""
    key, tokens = f"{header.architecture}.vocab_size", header.values.get(_TOKENS) or ()
    counted = header.architecture in _COUNTED
    with opened(header.path) as file, path.open("wb") as out:

        def bytes_at(begin: int, end: int) -> bytes:
            file.seek(begin)
            return file.read(end - begin)

        small = {name for name, (begin, end) in header.places.items() if end - begin <= _MAX_OUTLINED}
        entries = [
            bytes_at(*header.places[name]) for name in small | ({_TOKENS} & {*header.places} if counted else set())
        ]
        if tokens and key not in header.values and not counted:
            entries.append(struct.pack("<Q", len(key)) + key.encode() + struct.pack("<II", 4, len(tokens)))
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(header.tensors), len(entries)) + b"".join(entries))
        out.write(bytes_at(*header.table))
        for other in header.others:
            with opened(other.path) as part:
                part.seek(other.table[0])
                out.write(part.read(other.table[1] - other.table[0]))
        largest = max(each.path.stat().st_size - each.table[1] for each in (header, *header.others))
        out.truncate(out.tell() + max(_ALIGNMENTS) + largest)


def _tables(path: Path, data: mmap.mmap, arrays: Collection[str]) -> tuple[Any, ...]:
    """Return the fields of `Header` after the path, of a mapped file (version 2 or 3, little-endian), from its fifth
    byte on. Raise ValueError, KeyError, ArithmeticError or struct.error if the header is not valid, UnsupportedModel if
    it is of another version, or has types of tensors that are not known."""
    data.seek(4)
    version, tensor_count, value_count = _numbers(data, "IQQ")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        what = "big-endian, and only little-endian files" if swapped else f"of version {version}, and only 2 and 3"
        if swapped or version < _PLAUSIBLE:
            raise UnsupportedModel(f"{path} is {what} of the GGUF format are read; convert the model again")
        raise ValueError(f"version {version} is not 2 or 3")
    if max(tensor_count, value_count) > _MAX_ENTRIES:
        raise ValueError(f"{tensor_count} tensors and {value_count} values are more than any file has")
    values, places = dict[str, Any](), dict[str, tuple[int, int]]()
    for _ in range(value_count):
        begin = data.tell()
        key, (kind,) = _string(data), _numbers(data, "I")
        if key in values:
            raise ValueError(f"{key!r} is there twice")
        values[key] = _value(data, kind, key in arrays)
        places[key] = begin, data.tell()
    infos, begin = [], data.tell()
    for _ in range(tensor_count):
        name, (dimensions,) = _string(data), _numbers(data, "I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        infos.append((name, _numbers(data, f"{dimensions}Q")[::-1], *_numbers(data, "IQ")))
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
        raise ValueError(f"alignment {alignment} is not a power of 2 up to {_ALIGNMENTS[-1]}")
    table = begin, data.tell()
    start = -(-data.tell() // alignment) * alignment
    tensors = tuple(_stored(path, len(data), start, *info) for info in infos)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors have one name")
    for before, after in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if before.offset + before.nbytes > after.offset:
            raise ValueError(f"tensors {before.name} and {after.name} overlap")
    return values, tensors, places, table


def _numbers(data: mmap.mmap, form: str) -> tuple[Any, ...]:
    return struct.unpack("<" + form, data.read(struct.calcsize("<" + form)))


def _string(data: mmap.mmap) -> str:
    [text] = _strings(data, 1)
    return text.decode("utf-8", errors="replace")


def _strings(data: mmap.mmap, count: int) -> Iterator[bytes]:
    """Yield the bytes of the next strings, up to 300,000 of a vocabulary, and then move the position behind them."""
    at, size_at = data.tell(), struct.Struct("<Q").unpack_from
    for _ in range(count):
        begin = at + 8
        at = begin + size_at(data, at)[0]
        if at > len(data) or at - begin > _MAX_TEXT_BYTES:
            raise ValueError(f"a string at {begin} has {at - begin} bytes")
        yield data[begin:at]
    data.seek(at)


def _value(data: mmap.mmap, kind: int, read_array: bool) -> Any:
    """Return a value; None for an array that is not to be read. `seek` raises ValueError beyond the end of the file."""
    if kind == _STRING:
        return _string(data)
    if kind != _ARRAY:
        return _numbers(data, _SCALARS[kind])[0]
    element, count = _numbers(data, "IQ")
    if count > _MAX_ELEMENTS:
        raise ValueError(f"an array at {data.tell()} has {count} elements; the limit is {_MAX_ELEMENTS}")
    if read_array and element in _SCALARS:
        return list(_numbers(data, f"{count}{_SCALARS[element]}"))
    if element in _SCALARS:
        data.seek(count * struct.calcsize("<" + _SCALARS[element]), os.SEEK_CUR)
    elif element == _STRING:
        if 8 * count > len(data) - data.tell():
            raise ValueError(f"{count} strings at {data.tell()} go beyond the end of the file")
        texts = _strings(data, count)
        if read_array:
            return [text.decode("utf-8", errors="replace") for text in texts]
        deque(texts, 0)
    else:
        raise ValueError(f"array of type {element}")
    return None


def _stored(path: Path, size: int, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """Return the location of a tensor in a file of `size` bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind < _PLAUSIBLE and kind not in GGMLQuantizationType.__members__.values():
        fault = f"{path}: tensor {name} has the type {kind}, which the installed package gguf does not know"
        remedy = "newer types need a newer gguf, and some older ones were given up: take a file of another quantisation"
        raise UnsupportedModel(f"{fault}; {remedy}")
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"rows of tensor {name} of shape {shape} are no multiple of the block of {block}")
    offset += start
    stored = GgufTensor(name, GGMLQuantizationType(kind), shape, offset, math.prod(shape) // block * nbytes, path)
    if stored.offset + stored.nbytes > size:
        raise ValueError(f"tensor {name} goes beyond the end of the file")
    return stored
