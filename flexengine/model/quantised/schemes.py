"""Schemes of quantised safetensors checkpoints, by the method that `quantization_config` names.

A new one is a module with a function that finds the matrices (see `matrices.Matrix`), and a line of METHODS. Which
modules are quantised is read from the tensors: a module that a list such as `modules_to_not_convert` leaves out has a
plain weight. So a list never decides by parts of names, as other programs do.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flexengine.errors import BadCheckpoint, InvalidInput, UnsupportedModel, shown
from flexengine.model.checkpoint import Origin
from flexengine.model.config import parts, quantisation
from flexengine.model.files import AGAIN, PLAIN, read_object
from flexengine.model.quantised.checked import check_once
from flexengine.model.quantised.matrices import located

_HERE = "flexengine.model.quantised"
# By method: a function of the tensors and the settings, which yields the matrices. Raise BadCheckpoint or
# UnsupportedModel if they cannot be read.
METHODS = {
    "fp8": f"{_HERE}.fp8:matrices",
    "fbgemm_fp8": f"{_HERE}.fp8:matrices",
    "mxfp4": f"{_HERE}.mxfp4:matrices",
    "gptq": f"{_HERE}.gptq:matrices",
    "awq": f"{_HERE}.gptq:awq_matrices",
    "compressed-tensors": f"{_HERE}.compressed:matrices",
    "modelopt": f"{_HERE}.modelopt:matrices",
    "bitsandbytes": f"{_HERE}.bitsandbytes:matrices",
}
# Tensors of products that round activations, too; exact products do not read them.
_ACTIVATIONS = re.compile(r"[._](input|activation|act|output)_(scale(_inv|_ub)?|global_scale|zero_point|amax)$")


def settings_of(path: Path, raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return method and settings of quantised weights. Raise UnsupportedModel, with method and remedy, if they are of a
    kind that is not read.

    Args:
        path: of the config, for the message.
        raw: its content.
    """
    for part in parts(raw):
        for key in ("quantization_config", "compression_config"):
            if (settings := part.get(key)) and settings != {"quant_method": "gguf", "dequantize": True}:
                own = settings if isinstance(settings, Mapping) else {}
                old = "bitsandbytes" if own.keys() & {"load_in_4bit", "load_in_8bit"} else None
                method = own.get("quant_method") or old
                if isinstance(method, str) and method in METHODS:
                    return method, own
    known = ", ".join(METHODS)
    fault = f"{path}: the weights are quantised ({quantisation(raw)}), which is not supported; known are {known}"
    raise UnsupportedModel(f"{fault}; {PLAIN}")


def decoded_names(directory: Path, tensors: Mapping[str, Origin], check: bool = True) -> dict[str, Origin]:
    """Return the tensors of a quantised checkpoint under the names that those of an unquantised one have.

    Args:
        directory: of the model.
        tensors: as `checkpoint.read_checkpoint` returns them.
        check: whether scales are read, and refused if they are not finite.

    Raises:
        BadCheckpoint: a tensor of a matrix is missing, has another shape, or holds scales that are not finite.
        UnsupportedModel: the scheme has a part that is not read.
    """
    path = directory / "config.json"
    method, settings = settings_of(path, read_object(path))
    try:
        found = list(resolve_name(METHODS[method])(tensors, settings))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        if isinstance(error, BadCheckpoint | UnsupportedModel):
            raise
        if isinstance(error, InvalidInput):  # a matrix whose shape its format cannot have
            raise BadCheckpoint(f"{directory}: {error}; {AGAIN}") from error
        fault = f"{path}: quantization_config of {method} cannot be read: {error!r}"
        raise BadCheckpoint(f"{fault}; correct it, or {AGAIN}") from error
    if not found:
        raise BadCheckpoint(f"{path} states quantised weights ({method}), but no tensor is quantised; remove the entry")
    taken = {name for matrix in found for name in (*matrix.parts, *matrix.others)}
    result = {name: origin for name, origin in tensors.items() if name not in taken and not _ACTIVATIONS.search(name)}
    names = Counter(matrix.name for matrix in found)
    if twice := next((name for name, count in names.items() if count > 1 or name in result), None):
        raise BadCheckpoint(f"{directory} holds {shown(twice)} both plain and quantised, or twice; {AGAIN}")
    if check:
        check_once((name for matrix in found for name in matrix.scales), tensors)
    return result | {matrix.name: located(matrix, tensors) for matrix in found}
