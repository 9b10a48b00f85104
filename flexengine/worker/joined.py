"""Layers that one cell computes together, in one call of kernels (model/native/layer.py)."""

from collections.abc import Sequence

from flexengine.model.forward import pausing_layers
from flexengine.model.skeleton import Skeleton
from flexengine.places import DEVICE
from flexengine.schedule.batches import Batch, continues
from flexengine.worker.weights import Weights


class JoinedLayers:
    """Tells the program which layers a cell computes."""

    def __init__(self, skeleton: Skeleton, weights: Weights) -> None:
        self._modules, self._weights = pausing_layers(skeleton.model)[: len(skeleton.layers)], weights
        self._tokens: list[int] = []  # by gpu_batch; 0 if each of its cells computes one layer

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin a sweep.

        KV and hidden states of the gpu_batch must be on the device. A gpu_batch whose attention reads what an earlier
        one of the sweep appends must wait for it in every layer.
        """
        self._tokens = [
            batch.tokens
            if batch.cache_home == batch.hidden_home == DEVICE
            and not any(continues(other, batch) for other in batches[:number])
            else 0
            for number, batch in enumerate(batches)
        ]

    def count(self, layer: int, batch: int) -> int:
        """Return the number of layers, from this one on, that a cell computes.

        Their weights are on the device, and the input of each was the output of the layer before in the last pass. They
        are no more than one call of kernels computes, so that Ctrl-C and reports of progress wait for one call only.
        """
        native, tokens = self._modules[layer].native, self._tokens[batch]
        if native is None or not tokens or not self._weights.arrived:
            return 1
        rest = range(layer + 1, min(len(self._modules), layer + native.most_layers(tokens)))
        for j in rest:
            other = self._modules[j].native
            if self._weights.units[j] or other is None or not other.joined:
                return j - layer
        return rest.stop - layer

    def native(self, layer: int, end: int) -> range:
        """Return the layers of layer .. end - 1 that kernels may compute: none if modules compute the first one."""
        return range(layer, layer if self._modules[layer].native is None else end)
