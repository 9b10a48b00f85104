"""Experts on demand: in which sweeps only the experts that tokens chose are loaded, and what is expected of that.

A token uses `active` of E experts. If tokens choose independently and evenly, t of them choose this share of a layer's
experts:

    share(t) = 1 - (1 - active / E)^t

Real routers choose fewer, as tokens are alike. Whole layers are loaded ahead, while others are computed; the experts
of a choice are not, as the choice is known only when the layer's attention has been computed. So experts are loaded on
demand only where the share is at most SHARE: then loading them takes at most half as long as loading all.
"""

import math
from collections.abc import Mapping

import numpy as np

from flexengine.places import off_device
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.profile import Array
from flexengine.schedule.demand import Demand

SHARE = 0.5  # of a layer's experts, expected to be chosen in a sweep, up to which they are loaded on demand
_HIDDEN = 4  # vectors of a token that a pass holds while its experts are loaded: residual, its norm and their casts


def share(active: int, experts: int, tokens: float | Array) -> Array:
    """Return the share of the experts that this many tokens are expected to choose."""
    return np.asarray(1 - (1 - min(1.0, active / experts)) ** tokens)


def most_tokens(model: ModelFacts) -> int:
    """Return the most tokens of a sweep that loads experts on demand; 0 if no sweep does."""
    experts = _fewest(model)
    if not 0 < model.active < experts:
        return 0
    return int(math.log(1 - SHARE) / math.log(1 - model.active / experts) + 1e-9)


def demand_of(model: ModelFacts, homes: Mapping[str, str]) -> Demand:
    """Return which weights a program loads by rows: those off the device that are read by rows. homes: tier of every
    tensor by name."""

    def of(layer: tuple[TensorFact, ...], experts: bool) -> tuple[str, ...]:
        return off_device({homes[t.name] for t in layer if bool(t.experts) == experts})

    table = homes[model.embedding.name] if model.embedding is not None else "device"
    return Demand(
        table if table != "device" else "",
        tuple(of(layer, True) for layer in model.layers), tuple(of(layer, False) for layer in model.layers),
        most_tokens(model),
    )  # fmt: skip


def suspended(model: ModelFacts, homes: Mapping[str, str], tokens: int) -> int:
    """Return the bytes that the forward passes of a sweep of at most this many tokens hold on the device while their
    experts are loaded: hidden states, and scores, shares and numbers of experts."""
    if not any(homes[t.name] != "device" for t in model.experts):
        return 0
    most = max(t.experts for t in model.experts)
    token = _HIDDEN * model.hidden * model.itemsize + 3 * 4 * most + 2 * 8 * model.active
    return min(tokens, most_tokens(model)) * token


def unused(model: ModelFacts, tokens: Array) -> Array:
    """Return, by sweep of so many tokens, the expected bytes of experts that are not loaded if all are off the
    device."""
    every = sum(t.stored_bytes for t in model.experts)
    if not every:
        return np.zeros(tokens.shape)
    left = 1 - share(model.active, _fewest(model), tokens)
    return np.where(tokens <= most_tokens(model), every * left, 0.0)


def expert_share(model: ModelFacts, layer: int) -> float:
    """Return the share of a layer's products that its experts are."""

    def products(found: list[TensorFact]) -> float:
        return sum(t.elements * (model.active / t.experts if t.experts else 1) for t in found if t.matrix)

    experts = products([t for t in model.layers[layer] if t.experts])
    return experts / max(1.0, products(list(model.layers[layer])))


def _fewest(model: ModelFacts) -> int:
    """Return the number of experts of the layer that has the fewest; 0 if none has any."""
    return min((t.experts for t in model.experts), default=0)
