"""compressed-tensors (LLM Compressor): integers packed in words or bytes, FP8, NVFP4 and MXFP4, by config groups.

The group of a module is found by its whole name: targets are names, "re:" patterns that match from the first letter on,
or the class Linear, in this order, and patterns by the alphabet. Sources: compressed_tensors/utils/match.py,
compressors/*/base.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flexengine.codec.forms import WeightFormat
from flexengine.codec.scaled import Scaled
from flexengine.errors import BadCheckpoint, UnsupportedModel, shown
from flexengine.model.checkpoint import Origin
from flexengine.model.files import AGAIN, PLAIN
from flexengine.model.quantised.matrices import SCALE_KINDS, Matrix, blocks, elements, values_of

_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
FORMATS = (
    *_PACKED,
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_ZERO = ".weight_zero_point"


def matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the matrices of a checkpoint. settings: its quantization_config."""
    groups: dict[str, Mapping[str, Any]] = settings["config_groups"]
    for stated in [settings.get("format"), *(group.get("format") for group in groups.values())]:
        if stated is not None and stated not in FORMATS:
            raise UnsupportedModel(f"quantization_config: format is {shown(stated)}; read are {', '.join(FORMATS)}")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if settings.get("transform_config") or sparsity != "dense":
        what = "transform_config" if settings.get("transform_config") else f"sparsity_config {shown(sparsity)}"
        raise UnsupportedModel(f"quantization_config has {what}, which is not read; {PLAIN}")
    for name, origin in tensors.items():
        packed = name.endswith(".weight_packed")
        eight = origin.dtype in (torch.int8, torch.float8_e4m3fn) and name.endswith(".weight")
        if packed or eight:
            module = name.rpartition(".")[0]
            yield _matrix(module, name, _group(module, groups, settings.get("ignore") or ()), tensors)


def matches(module: str, target: str) -> bool:
    """Return whether a target is the module's whole name, or a pattern that matches it from its first letter on."""
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _group(module: str, groups: Mapping[str, Mapping[str, Any]], ignored: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings of a module's weights. Raise BadCheckpoint if there are none."""
    if any(matches(module, target) for target in ignored):
        raise BadCheckpoint(f"{module} is quantised, but quantization_config ignores it; correct it, or {AGAIN}")
    ranks = dict[tuple[int, str], Mapping[str, Any]]()
    for group in groups.values():
        if group.get("weights") is None:  # of activations or a cache only
            continue
        for target in group["targets"]:
            if matches(module, target):
                ranks[int(target.startswith("re:")), target] = group
            elif target == "Linear":  # the class of all matrices that are read
                ranks[2, target] = group
    if not ranks:
        raise BadCheckpoint(f"{module} is quantised, but no group of quantization_config has it; {AGAIN}")
    weights: Mapping[str, Any] = ranks[min(ranks)]["weights"]
    return weights


def _matrix(module: str, codes: str, weights: Mapping[str, Any], tensors: Mapping[str, Origin]) -> Matrix:
    """Return a module's matrix. codes: name of the tensor with its codes."""
    origin, others = tensors[codes], list[str]()
    if f"{module}.weight_g_idx" in tensors:
        raise UnsupportedModel(
            f"{module} has columns in an order of their own (weight_g_idx), which is not read; {PLAIN}"
        )
    if len(origin.shape) != 2:
        raise UnsupportedModel(f"tensor {codes} is a stack {list(origin.shape)}, which is not read; {PLAIN}")
    scale = f"{module}.weight_scale"
    if scale not in tensors:
        raise BadCheckpoint(f"{module} is quantised, but its scales, {scale}, are missing; {AGAIN}")
    bits, kind = weights.get("num_bits"), SCALE_KINDS.get(tensors[scale].dtype)
    family, across, whole = _family(module, origin, kind, weights, tensors)
    rows, columns = origin.shape[0], origin.shape[1] * across
    if (stated := f"{module}.weight_shape") in tensors:
        others.append(stated)
        shape = values_of(tensors[stated]).tolist()
        if len(shape) != 2 or shape[0] != rows or not columns - across < shape[1] <= columns:
            raise BadCheckpoint(f"tensor {stated} holds {shape}, but {codes} is {list(origin.shape)} of {bits} bits")
        columns = shape[1]
    block, parts = _block(module, (rows, columns), weights, tensors[scale].shape), [codes, scale]
    zeros = _zeros(module, (rows, columns), weights, tensors, block)
    if zeros:
        parts.append(module + _ZERO)
    elif module + _ZERO in tensors:
        others.append(module + _ZERO)
    if whole:
        parts.append(divisor := f"{module}.weight_global_scale")
        held = values_of(tensors[divisor]).view(-1)
        if held.dtype != torch.float32 or len(held) != 1 or bool((448 / held).isinf()):
            fault = f"tensor {divisor} is {held.dtype} {held[:3].tolist()}, and divides scales of up to 448"
            raise BadCheckpoint(f"{fault}: it must be a number in F32 that is not 0; {AGAIN}")
    signed = origin.dtype == torch.int8
    default = {"fp8": "f32", "mxfp4": "e8m0", "mxfp8": "e8m0", "nvfp4": "e4m3"}.get(family, "bf16")
    form = Scaled(rows, columns, family, block, str(kind) * (kind != default), zeros, whole, signed)
    checked = (scale, *([parts[-1]] if whole else []))
    return Matrix(f"{module}.weight", (rows, columns), WeightFormat(form), tuple(parts), checked, tuple(others))


def _family(
    module: str, origin: Origin, kind: str | None, weights: Mapping[str, Any], tensors: Mapping[str, Origin]
) -> tuple[str, int, str]:
    """Return the family of codes, codes in an element of the tensor, and what a scale of the matrix does."""
    found = origin.dtype, weights.get("type"), weights.get("num_bits"), kind
    whole = f"{module}.weight_global_scale" in tensors
    plain = ("f32", "f16", "bf16")
    if found[:3] == (torch.int32, "int", 4) and kind in plain:
        return "w4", 8, ""
    if found[:3] == (torch.int32, "int", 8) and kind in plain:
        return "w8", 4, ""
    if found[:3] == (torch.int8, "int", 8) and kind in plain:
        return "w8", 1, ""
    if found[:3] == (torch.float8_e4m3fn, "float", 8):
        if kind in plain:
            return "fp8", 1, ""
        if kind == "e8m0":
            return "mxfp8", 1, ""
    if found == (torch.uint8, "float", 4, "e8m0") and not whole:
        return "mxfp4", 2, ""
    if found == (torch.uint8, "float", 4, "e4m3") and whole:
        return "nvfp4", 2, "divides"
    stated = f"{shown(weights.get('num_bits'))} bits of type {shown(weights.get('type'))}"
    held = f"{origin.dtype} with scales in {kind or 'an unknown type'}{' and a scale of the matrix' * whole}"
    raise UnsupportedModel(f"{module} has {stated} in {held}, which is not read (4 and 8 bits are); {PLAIN}")


def _block(module: str, shape: tuple[int, int], weights: Mapping[str, Any], scales: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns that share a scale. Raise BadCheckpoint if the scales have another shape."""
    strategy, width, both = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy is None:  # as compressed-tensors derives it
        strategy = "group" if width and width > 0 else "channel" if width == -1 else "tensor"
    expected: tuple[tuple[int, ...], ...] = ()
    if strategy == "tensor":
        block, expected = (0, 0), ((), (1,), (1, 1))
    elif strategy == "channel":
        block, expected = (1, 0), ((shape[0], 1), (shape[0],))
    elif strategy in ("group", "tensor_group") and type(width) is int and width > 0:
        block, expected = (1, width), ((shape[0], -(-shape[1] // width)),)
    elif strategy == "block" and isinstance(both, list | tuple) and len(both) == 2 and min(both) > 0:
        block, expected = (int(both[0]), int(both[1])), (blocks(shape, both),)
    if tuple(scales) not in expected:
        fault = f"tensor {module}.weight_scale has the shape {list(scales)}, of a matrix {list(shape)} with strategy"
        raise BadCheckpoint(f"{fault} {shown(strategy)}, group_size {shown(width)}, block {shown(both)}; {AGAIN}")
    return block


def _zeros(
    module: str,
    shape: tuple[int, int],
    weights: Mapping[str, Any],
    tensors: Mapping[str, Origin],
    block: tuple[int, int],
) -> str:
    """Return how zero points are held, as `Scaled.zeros`. Symmetric weights may have some, which are 0."""
    found = tensors.get(module + _ZERO)
    if weights.get("symmetric", True):
        if found is not None and bool(values_of(found).float().any()):
            raise BadCheckpoint(f"tensor {module + _ZERO} is not 0, but the group is symmetric; {AGAIN}")
        return ""
    if found is None or weights.get("type") != "int":
        raise BadCheckpoint(f"{module} is not symmetric, but its zero points, {module + _ZERO}, are missing; {AGAIN}")
    across, right = 32 // int(weights["num_bits"]), -(-shape[1] // block[1]) if block[1] else 1
    if block[0] == 1 and (found.dtype, found.shape) == (torch.int32, (-(-shape[0] // across), right)):
        return "packed"
    rows = -(-shape[0] // block[0]) if block[0] else 1
    if found.dtype == torch.int8 and elements(found.shape) == rows * right:
        return "bytes"
    raise BadCheckpoint(f"tensor {module + _ZERO} is {found.dtype} {list(found.shape)}, of a matrix {shape}; {AGAIN}")
