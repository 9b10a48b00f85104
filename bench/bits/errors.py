"""Errors of encoded weights, weighted by importances: harms that need no further pass of the model."""

from collections.abc import Mapping
from typing import Any

ERRORS = ("importances", "importances, relative")


def weighted_errors(exact: Mapping[str, Any], encoded: Mapping[str, Any], columns: Mapping[str, Any]) -> list[float]:
    """Return the harms of a layer by the measures in ERRORS. If the columns of the inputs are independent, these are
    the squared errors of the outputs, summed over the matrices: as they are, and each relative to the squared
    outputs.

    Args:
        exact: matrices of the layer, [rows, columns], by parameter.
        encoded: the same after encoding.
        columns: importances, [columns], by parameter.
    """
    sums = [0.0, 0.0]
    for name, matrix in exact.items():
        squared, outputs = (float((x.square() * columns[name]).sum()) for x in (encoded[name] - matrix, matrix))
        sums = [sums[0] + squared, sums[1] + squared / outputs]
    return sums
