"""What layers of equal settings share: the record of what they compute, recorded calls, and memory."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexengine.kernels.recycled import Recycled
from flexengine.kernels.steps import RecordedSteps
from flexengine.model.forward import this_pass
from flexengine.model.native.describe import LayerRecord, angle_pair, cosines_and_sines

MOST_CALLS = 64  # recorded calls that layers of equal settings keep


class Scratch(Recycled):
    """Memory for calls, which all layers of a model share. Fresh memory for every call would cost page faults."""

    block = torch.empty(0, dtype=torch.uint8)  # for intermediate results; as large as a call has needed

    def release(self) -> None:
        super().release()
        self.block = Scratch.block


class LayerKind:
    """Calls and memory of layers of equal settings.

    Args:
        record: what they compute.
        proven: returns whether the calls compute it (native/recognise.py).
    """

    def __init__(self, record: LayerRecord, proven: Callable[[], bool], scratch: Scratch) -> None:
        self.record, self.proven, self.scratch = record, proven, scratch
        self.formats = dict[Hashable, int]()  # a number for each combination of shapes and formats of a layer's weights
        self._calls: dict[Hashable, RecordedSteps] = {}  # the one used last is the last one
        self.release()

    def release(self) -> None:
        """Drop all tensors."""
        self.scratch.release()
        # Page tables, key and call of the last whole layer; the next layers of a sweep have the same.
        self.recent: tuple[Tensor, Hashable, RecordedSteps] | None = None
        self._given: tuple[Any, Any, list[Tensor] | None] = None, None, None

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
        """Return cosines and sines, [tokens, turned]; None if they are others than the calls can use. positions:
        argument `position_embeddings`, the same object for all layers of a pass; shape: (1, tokens, width)."""
        if self._given[0] is not positions or self._given[1] != shape:
            pair, turned = angle_pair(positions), None
            if pair is not None and all(x.shape == shape and x.dtype == torch.float32 for x in pair):
                assert self.record.rotary is not None
                turned = [x.contiguous() for x in cosines_and_sines(self.record.rotary, pair[0][0], pair[1][0])]
            self._given = positions, shape, turned
        return self._given[2]

    def alibi(self, heads: int, scale: float) -> list[Tensor]:
        """Return the additional elements of queries, [1, heads], and of keys, [tokens, heads] (adapters/alibi.py)."""
        positions = this_pass().inputs.positions
        if self._given[0] is not positions:
            from flexengine.model.adapters.alibi import slopes_on  # few models have such positions

            keys = positions.float().view(-1, 1) * slopes_on(positions.device, heads)
            self._given = positions, None, [torch.full((1, heads), 1 / scale), keys]
        assert self._given[2] is not None
        return self._given[2]
