"""Weights `mixed`: the format of every layer is chosen such that the weights fit a budget at the least harm.

Harms are those of model/harm.py, weighted by importances of the calibration text; plan/bits.py chooses. Harms are
stored in the cache by model and importances.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

from flexengine.activity import activity, message
from flexengine.engine.calibration import Calibrator
from flexengine.engine.core import Core
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.lossy import Lossy, weights_text
from flexengine.model import harm
from flexengine.model.encoding import forms
from flexengine.model.prepare import prepared
from flexengine.plan.bits import Format, Option, adabits
from flexengine.worker.opened import Opened

FORMATS: tuple[Format, ...] = (None, "int8", "int4", "int3")  # formats that a layer may get
FILE = "harms.json"


class Bits:
    """Chooses the formats of an engine's layers.

    Attributes:
        budget: most bytes of all weights on the device.
        exact: bytes of the exact model's weights.
        rest: bytes of the weights outside the layers. Embedding and output projection are encoded.
        layers: bytes of each layer, by format.
    """

    def __init__(self, core: Core, calibrator: Calibrator) -> None:
        """Compare the budget with the model. No weights are read.

        Raises:
            InvalidInput: the budget is less than the model takes in the smallest formats.
        """
        assert isinstance(core.lossy.budget, int)
        self.core, self.calibrator, self.budget = core, calibrator, core.lossy.budget
        facts, found = core.facts, {b: _bytes(core.opened, b) for b in self._usable()}
        self.exact = sum(tensor.held_bytes for tensor in facts.tensors)
        self.layers = [{b: sizes[j] for b, (sizes, _) in found.items()} for j in range(len(facts.layers))]
        self.rest = min(rest for _, rest in found.values())
        least = self.rest + sum(min(sizes.values()) for sizes in self.layers)
        if self.budget < min(least, self.exact):
            raise InvalidInput(f"the budget is {_mb(self.budget)}, but the weights of {core.source.name} take at least"
                               f" {_mb(least)}, with all layers in {FORMATS[-1]} and embedding and output projection in"
                               " int8; raise the budget")  # fmt: skip

    def _usable(self) -> list[Format]:
        """Return the formats that the model can have in all layers with the other switches."""
        core = self.core
        integers = core.lossy.compute == "int8"  # multiplies codes, so that every layer must have some
        every = {b: (b,) * core.skeleton.total for b in FORMATS if b is not None or not integers}
        return [b for b, weights in every.items() if core.opened.refusal(_with(core.lossy, weights)) is None]

    def chosen(self) -> Lossy:
        """Return the switches with the chosen format of each layer, and report them. Calibrate, and measure harms,
        unless the cache has both. Exact weights are chosen if the budget holds them."""
        lossy = self.core.lossy
        if self.budget >= self.exact and None in self._usable():
            message(f"weights stay exact: they take {_mb(self.exact)}, and the budget is {_mb(self.budget)}")
            return _with(lossy, None)
        harms = self.harms()
        options = [{b: Option(nbytes, harms[j].get(b or "", 0.0)) for b, nbytes in sizes.items()}
                   for j, sizes in enumerate(self.layers)]  # fmt: skip
        found = adabits(options, self.budget - self.rest)
        assert found is not None  # the budget was compared before
        nbytes = self.rest + sum(self.layers[j][b] for j, b in enumerate(found))
        message(f"bits per layer: {weights_text(found)}, {_mb(nbytes)} of weights; the budget is {_mb(self.budget)}")
        return _with(lossy, found)

    def harms(self) -> list[dict[str, float]]:
        """Return the harm of each encoded format, by layer."""
        core, importances = self.core, self.calibrator.importances
        assert importances is not None
        codecs = [b for b in FORMATS if b is not None]
        layers = len(core.skeleton.layers)

        def build(directory: Path) -> None:
            text = f"measuring the harm of {', '.join(codecs)}, once for this model and text"
            read = sum(t.stored_bytes for layer in core.facts.layers for t in layer) * len(codecs)
            with activity("measuring", text, read, "B", logging.INFO):
                found = harm.measure(core.skeleton, core.opened.locations, codecs, importances)
            (directory / FILE).write_text(json.dumps(found), encoding="utf-8")

        what = json.dumps({"harms": harm.VERSION, "importances": importances.digest, "formats": codecs})
        source, files = core.source.directory, core.opened.given
        path = prepared(source, files, build, what, core.verifier, "harms") / FILE
        try:
            found: list[dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
            if len(found) != layers or any(set(each) != set(codecs) for each in found):
                raise ValueError(f"it must have {', '.join(codecs)} for {layers} layers")
        except (OSError, ValueError, TypeError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}; remove its directory to measure again") from error
        return found


def _bytes(opened: Opened, codec: Format) -> tuple[list[int], int]:
    """Return the bytes of each layer, and those of all other weights, with all layers in one format."""
    facts, made = opened.facts, forms(opened.skeleton, (codec,) * opened.skeleton.total)
    sizes = {t.name: made[t.name].nbytes if t.name in made else t.held_bytes for t in facts.tensors}
    layers = [sum(sizes[t.name] for t in layer) for layer in facts.layers]
    return layers, sum(sizes[t.name] for t in (*facts.others, *facts.edges))


def _with(lossy: Lossy, weights: tuple[Format, ...] | None) -> Lossy:
    """Return the switches with these weights, without the budget, and without calibration if nothing is fitted."""
    plain = replace(lossy, weights=weights, budget=None, calibrate=None)
    return replace(plain, calibrate=lossy.calibrate) if plain.fitted else plain


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
