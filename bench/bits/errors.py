"""Errors of encoded weights, weighted by importances: harms that need no further pass of the model."""

from collections.abc import Mapping, Sequence
from typing import Any


def weighted_errors(
    model: Any, columns: Mapping[str, Any], formats: Sequence[str]
) -> dict[str, list[dict[str, float]]]:
    """Return harms by measure, layer and format. If the columns of the inputs are independent, these are the squared
    errors of a layer's outputs, summed over its matrices, and each relative to the squared outputs.

    Args:
        model: a `Layered`.
        columns: importances by parameter.
        formats: names of codecs.
    """
    from flexengine.codec.named import WEIGHTS
    from flexengine.codec.packed import Packed

    found: dict[str, list[dict[str, float]]] = {"importances": [], "importances, relative": []}
    for layer in range(len(model.layers)):
        sums = {name: dict.fromkeys(formats, 0.0) for name in found}
        for name, weight in model.matrices(layer):
            matrix, importance = weight.detach(), columns[name]
            outputs = float((matrix.square() * importance).sum())
            for codec in formats:
                packed = Packed(WEIGHTS[codec], *matrix.shape)
                error = packed.dequantize(packed.encode(matrix, importance)) - matrix
                squared = float((error.square() * importance).sum())
                sums["importances"][codec] += squared
                sums["importances, relative"][codec] += squared / outputs
        for name, harms in sums.items():
            found[name].append(harms)
    return found
