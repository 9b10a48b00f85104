"""Bits per layer as one more choice of a chain of stages (LLM-PQ's adabits, with tiers).

A mix has a format for each layer. Of all mixes, those on the convex hull of bytes against harm are planned: each layer
goes from format to format in the order of harm per byte that is saved, over all layers. Stages then take layers until
their seconds are even, so that bytes that one layer saves serve all stages, wherever the layer lies. With machines of
several kinds this is a heuristic, as formats may be faster on one of them only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from flexengine.errors import OutOfMemory
from flexengine.plan.chain import ChainPlan
from flexengine.plan.cluster.job import Format, Harm, Model
from flexengine.plan.facts import ModelFacts

FIRST_MIXES = 5  # that are planned first, evenly spaced; further ones lie beside the best of these
Forms = tuple[Format, ...]  # format of each layer


class MixedPlan(NamedTuple):
    """A chain and the formats of its layers."""

    chain: ChainPlan
    forms: Forms
    harm: float  # of these formats
    cost: float  # seconds of the job + theta * harm


def mixed_facts(facts: Mapping[Format, ModelFacts], forms: Forms) -> ModelFacts:
    """Return the facts of a model whose layers have these formats. Embedding and head are encoded if a layer is.

    Args:
        facts: of the model with all layers in one format, by format; None, the exact one, is among them.
        forms: of each layer.
    """
    basis = facts[next(filter(None, forms), None)]
    return replace(basis, layers=tuple(facts[form].layers[j] for j, form in enumerate(forms)))


def steps_of(sizes: Sequence[Sequence[int]], harm: Harm) -> list[tuple[int, int]]:
    """Return the steps from the mix with the least harm to that with the fewest bytes, as (layer, number of its next
    format), those with the least harm per byte that is saved first. Formats that are not on a layer's convex hull are
    left out.

    Args:
        sizes: bytes by layer and format.
        harm: by layer and format.
    """
    steps = []
    for layer, (nbytes, harms) in enumerate(zip(sizes, harm.tolist(), strict=True)):
        present, before = start_of(nbytes, harms), -inf
        while smaller := [k for k in range(len(nbytes)) if nbytes[k] < nbytes[present]]:
            price = {k: (harms[k] - harms[present]) / (nbytes[present] - nbytes[k]) for k in smaller}
            present = min(smaller, key=lambda k: (price[k], nbytes[k]))
            before = max(before, price[present])  # so that rounding cannot turn two steps of a layer around
            steps.append((before, layer, present))
    return [(layer, form) for _, layer, form in sorted(steps, key=lambda step: step[0])]


def start_of(nbytes: Sequence[int], harms: Sequence[float]) -> int:
    """Return the number of the format with the least harm, of equal ones that with the fewest bytes."""
    return min(range(len(nbytes)), key=lambda k: (harms[k], nbytes[k]))


def plan_mixed(
    model: Model, formats: Sequence[Format], harm: Harm, theta: float, plan: Callable[[ModelFacts], ChainPlan]
) -> MixedPlan:
    """Return the chain and the formats of its layers with the least predicted seconds + theta * harm.

    Args:
        model: facts by format.
        formats: that layers may have.
        harm: by layer and number in `formats`.
        theta: seconds per unit of harm.
        plan: returns the best chain for the facts of a model, or raises OutOfMemory.

    Raises:
        OutOfMemory: no mix fits.
    """
    sizes = [[model.bytes[form][j] for form in formats] for j in range(len(harm))]
    steps, least = steps_of(sizes, harm), [start_of(*each) for each in zip(sizes, harm.tolist(), strict=True)]
    known: dict[int, MixedPlan | None] = {}
    refused: OutOfMemory | None = None

    def cost(taken: int) -> float:
        """Return the cost after a number of steps; infinite if the mix does not fit."""
        nonlocal refused
        if taken not in known:
            numbers = least.copy()
            for layer, form in steps[:taken]:
                numbers[layer] = form
            forms, total = tuple(formats[k] for k in numbers), float(sum(harm[j, k] for j, k in enumerate(numbers)))
            known[taken] = None
            try:
                chain = plan(mixed_facts(model.facts, forms))
                known[taken] = MixedPlan(chain, forms, total, chain.seconds + theta * total)
            except OutOfMemory as error:  # the last one is that of the mix with the fewest bytes so far
                refused = error
        found = known[taken]
        return inf if found is None else found.cost

    last = len(steps)
    width = max(1, -(-last // (FIRST_MIXES - 1)))
    best = min((*range(0, last, width), last), key=cost)
    while width := width // 2:
        best = min((best, max(0, best - width), min(last, best + width)), key=cost)
    found = known[best]
    if found is None:
        assert refused is not None
        raise refused
    return found
