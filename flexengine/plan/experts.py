"""Experts on demand: the sweeps in which only chosen experts are loaded, and the bytes that this saves.

A token uses `active` of E experts. If tokens choose independently and evenly, t tokens choose this share of a layer's
experts:

    share(t) = 1 - (1 - active / E)^t

Real routers choose fewer, because tokens are alike. Whole layers are prefetched while other layers are computed. Chosen
experts cannot be prefetched, because the router runs after the layer's attention. So experts are loaded on demand only
if the share is at most MAX_CHOSEN_SHARE: loading them then takes at most half as long as loading all.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flexengine.places import off_device
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.layout import Layout
from flexengine.plan.pages import Array
from flexengine.plan.sizes import aligned
from flexengine.schedule.frame import Demand

MAX_CHOSEN_SHARE = 0.5  # share of a layer's experts expected in a sweep, up to which they are loaded on demand
_HELD_VECTORS = 4  # hidden-size vectors per token held while experts are loaded: residual, its norm and their casts


def share(active: int, experts: int, tokens: float | Array) -> Array:
    """Return the expected share of a layer's experts that `tokens` tokens choose."""
    return np.asarray(1 - (1 - min(1.0, active / experts)) ** tokens)


def most_tokens(model: ModelFacts) -> int:
    """Return the most tokens of a sweep that loads experts on demand; 0 if no sweep does."""
    experts = _fewest_experts(model)
    if not 0 < model.active < experts:
        return 0
    return int(math.log(1 - MAX_CHOSEN_SHARE) / math.log(1 - model.active / experts) + 1e-9)


def with_experts(demand: Demand, model: ModelFacts, homes: Mapping[str, str]) -> Demand:
    """Return the weights that a program loads by rows, with the experts that are off the device.

    Args:
        demand: the same without experts.
        homes: tier of every tensor by name.
    """

    def of(layer: tuple[TensorFact, ...], experts: bool) -> tuple[str, ...]:
        return off_device({homes[t.name] for t in layer if bool(t.experts) == experts})

    experts, others = (tuple(of(layer, only) for layer in model.layers) for only in (True, False))
    return replace(demand, experts=experts, others=others, most_tokens=most_tokens(model))


def book(layout: Layout, model: ModelFacts, tokens: int) -> None:
    """Book the device bytes that forward passes hold while their experts are loaded: of each token its hidden states,
    and scores, shares and ids of its experts. tokens: most of a sweep."""
    if all(layout.homes[t.name] == "device" for t in model.experts):
        return
    experts = max(t.experts for t in model.experts)
    token = _HELD_VECTORS * model.hidden * model.itemsize + 3 * 4 * experts + 2 * 8 * model.active
    layout.book("device", "paused forwards", aligned(min(tokens, most_tokens(model)) * token))


def unused(model: ModelFacts, tokens: Array) -> Array:
    """Return, by tokens of a sweep, the expected bytes of experts that it does not load, if all are off the device."""
    total = sum(t.stored_bytes for t in model.experts)
    unchosen = 1 - share(model.active, _fewest_experts(model), tokens)
    return np.where(tokens <= most_tokens(model), total * unchosen, 0.0)


def _fewest_experts(model: ModelFacts) -> int:
    """Return the number of experts of the layer that has the fewest; 0 if none has any."""
    return min((t.experts for t in model.experts), default=0)
