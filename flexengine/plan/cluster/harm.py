"""Harm of formats to quality, by layer (LLM-PQ's omega): a table in a JSON file, or an assumption.

The file is {"layers": [{"exact": 0, "int8": x, "int4": y, "int3": z}, ...]} with one object per layer; "exact" may be
left out. The unit is free: theta is seconds per unit. Without a file, the harm of a format is assumed to be
proportional to the layer's parameters and to 4^-bits, the square of a code's step, and all layers in int4 have harm 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexengine.errors import InvalidInput, shown
from flexengine.plan.cluster.file import EXACT_NAME, FORMATS
from flexengine.plan.cluster.model import Format, Model
from flexengine.plan.hardware import positive
from flexengine.records import read_object
from flexengine.strategy import BITS

Harm = NDArray[np.float64]  # [layers, formats]


def assumed(model: Model, formats: Sequence[Format]) -> Harm:
    """Return the assumed harm of each layer in each format."""
    parts = np.array([layer.active for layer in model.layers])
    factors = np.array([0.0 if form is None else 4.0 ** (4 - BITS[form]) for form in formats])
    harm: Harm = parts[:, None] / parts.sum() * factors
    return harm


def load(path: str | Path, layers: int, formats: Sequence[Format]) -> Harm:
    """Read a table of harm.

    Raises:
        InvalidInput: the file has no table for a model of so many layers with these formats.
    """
    what = f"harm file {path}"
    values = read_object(path, "harm file")
    if set(values) != {"layers"} or not isinstance(values["layers"], list):
        raise InvalidInput(f"{what} has fields {sorted(values)}; it must have layers, a list with an object per layer")
    table: list[Any] = values["layers"]
    if len(table) != layers:
        raise InvalidInput(f"{what} has {len(table)} layers, but the model has {layers}; make it for this model")
    return np.array([_row(entry, f"{what}, layer {j}", formats) for j, entry in enumerate(table)])


def _row(entry: object, what: str, formats: Sequence[Format]) -> list[float]:
    if not isinstance(entry, dict):
        raise InvalidInput(f"{what} is {shown(entry)}; it must be an object of formats")
    if unknown := sorted(set(entry) - set(FORMATS)):
        raise InvalidInput(f"{what} has unknown formats {unknown}; formats are {', '.join(FORMATS)}")
    row = []
    for form in formats:
        value = entry.get(form or EXACT_NAME, 0 if form is None else None)
        if value is None:
            raise InvalidInput(f"{what} has no harm of {form}; give it, or do not allow {form}")
        row.append(float(value) if value == 0 and not isinstance(value, bool) else positive(f"{what}: {form}", value))
    return row
