"""Calls and memory that layers of equal settings share if native kernels compute them (native/layer.py)."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexengine.kernels.recycled import Recycled
from flexengine.kernels.steps import RecordedSteps

MOST_CALLS = 64  # recorded calls that layers of equal settings keep


class Scratch:
    """Memory for calls, which all layers of a model share. Fresh memory for every call would cost page faults.

    Attributes:
        block: intermediate results; as large as a call has needed.
        results: memory of results.
    """

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self.results = Recycled()

    def release(self) -> None:
        """Free the memory."""
        self.block = torch.empty(0, dtype=torch.uint8)
        self.results.release()


class LayerKind:
    """Calls and memory of layers of equal settings.

    Attributes:
        proven: returns whether they compute so (native/recognise.py).
        scratch: memory of calls.
        formats: a number for each combination of shapes and formats of a layer's weights.
        recent: page tables, key and call of the last whole layer; the next layers of a sweep have the same.
    """

    def __init__(self, proven: Callable[[], bool], scratch: Scratch) -> None:
        self.proven, self.scratch, self.formats = proven, scratch, dict[Hashable, int]()
        self._calls: dict[Hashable, RecordedSteps] = {}  # the one used last is the last one
        self.release()

    def release(self) -> None:
        """Drop all tensors."""
        self.scratch.release()
        self.recent: tuple[Tensor, Hashable, RecordedSteps] | None = None
        self._angles: tuple[Any, tuple[int, ...], list[Tensor] | None] = None, (), None

    def call(self, key: Hashable, record: Callable[[], RecordedSteps]) -> RecordedSteps:
        """Return the call with a key, and make the scratch memory as large as it needs. If there is none, record it."""
        if (found := self._calls.pop(key, None)) is None:
            found = record()
            if len(self._calls) >= MOST_CALLS:
                del self._calls[next(iter(self._calls))]
        self._calls[key] = found
        if self.scratch.block.nbytes < found.nbytes:
            self.scratch.block = torch.empty(found.nbytes, dtype=torch.uint8)
        return found

    def angles(self, positions: Any, shape: tuple[int, ...]) -> list[Tensor] | None:
        """Return cosines and sines, [tokens, head_dim]; None if they are others than the calls can use.

        Args:
            positions: argument `position_embeddings` of a layer, the same object for all layers of a pass.
            shape: (1, tokens, head_dim).
        """
        if self._angles[0] is not positions or self._angles[1] != shape:
            fine = type(positions) is tuple and len(positions) == 2
            fine = fine and all(x.shape == shape and x.dtype == torch.float32 for x in positions)
            self._angles = positions, shape, [x[0].contiguous() for x in positions] if fine else None
        return self._angles[2]
