"""FP8 (E4M3) with a scale for each block, row or matrix: DeepSeek, Qwen, MiniMax, FBGEMM and others.

A tensor X in F8_E4M3 has its scales in X_scale_inv, X_scale, or beside it in `scale`. A number is code * scale, also
where the name ends with "_inv". Blocks have the sizes of `weight_block_size`, from the first row and column on, so the
last ones may be smaller.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flexengine.codec.forms import WeightFormat
from flexengine.codec.scaled import Scaled
from flexengine.errors import BadCheckpoint, UnsupportedModel, shown
from flexengine.model.checkpoint import Origin
from flexengine.model.files import AGAIN, PLAIN
from flexengine.model.quantised.matrices import SCALE_KINDS, Matrix, blocks, elements

_SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale")


def matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the matrices of a checkpoint. settings: its quantization_config."""
    block = settings.get("weight_block_size")
    fmt = str(settings.get("fmt") or "e4m3").lower()
    sizes = [*block] if isinstance(block, list | tuple) else []
    if block is not None and not (len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        raise BadCheckpoint(f"quantization_config: weight_block_size is {shown(block)}; it must be two sizes: {AGAIN}")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(f"quantization_config: fmt is {shown(fmt)}; E4M3 is read only; {PLAIN}")
    for name, origin in tensors.items():
        if origin.dtype == torch.float8_e5m2:
            raise UnsupportedModel(f"tensor {name} is in F8_E5M2, and E4M3 is read only; {PLAIN}")
        if origin.dtype == torch.float8_e4m3fn and len(origin.shape) > 1:
            yield matrix(name, tensors, sizes)


def matrix(name: str, tensors: Mapping[str, Origin], sizes: Sequence[int]) -> Matrix:
    """Return a matrix, or a stack of them. Raise BadCheckpoint if its scales are missing or of another shape.

    Args:
        name: of the tensor with the codes.
        tensors: all tensors.
        sizes: rows and columns of a block; empty if scales are of rows or matrices.
    """
    names = [form.format(name=name, module=name.rpartition(".")[0]) for form in _SCALES]
    scale = next((other for other in names if other in tensors), None)
    if scale is None:
        raise BadCheckpoint(f"tensor {name} is in FP8, but its scales, {names[0]}, are missing; {AGAIN}")
    (*stack, rows, columns), kind = tensors[name].shape, SCALE_KINDS.get(tensors[scale].dtype)
    count, shape = elements(stack) if stack else 0, tensors[scale].shape
    block = _block((rows, columns), shape[len(stack) :], sizes)
    if block is None or kind in (None, "e4m3") or len(stack) > 1 or shape[: len(stack)] != tuple(stack):
        grid = f"{list(blocks((rows, columns), sizes))}, " if sizes else ""
        expected = f"{grid}{[rows, 1]} or {[1]}" + f" for each of {count} experts" * bool(stack)
        fault = f"tensor {scale} has {tensors[scale].dtype} {list(shape)}, as scales of {name} {[rows, columns]}"
        raise BadCheckpoint(f"{fault}; it must be {expected}, as weight_block_size is {sizes or None}: {AGAIN}")
    form = Scaled(rows, columns, "fp8", block, "" if kind == "f32" else str(kind))
    return Matrix(name, tensors[name].shape, WeightFormat(form, count), (name, scale), (scale,))


def _block(shape: tuple[int, int], scales: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """Return rows and columns that share a scale, as in `Scaled.block`; None if the scales are of another shape."""
    if sizes and tuple(scales) == blocks(shape, sizes):
        return sizes[0], sizes[1]
    if elements(scales) == 1:
        return 0, 0
    return (1, 0) if tuple(scales) in ((shape[0],), (shape[0], 1)) else None
