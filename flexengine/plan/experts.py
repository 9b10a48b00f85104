"""Experts on demand: in which sweeps only the experts that tokens chose are loaded, and what is expected of that.

A token uses `active` of E experts. If tokens choose independently and evenly, t of them choose this share of a layer's
experts:

    share(t) = 1 - (1 - active / E)^t

Real routers choose fewer, as tokens are alike. Whole layers are loaded ahead, while others are computed; the experts
of a choice are not, as the choice is known only when the layer's attention has been computed. So experts are loaded on
demand only where the share is at most SHARE: then loading them takes at most half as long as loading all.
"""

import math

from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.layout import Layout
from flexengine.schedule.demand import Demand

SHARE = 0.5  # of a layer's experts, expected to be chosen in a sweep, up to which they are loaded on demand


def share(active: int, experts: int, tokens: float) -> float:
    """Return the share of the experts that this many tokens are expected to choose."""
    return float(1 - (1 - min(1.0, active / experts)) ** tokens)


def most_tokens(model: ModelFacts) -> int:
    """Return the most tokens of a sweep that loads experts on demand; 0 if no sweep does."""
    experts = min((t.experts for layer in model.layers for t in layer if t.experts), default=0)
    if not 0 < model.active < experts:
        return 0
    return int(math.log(1 - SHARE) / math.log(1 - model.active / experts) + 1e-9)


def demand_of(model: ModelFacts, layout: Layout) -> Demand:
    """Return which weights a layout's program loads by rows: those off the device that are read by rows."""

    def homes(layer: tuple[TensorFact, ...], experts: bool) -> tuple[str, ...]:
        found = {layout.homes[t.name] for t in layer if bool(t.experts) == experts}
        return tuple(home for home in ("host", "disk") if home in found)

    table = layout.homes[model.embedding.name]
    return Demand(
        table if table != "device" else "",
        tuple(homes(layer, True) for layer in model.layers), tuple(homes(layer, False) for layer in model.layers),
        most_tokens(model),
    )  # fmt: skip
