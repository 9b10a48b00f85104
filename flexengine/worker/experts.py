"""Experts of streamed layers, loaded by rows: of a layer's slot, only the experts that some token chose are filled.

An expert is a row of each of the layer's stacked matrices. It goes to its own place in the slot, so the modules read it
there as if all experts had been loaded, and kernels compute the same numbers. An expert that a gpu_batch loaded stays
until the layer's last gpu_batch has been computed: in a sweep, each is loaded once at most.

Which experts are loaded is written by the device lane alone. Other lanes read a list that is complete before their task
begins.
"""

from collections.abc import Sequence

from flexengine.model.forward import Rows
from flexengine.model.products import load_by_rows
from flexengine.worker.weights import Weights


class Experts:
    """The experts of one job: `loaded` when a layer's slot is filled, `lacking` at a pause, `load` in other lanes.

    Attributes:
        names: per layer, its experts' matrices off the device.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights, skeleton = weights, weights.skeleton
        streamed = weights.units[: len(skeleton.layers)]
        self.names = [tuple(n for n in unit if n in skeleton.experts) for unit in streamed]
        self._there: dict[tuple[int, int], set[int]] = {}  # by layer and slot, of those filled by rows
        for j, names in enumerate(self.names):
            for module in {skeleton.layers[j][n].module for n in names}:
                own = tuple(n for n in names if skeleton.layers[j][n].module is module)
                load_by_rows(module, j, own)

    def loaded(self, layer: int, slot: int, by_rows: bool) -> None:
        """Note that a slot holds a layer, with none of its experts if it is to be filled by rows, else with all."""
        if by_rows:
            self._there[layer, slot] = set()
        else:
            self._there.pop((layer, slot), None)

    def lacking(self, rows: Rows, slot: int) -> list[int] | None:
        """Return the experts to be loaded now, rising; None if the slot was filled with all. On a GPU this waits for
        the router's choice."""
        there = self._there.get((rows.layer, slot))
        if there is None:
            return None
        missing = sorted(set(rows.ids.flatten().tolist()) - there)
        there.update(missing)
        return missing

    def load(self, layer: int, slot: int, home: str, hop: int, experts: Sequence[int]) -> None:
        """Move experts one leg of their way from a home tier."""
        self.weights.load_rows(layer, slot, home, hop, self.names[layer], experts)

    def bring(self, rows: Rows, slot: int) -> None:
        """Load the experts of a pause that are not there, over the whole way, in this thread."""
        self.weights.bring_rows(rows.layer, slot, rows.tensors, self.lacking(rows, slot) or ())

    def close(self) -> None:
        """Let modules pause no more."""
        for j, names in enumerate(self.names):
            for name in names:
                load_by_rows(self.weights.skeleton.layers[j][name].module, j, ())
