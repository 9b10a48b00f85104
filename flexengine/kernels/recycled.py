"""Memory of large results, used again as soon as no tensor is in it.

torch frees a layer's results when the next layer has read them, but malloc left gaps between aligned blocks that the
results of the next layer did not fit: during the prompts of a job the heap grew by 230 MB, of which 210 MB were gaps.
The first writes to these pages took longer than the attention of the prompts.
"""

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64  # bytes; alignment of tensors
SMALL = 1 << 16  # bytes; smaller tensors are left to torch


class Recycled:
    """Allocates tensors in RAM, for one thread. It has as many blocks of memory as tensors were alive at a time."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous tensor with any values."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype)
        block = self._block(nbytes + ALIGNED)
        part = block[-block.ctypes.data % ALIGNED :][:nbytes]
        weakref.finalize(part, self._free.append, block).atexit = False  # a tensor's storage refers to its array
        return torch.from_numpy(part).view(dtype).view(tuple(shape))

    def _block(self, nbytes: int) -> np.ndarray:
        """Take the smallest free block that is large enough. If there is none, allocate one in place of a free one."""
        sizes = [(block.nbytes, number) for number, block in enumerate(self._free)]
        fitting = [size for size in sizes if size[0] >= nbytes]
        if fitting:
            return self._free.pop(min(fitting)[1])
        if sizes:
            del self._free[min(sizes)[1]]
        return torch.empty(nbytes, dtype=torch.uint8).numpy()  # numpy would map large arrays in huge pages

    def release(self) -> None:
        """Free all blocks; those with tensors in them, when the last of these tensors is freed."""
        self._free = []
