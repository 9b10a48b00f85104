"""Experts of streamed layers that are loaded for the tokens of a sweep.

They are rows of stacked matrices: a layer's slot is filled only with the experts that its tokens chose. Each expert has
the same place in the slot as if all experts were loaded, so modules and kernels need no change. An expert stays in the
slot until the layer's last gpu_batch is computed, so it is loaded at most once per sweep. Only the device lane writes
the sets of loaded experts. Other lanes read a list that is complete before their task starts.
"""

from flexengine.model.forward import Rows
from flexengine.worker.weights import Weights


class Experts:
    """Experts of one job that are loaded by rows.

    `loaded` is called when a slot is filled, `lacking` at a pause of the device lane, `bring` in the device lane.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights, skeleton = weights, weights.skeleton
        streamed = weights.units[: len(skeleton.layers)]
        # By layer, the experts' matrices off the device.
        self.names = [tuple(n for n in unit if n in skeleton.experts) for unit in streamed]
        self._loaded: dict[tuple[int, int], set[int]] = {}  # by layer and slot, if the slot is filled by rows
        for j, names in enumerate(self.names):
            for module in {skeleton.layers[j][n].module for n in names}:
                own = tuple(n for n in names if skeleton.layers[j][n].module is module)
                module.__dict__["by_rows"] = j, own  # see model/experts.py

    def loaded(self, layer: int, slot: int, by_rows: bool) -> None:
        """Record that a slot holds a layer: without experts if they are loaded by rows, else with all experts."""
        if by_rows:
            self._loaded[layer, slot] = set()
        else:
            self._loaded.pop((layer, slot), None)

    def lacking(self, rows: Rows, slot: int | None) -> list[int] | None:
        """Return the experts to load for a pause, rising, and record them as loaded; None if the slot has all experts.

        On a GPU this waits for the router's result.
        """
        loaded = None if slot is None else self._loaded.get((rows.layer, slot))
        if loaded is None:
            return None
        missing = sorted(set(rows.ids.flatten().tolist()) - loaded)
        loaded.update(missing)
        return missing

    def bring(self, rows: Rows, slot: int) -> None:
        """Load the missing experts of a pause into the slot, in this thread."""
        self.weights.bring_rows(rows.layer, slot, rows.tensors, self.lacking(rows, slot) or ())

    def close(self) -> None:
        """Stop the modules from pausing for experts."""
        for j, names in enumerate(self.names):
            for name in names:
                self.weights.skeleton.layers[j][name].module.__dict__.pop("by_rows", None)
