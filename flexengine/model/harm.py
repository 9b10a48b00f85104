"""Harm of a format to each layer: a number that ranks layers and formats by the damage to the model's results."""

from collections.abc import Mapping, Sequence

import torch

from flexengine.activity import advance
from flexengine.codec.named import WEIGHTS
from flexengine.codec.packed import Packed
from flexengine.model.encoding import forms, matrix_pieces
from flexengine.model.form import WeightFormat
from flexengine.model.importance import Importances
from flexengine.model.loading import Origin
from flexengine.model.skeleton import Skeleton

VERSION = 1  # part of the cache's key: raise it when the measured harms change


def measure(
    skeleton: Skeleton, stored: Mapping[str, Origin], codecs: Sequence[str], importances: Importances
) -> list[dict[str, float]]:
    """Return the harm of each codec to each layer.

    The harm of a layer is the sum, over its matrices, of the squared error of the outputs relative to the squared
    outputs. Both are estimated from importances, as if the columns of the inputs were independent.

    Args:
        skeleton: the model.
        stored: location of each parameter in the checkpoint.
        codecs: names in codec.named.WEIGHTS.
        importances: importances of a calibration.
    """
    matrices = forms(skeleton, codecs[0])
    found = []
    for layer in skeleton.layers:
        own = [name for name in layer if name in matrices]
        harms = dict.fromkeys(codecs, 0.0)
        for name in own:
            for codec, harm in _relative(name, stored[name], matrices[name], codecs, importances).items():
                harms[codec] += harm
        found.append(harms)
    return found


def _relative(
    name: str, origin: Origin, form: WeightFormat, codecs: Sequence[str], importances: Importances
) -> dict[str, float]:
    """Return the relative squared error of a parameter's outputs by codec; of experts, the mean."""
    count = max(1, form.count)
    sums = dict.fromkeys(codecs, 0.0)
    for number in range(count):
        columns = importances.of(name, number)
        errors, energy = dict.fromkeys(codecs, 0.0), 0.0
        for rows in matrix_pieces(origin, number * (origin.nbytes // count), form):
            part = rows.float()
            weights = 1.0 if columns is None else columns
            energy += float((part.square() * weights).sum(dtype=torch.float64))
            for codec in codecs:
                packed = Packed(WEIGHTS[codec], *part.shape)
                error = packed.dequantize(packed.encode(part, columns)) - part
                errors[codec] += float((error.square() * weights).sum(dtype=torch.float64))
            advance(part.numel() * origin.dtype.itemsize * len(codecs))
        for codec in codecs:
            sums[codec] += errors[codec] / energy / count if energy else 0.0
    return sums
