"""bitsandbytes: NF4 and FP4, also with nested scales, and LLM.int8.

A module in 4 bits has `weight` uint8 [n / 2, 1], `weight.absmax`, `weight.quant_map`, and `weight.quant_state.*`, a
JSON object with shape and sizes of blocks as bytes. One in 8 bits has `weight` int8 [out, in] and `SCB` fp32 [out]: a
number is code * SCB / 127, computed as code * SCB * fp32(1 / 127).
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flexengine.codec.flat_blocks import NAMES, FlatBlocks
from flexengine.codec.forms import WeightFormat
from flexengine.codec.scaled import Scaled
from flexengine.errors import BadCheckpoint, UnsupportedModel, shown
from flexengine.model.checkpoint import Origin
from flexengine.model.files import AGAIN, PLAIN
from flexengine.model.quantised.matrices import Matrix, elements, values_of

_STATE = ".quant_state.bitsandbytes__"


def matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the matrices of a checkpoint. settings: its quantization_config."""
    for name in tensors:
        weight, mark, kind = name.partition(_STATE)
        if mark:
            yield _in_4_bits(weight, kind, name, tensors)
        elif name.endswith(".SCB"):
            yield _in_8_bits(name.removesuffix(".SCB"), tensors)


def _in_4_bits(weight: str, kind: str, state: str, tensors: Mapping[str, Origin]) -> Matrix:
    about = json.loads(bytes(values_of(tensors[state]).tolist()))
    if kind not in NAMES or about["quant_type"] != kind:
        raise UnsupportedModel(f"tensor {state} is of type {shown(about.get('quant_type'))}; nf4 and fp4 are read")
    (rows, columns), block, nested = about["shape"], about["blocksize"], about.get("nested_blocksize") or 0
    if not math.isfinite(offset := float(about.get("nested_offset") or 0.0)):
        raise BadCheckpoint(f"tensor {state} has the nested_offset {offset}, which must be finite; {AGAIN}, or {PLAIN}")
    form = FlatBlocks(rows, columns, kind, block, nested, offset)
    parts = ["", ".absmax", ".quant_map", *([".nested_absmax", ".nested_quant_map"] if nested else [])]
    expected = (torch.uint8, *((torch.uint8,) if nested else (torch.float32,)), *[torch.float32] * 3)
    for part, dtype, nbytes in zip(parts, expected, form.sizes, strict=False):
        found = tensors.get(weight + part)
        if found is None:
            raise BadCheckpoint(f"{weight} is quantised ({kind}), but its tensor {weight + part} is missing; {AGAIN}")
        if (found.dtype, found.nbytes) != (dtype, nbytes):
            fault = f"tensor {weight + part} is {found.dtype} {list(found.shape)}, of a matrix {[rows, columns]}"
            raise BadCheckpoint(f"{fault} in blocks of {block}; it must have {nbytes} bytes: {AGAIN}")
    names = tuple(weight + part for part in parts)
    checked = names[2:] if nested else names[1:]
    return Matrix(weight, (rows, columns), WeightFormat(form), names, checked, (state,))


def _in_8_bits(module: str, tensors: Mapping[str, Origin]) -> Matrix:
    weight, scale, layout = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    found = tensors.get(weight)
    if found is None or found.dtype != torch.int8 or len(found.shape) != 2:
        held = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise BadCheckpoint(f"{scale} is there, but {weight} is {held}; it must be int8 [out, in]: {AGAIN}")
    others = (layout,) if layout in tensors else ()
    if others and bool(values_of(tensors[layout]).any()):
        raise UnsupportedModel(f"{layout} is not 0: {weight} lies in tiles, which is not read; {PLAIN}")
    if tensors[scale].dtype != torch.float32 or elements(tensors[scale].shape) != found.shape[0]:
        held = f"{tensors[scale].dtype} {list(tensors[scale].shape)}"
        raise BadCheckpoint(f"tensor {scale} is {held}; it must be F32 {[found.shape[0]]}, as {weight} has: {AGAIN}")
    form = WeightFormat(Scaled(*found.shape, "w8", (1, 0), "f32", whole="127ths", signed=True))
    return Matrix(weight, found.shape, form, (weight, scale), (scale,), others)
