"""Layers that a cell computes together with its own, in one call of kernels (model/native/layer.py)."""

from collections.abc import Sequence

from flexengine.model.forward import pausing_layers
from flexengine.model.skeleton import Skeleton
from flexengine.places import DEVICE
from flexengine.schedule.order import Batch
from flexengine.schedule.program import Task, continues
from flexengine.worker.weights import Weights


class Ahead:
    """Tells which layers a cell may compute, before the cells of these layers.

    Args:
        skeleton: modules of the model.
        weights: weights of the job.
    """

    def __init__(self, skeleton: Skeleton, weights: Weights) -> None:
        self._modules, self._weights = pausing_layers(skeleton.model)[: len(skeleton.layers)], weights
        self._allowed: list[bool] = []

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin a sweep.

        A gpu_batch whose attention reads what an earlier one of the sweep appends must wait for it in every layer.
        """
        self._allowed = [
            batch.hidden_home == DEVICE and not any(continues(other, batch) for other in batches[:number])
            for number, batch in enumerate(batches)
        ]

    def layers(self, task: Task) -> range:
        """Return the layers that a call of kernels may compute in a COMPUTE task: its own, and those after it whose
        weights are on the device, and whose input was the output of the layer before in the last pass. There are none
        if the task's layer has no native form."""
        first = task.cell.layer
        if self._modules[first].native is None:
            return range(first, first)
        if not (self._allowed[task.cell.batch] and task.slot < 0 and self._weights.arrived):
            return range(first, first + 1)
        rest = range(first + 1, len(self._modules))
        return range(first, next((j for j in rest if self._weights.units[j] or not self._joined(j)), rest.stop))

    def _joined(self, layer: int) -> bool:
        native = self._modules[layer].native
        return native is not None and native.joined
