"""MXFP4 as gpt-oss is published: stacks of experts, with 32 columns of a row in a block of 16 bytes.

A stack X is `X_blocks`, uint8 [experts, out, in / 32, 16], and `X_scales`, uint8 [experts, out, in / 32]: powers of
two. The model's own parameter X is [experts, in, out].
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flexengine.codec.forms import WeightFormat
from flexengine.codec.scaled import Scaled
from flexengine.errors import BadCheckpoint
from flexengine.model.checkpoint import Origin
from flexengine.model.files import AGAIN
from flexengine.model.quantised.matrices import Matrix

_BLOCKS, _SCALES, _COLUMNS = "_blocks", "_scales", 32


def matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the stacks of a checkpoint. Raise BadCheckpoint if scales are missing, or of another shape."""
    for name, origin in tensors.items():
        own = name.removesuffix(_BLOCKS)
        if own == name or origin.dtype != torch.uint8 or len(origin.shape) != 4:
            continue
        (count, rows, groups, nbytes), scales = origin.shape, own + _SCALES
        if scales not in tensors:
            raise BadCheckpoint(f"tensor {name} is in MXFP4, but its scales, {scales}, are missing; {AGAIN}")
        found = tensors[scales]
        if nbytes != _COLUMNS // 2 or (found.dtype, found.shape) != (torch.uint8, (count, rows, groups)):
            fault = f"tensors {name} {list(origin.shape)} and {scales} {found.dtype} {list(found.shape)} do not fit"
            raise BadCheckpoint(
                f"{fault}: expected are 16 bytes in a block, and uint8 {[count, rows, groups]}; {AGAIN}"
            )
        form = Scaled(rows, groups * _COLUMNS, "mxfp4", (1, _COLUMNS))
        shape = (count, groups * _COLUMNS, rows)
        yield Matrix(own, shape, WeightFormat(form, count, transposed=True), (name, scales), (scales,))
