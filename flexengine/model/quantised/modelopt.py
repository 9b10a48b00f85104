"""TensorRT Model Optimizer: NVFP4, whose fp32 scale of a matrix multiplies those of its groups, and FP8.

A module has `weight` uint8 [out, in / 2], `weight_scale` F8_E4M3 [out, in / 16] and `weight_scale_2` fp32 [], or
`weight` F8_E4M3 and `weight_scale`. compressed-tensors holds the same bits with a scale that divides, under another
name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flexengine.codec.forms import WeightFormat
from flexengine.codec.scaled import Scaled
from flexengine.errors import BadCheckpoint, UnsupportedModel, shown
from flexengine.model.checkpoint import Origin
from flexengine.model.files import AGAIN, PLAIN
from flexengine.model.quantised import fp8
from flexengine.model.quantised.matrices import Matrix, elements

_GROUP = 16  # columns


def matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the matrices of a checkpoint. settings: its quantization_config."""
    algorithm = settings.get("quant_algo")
    if algorithm not in ("NVFP4", "FP8", "MIXED_PRECISION"):
        raise UnsupportedModel(
            f"quantization_config: quant_algo is {shown(algorithm)}; NVFP4 and FP8 are read; {PLAIN}"
        )
    for name, origin in tensors.items():
        if name.endswith(".weight") and len(origin.shape) == 2:
            if origin.dtype == torch.float8_e4m3fn:
                yield fp8.matrix(name, tensors, ())
            elif origin.dtype == torch.uint8:
                yield _nvfp4(name, tensors)


def _nvfp4(name: str, tensors: Mapping[str, Origin]) -> Matrix:
    (rows, half), scale, whole = tensors[name].shape, f"{name}_scale", f"{name}_scale_2"
    if missing := next((other for other in (scale, whole) if other not in tensors), ""):
        raise BadCheckpoint(f"tensor {name} is in NVFP4, but its scale, {missing}, is missing; {AGAIN}")
    found, factor, right = tensors[scale], tensors[whole], 2 * half // _GROUP
    fits = (found.dtype, found.shape) == (torch.float8_e4m3fn, (rows, right)) and 2 * half % _GROUP == 0
    if not fits or factor.dtype != torch.float32 or elements(factor.shape) != 1:
        held = f"{scale} {found.dtype} {list(found.shape)}, {whole} {factor.dtype} {list(factor.shape)}"
        fault = f"scales of {name} {[rows, 2 * half]} do not fit it: {held}"
        raise BadCheckpoint(f"{fault}; expected are F8_E4M3 {[rows, right]} and one F32; {AGAIN}")
    form = WeightFormat(Scaled(rows, 2 * half, "nvfp4", (1, _GROUP), whole="multiplies"))
    return Matrix(name, (rows, 2 * half), form, (name, scale, whole), (scale, whole))
