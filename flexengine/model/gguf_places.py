"""Weights that stay in the user's GGUF file: where each parameter lies there, and in which format.

The prepared directory of a file holds its small tensors, and the list PLACES of all others: for each parameter of the
model the tensors and rows of the file that it consists of. The list names tensors, not bytes, so it is of any file with
this content. Rows of a file are whole blocks of its formats, so rows move as they are.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexengine.activity import activity, advance
from flexengine.codec.forms import FORMS, WeightFormat, make_form
from flexengine.errors import BadCheckpoint, size
from flexengine.model.checkpoint import ByteRange, Origin
from flexengine.model.files import PLACES, read_object
from flexengine.model.gguf_header import GgufTensor, read_header
from flexengine.system.read_retries import opened

PLAIN_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROWS = 1 << 40  # more than any tensor has; a row is numbered tensor * ROWS + row
_MOST_PLACES = 1 << 28  # bytes of PLACES
_PIECE = 1 << 24  # bytes that are scanned at a time
# The bytes of a block whose bits, all set, may make its numbers infinite or NaN: pairs (byte, bits) for each scale.
_HALF = 0x7C  # exponent of an fp16 number, in its second byte
_SCALES: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S"), (((1, _HALF),),)),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ1_S"), (((1, _HALF),),)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (((1, _HALF),), ((3, _HALF),))),
    "Q2_K": (((81, _HALF),), ((83, _HALF),)),
    "Q3_K": (((109, _HALF),),),
    "Q6_K": (((209, _HALF),),),
    "TQ1_0": (((53, _HALF),),),
    "TQ2_0": (((65, _HALF),),),
    "IQ1_M": (((55, 0x70), (53, 0xC0)),),  # its scale lies in the upper bits of four words
    "MXFP4": (((0, 0xFC),),),  # a power of two; numbers of the largest ones may be infinite
}


class ParamPlace(NamedTuple):
    """Rows of a file that a parameter consists of."""

    tensors: tuple[str, ...]  # names in the file
    shape: tuple[int, ...]  # of the parameter
    # (number of the tensor, first row, rows) of each run of rows, in the order of the parameter
    runs: tuple[tuple[int, int, int], ...]
    pairs: int = 0  # rows of a head whose rows lie in pairs, see `checkpoint.Origin`; 0 for rows in order
    transposed: bool = False  # whether the model has each matrix as [in, out]


def place_of_rows(tensors: Sequence[GgufTensor], numbers: Any, transposed: bool = False) -> ParamPlace:
    """Return the place of a parameter. numbers: int64 [..., 1], the rows that it consists of, each tensor * ROWS +
    row, also if the model has it `transposed`."""
    flat, shape = numbers.reshape(-1), (*numbers.shape[:-1], tensors[0].shape[-1])
    if pairs := _pairs(flat) if len(tensors) == 1 else 0:
        flat = np.arange(len(flat))
    ends = [0, *(np.flatnonzero(np.diff(flat) != 1) + 1).tolist(), len(flat)]
    runs = tuple((*divmod(int(flat[low]), ROWS), high - low) for low, high in pairwise(ends))
    shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    return ParamPlace(tuple(tensor.name for tensor in tensors), shape, runs, pairs, transposed)


def _pairs(rows: Any) -> int:
    """Return the rows of a head whose halves are interleaved in the file; 0 for another order. rows: the file's rows in
    the order of the parameter."""
    half = int(np.argmax(rows == 1))
    if half < 2 or len(rows) % (2 * half):
        return 0
    inside = np.arange(2 * half).reshape(half, 2).T.reshape(-1)
    expected = (np.arange(0, len(rows), 2 * half)[:, None] + inside).reshape(-1)
    return 2 * half if np.array_equal(rows, expected) else 0


def in_form(tensor: GgufTensor) -> bool:
    """Return whether a tensor's blocks have a format of `codec.forms`."""
    return tensor.kind.name.lower() in FORMS


def write_places(directory: Path, places: Mapping[str, ParamPlace]) -> None:
    """Write the list of a prepared directory. places: by parameter."""
    text = json.dumps({name: [*place] for name, place in places.items()}, separators=(",", ":"))
    (directory / PLACES).write_text(text, encoding="utf-8")


def in_place(directory: Path, files: Sequence[Path]) -> dict[str, Origin]:
    """Return the location of every parameter that stays in GGUF files. Raise BadCheckpoint if these do not fit the
    list of the prepared directory."""
    tensors = {tensor.name: tensor for file in files for tensor in read_header(file).tensors}
    try:
        return {
            name: _origin([tensors[part] for part in place[0]], ParamPlace(*place))
            for name, place in read_object(directory / PLACES, _MOST_PLACES).items()
        }
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        fault = f"{directory / PLACES} does not fit {files[0]}: {error!r}"
        raise BadCheckpoint(f"{fault}; remove the directory, and it will be made again") from error


def _origin(parts: Sequence[GgufTensor], place: ParamPlace) -> Origin:
    """Return the location of a parameter. parts: its tensors, of one plain kind, or of formats of `codec.forms`."""
    tensor, shape, ranges = parts[0], tuple(place.shape), []
    rows = math.prod(shape) // tensor.shape[-1]
    for number, first, count in place.runs:
        part = parts[number]
        width = part.nbytes // math.prod(part.shape[:-1])
        if not 0 <= first * width <= (first + count) * width <= part.nbytes:
            raise ValueError(f"{part.name} has no rows {first} to {first + count}")
        ranges.append(ByteRange(part.path, part.offset + first * width, count * width))
    if sum(count for *_, count in place.runs) != rows:
        raise ValueError(f"{tensor.name} has other rows")
    turned = (rows // place.pairs, place.pairs) if place.pairs else None
    if (dtype := PLAIN_KINDS.get(tensor.kind.name)) is not None:
        return Origin(tuple(ranges), dtype, shape, pairs=turned)
    experts = shape[0] if len(shape) > 2 else 0
    names = dict.fromkeys(part.kind.name.lower() for part in parts)  # of two, each has half of an expert's rows
    packed = make_form("+".join(names), rows // (experts or 1), tensor.shape[-1])
    form = WeightFormat(packed, experts, place.transposed)
    return Origin(tuple(ranges), torch.float32, shape, form, turned)


def check_scales(tensors: Sequence[GgufTensor]) -> None:
    """Raise BadCheckpoint if a number of some tensors is infinite or NaN. Their bytes are read once, in pieces."""
    total = sum(tensor.nbytes for tensor in tensors)
    with activity("checking", f"checking the numbers of the model, once ({size(total)})", total, "B"):
        for tensor in tensors:
            for start, bad in _bad(tensor):
                if bad.any():
                    row, column = divmod(start + int(bad.argmax()) * _block(tensor)[0], tensor.shape[-1])
                    where = f"in row {row}, from column {column} on"
                    raise BadCheckpoint(f"{tensor.path}: tensor {tensor.name} holds NaN or infinite values {where}")


def _block(tensor: GgufTensor) -> tuple[int, int]:
    """Return the columns and bytes of a block."""
    from gguf import GGML_QUANT_SIZES

    columns, nbytes = GGML_QUANT_SIZES[tensor.kind]
    return columns, nbytes


def _bad(tensor: GgufTensor) -> Iterator[tuple[int, Any]]:
    """Yield, for pieces of a tensor, the number of its first element and whether each block has a bad scale."""
    columns, nbytes = _block(tensor)
    step = _PIECE // nbytes * nbytes
    buffer = np.empty(min(step, tensor.nbytes), dtype=np.uint8)
    with opened(tensor.path) as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.nbytes, step):
            data = buffer[: min(step, tensor.nbytes - start)]
            if file.readinto(data.data) != len(data):
                raise BadCheckpoint(f"{tensor.path} ends before byte {tensor.offset + tensor.nbytes}")
            advance(len(data))
            yield start // nbytes * columns, bad_blocks(tensor.kind.name, columns, data.reshape(-1, nbytes))


def bad_blocks(kind: str, columns: int, blocks: Any) -> Any:
    """Return whether each block has a number that is not finite. blocks: uint8 [blocks, bytes]; columns: of a block."""
    if kind in PLAIN_KINDS:
        exponents = blocks.view({"F32": "<u4"}.get(kind, "<u2"))
        mask = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[kind]
        return ((exponents & mask) == mask).any(1)
    bad = np.zeros(len(blocks), dtype=bool)
    for scale in _SCALES[kind]:
        bad |= np.logical_and.reduce([(blocks[:, byte] & bits) == bits for byte, bits in scale])
    if count := int(bad.sum()):
        form = make_form(kind.lower(), count, columns)
        bad[bad] = ~form.dequantize(torch.from_numpy(blocks[bad]).view(-1)).isfinite().all(1).numpy()
    return bad
