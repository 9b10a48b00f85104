"""Bits per layer: the formats of least harm whose bytes fit a budget.

LLM-PQ's adabits (arXiv 2403.01136, section 4.3), for one place that holds all layers:

    minimise    sum over layers i, formats b of harm[i, b] * z[i, b]
    subject to  sum over i, b of bytes[i, b] * z[i, b] <= budget
                sum over b of z[i, b] = 1                           one row per layer
                z[i, b] in {0, 1}

PuLP represents the program, HiGHS solves it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pulp

from flexengine.plan.lp import optimum

_HARM = 1e3  # largest harm in the program; harms of 8 bits are a thousandth of those of 3 bits
Format = str | None  # None: the checkpoint's own numbers


class Option(NamedTuple):
    """One format of one layer."""

    nbytes: int  # bytes of the layer's weights in this format
    harm: float  # damage of this format to the model's results, in a unit that all layers share; at least 0


Layer = Mapping[Format, Option]


def adabits(layers: Sequence[Layer], budget: int) -> tuple[Format, ...] | None:
    """Return the format of each layer: the least sum of harms within the budget. None if no choice fits.

    Args:
        layers: the formats that each layer may have, at least one.
        budget: most bytes of all layers.

    Raises:
        NoSolver, SolverFailed: as `plan.lp.optimum`.
    """
    smallest = tuple(min(layer, key=lambda b: (layer[b].nbytes, layer[b].harm)) for layer in layers)
    least, limit, step = total(layers, smallest).nbytes, budget, 0
    if least > budget:
        return None
    while limit > least and (values := optimum(program(layers, limit), presolve=True)) is not None:
        chosen = tuple(max(layer, key=lambda b: values[_variable(i, b)]) for i, layer in enumerate(layers))
        if (over := total(layers, chosen).nbytes - budget) <= 0:
            return chosen
        step = max(over, 2 * step)  # the solver keeps a limit with a relative tolerance only
        limit -= step
    return smallest


def program(layers: Sequence[Layer], budget: int) -> pulp.LpProblem:
    """Return the program. Harms are in units of the largest by _HARM, and bytes by the budget: the solver's tolerances
    are absolute."""
    made = pulp.LpProblem("bits_per_layer")
    most = max((option.harm for layer in layers for option in layer.values()), default=0.0) or 1.0
    harms, sizes = [], []
    for i, layer in enumerate(layers):
        chosen = {b: made.add_variable(_variable(i, b), 0, 1, pulp.LpInteger) for b in layer}
        one = pulp.LpAffineExpression([(z, 1.0) for z in chosen.values()])
        made.addConstraint(pulp.LpConstraint(one, pulp.LpConstraintEQ, f"layer_{i}", 1))
        harms += [(chosen[b], _HARM * option.harm / most) for b, option in layer.items()]
        sizes += [(chosen[b], option.nbytes / max(1, budget)) for b, option in layer.items()]
    made.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(sizes), pulp.LpConstraintLE, "budget", 1.0))
    made.setObjective(pulp.LpAffineExpression(harms))
    return made


def _variable(layer: int, format: Format) -> str:
    return f"layer_{layer}_{format or 'exact'}"


def total(layers: Sequence[Layer], formats: Sequence[Format]) -> Option:
    """Return the bytes and the harm of all layers in these formats."""
    chosen = [layer[b] for layer, b in zip(layers, formats, strict=True)]
    return Option(sum(option.nbytes for option in chosen), sum(option.harm for option in chosen))
