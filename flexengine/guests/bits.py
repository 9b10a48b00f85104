"""Bits per layer: formats of layers whose weights fit a budget at the least harm."""

from dataclasses import replace

from flexengine.activity import message
from flexengine.engine.calibrator import Calibrator
from flexengine.engine.core import Core
from flexengine.errors import BudgetTooSmall, size_within
from flexengine.guests.harms import measured
from flexengine.lossy import Lossy, weights_text
from flexengine.model.encoding import forms
from flexengine.plan.lp import Format, Layer, Option, adabits
from flexengine.worker.open_model import OpenModel

FORMATS: tuple[Format, ...] = (None, "int8", "int4", "int3")  # formats that a layer may get


class Bits:
    """Weights `mixed`: the format of every layer is chosen such that the weights fit a budget at the least harm.

    The harms of formats are measured (`guests.harms`), and `plan.lp` chooses.
    """

    def __init__(self, core: Core, calibrator: Calibrator) -> None:
        """Compare the budget with the model. No weights are read. Raise BudgetTooSmall if the smallest formats take
        more than the budget."""
        assert isinstance(core.lossy.budget, int)
        self.core, self.calibrator, self.budget = core, calibrator, core.lossy.budget
        integers = core.lossy.compute == "int8"  # multiplies codes, so that every layer must have some
        every = {b: (b,) * core.skeleton.total for b in FORMATS if b is not None or not integers}
        usable = [b for b, weights in every.items() if core.opened.refusal(_with(core.lossy, weights)) is None]
        facts, found = core.facts, {b: _bytes(core.opened, b) for b in usable}
        self.exact = sum(tensor.held_bytes for tensor in facts.tensors)  # bytes of the exact model's weights
        # Bytes of each layer, by format, and of the weights outside: embedding and output projection are encoded.
        self.layers = [{b: sizes[j] for b, (sizes, _) in found.items()} for j in range(len(facts.layers))]
        self.rest = min(rest for _, rest in found.values())
        least = self.rest + sum(min(sizes.values()) for sizes in self.layers)
        if self.budget < (min(least, self.exact) if None in found else least):
            raise BudgetTooSmall(
                f"the budget is {size_within(self.budget, up=False)}, but the weights of {core.source.name} take"
                f" at least {size_within(least)}, with all layers in {FORMATS[-1]}, and embedding and output"
                " projection in int8; raise the budget"
            )

    def chosen(self) -> Lossy:
        """Return the switches with the chosen format of each layer, and report them. Calibrate, and measure harms,
        unless the cache has both. Exact weights are chosen if the budget holds them."""
        lossy = self.core.lossy
        if self.budget >= self.exact and None in self.layers[0]:
            message(f"weights stay exact: they take {_mb(self.exact)}, and the budget is {_mb(self.budget)}")
            return _with(lossy, None)
        harms = measured(self.core, self.calibrator)
        options: list[Layer] = [
            {b: Option(nbytes, harm[b] if b is not None else 0.0) for b, nbytes in sizes.items()}
            for sizes, harm in zip(self.layers, harms, strict=True)
        ]
        found = adabits(options, self.budget - self.rest)
        assert found is not None  # the budget was compared before
        nbytes = self.rest + sum(self.layers[j][b] for j, b in enumerate(found))
        message(f"bits per layer: {weights_text(found)}, {_mb(nbytes)} of weights; the budget is {_mb(self.budget)}")
        return _with(lossy, found)


def _bytes(opened: OpenModel, codec: Format) -> tuple[list[int], int]:
    """Return the bytes of each layer, and those of all other weights, with all layers in one format."""
    facts, made = opened.facts, forms(opened.skeleton, (codec,) * opened.skeleton.total)
    sizes = {t.name: made[t.name].nbytes if t.name in made else t.held_bytes for t in facts.tensors}
    layers = [sum(sizes[t.name] for t in layer) for layer in facts.layers]
    return layers, sum(sizes[t.name] for t in (*facts.others, *facts.edges))


def _with(lossy: Lossy, weights: tuple[Format, ...] | None) -> Lossy:
    """Return the switches with these weights, without the budget, and without calibration if nothing needs it."""
    plain = replace(lossy, weights=weights, budget=None, calibrate=None)
    needed = plain.fitted or plain.sparsify is not None
    return replace(plain, calibrate=lossy.calibrate) if needed else plain


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
