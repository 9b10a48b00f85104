"""Rows of matrices in the order of GGUF files, where the two rows that rotary positions turn together lie next to each
other, as llama.cpp's converter puts them: of a head of n rows 0, n / 2, 1, n / 2 + 1, and so on."""

from typing import Any

import torch
from torch import Tensor

from flexengine.model.checkpoint import ByteRange, Origin

MOST_PARTED = 1 << 20  # bytes of heads that are put in order together


def in_order(origin: Origin) -> tuple[ByteRange, ...]:
    """Return the byte ranges of a parameter with all rows in order, one for each row."""
    ((path, start, nbytes),), (heads, rows) = origin.runs, origin.pairs or (1, 2)
    width = nbytes // (heads * rows)
    order = (head * rows + 2 * i + side for head in range(heads) for side in (0, 1) for i in range(rows // 2))
    return tuple(ByteRange(path, start + row * width, width) for row in order)


def part_pairs(flat: Tensor, heads: int, rows: int) -> None:
    """Put the rows of a matrix in order, in place. Scratch memory: about a MiB, or a head.

    Args:
        flat: the matrix, contiguous.
        heads, rows: see `checkpoint.Origin.pairs`.
    """
    data = flat.view(torch.uint8).view(heads, -1)
    for some in torch.split(data, max(1, MOST_PARTED // data.shape[1])):
        part: Any = some.numpy() if data.is_cpu else some  # torch would use all threads, beside products
        part[:] = part.reshape(len(some), rows // 2, 2, -1).swapaxes(1, 2).reshape(some.shape)
