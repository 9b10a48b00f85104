"""The bit-transfer heuristic (LLM-PQ, algorithm 2): a fast search for cases that are large for the program.

It starts from the least harmful formats that fit ("adabits"), and changes two stages at a time. In a rule
(given, returned, number), the slowest stage gives `number` layers of one choice to another stage, the *pioneer*, and
takes back one layer of another choice. So 4-bit layers leave it, and a 16-bit layer of equal bytes comes. The boundary
between the two stages moves by number - 1 layers, and all stages between them shift. A rule whose two choices are equal
moves layers only. Beyond the paper, one stage may also change the choice of some of its layers. Inside a stage, layers
get the stage's choices with the least harm. Of the changes that look best, the first that lowers the cost is taken,
until none does. The paper's listing accepts changes that raise the cost; that is taken as a misprint. A second start
has all layers in their fastest format, divided by the speeds of the devices; the better end counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.cluster.case_costs import Array, CaseCosts, Priced, price
from flexengine.plan.cluster.program import Assignment, solve, spread

MOVED = (1, 2, 4, 8)  # units that change at once
START_SECONDS = 10.0  # most seconds of the program that finds the start
MIN_GAIN = 1e-9  # relative; smaller gains are rounding errors
MOST_CHANGES = 1000
STRAGGLERS, PIONEERS = 8, 8  # stages with most and with least work that exchange units
TRIED = 60  # changes that are priced, those with the least estimates
FIT = 0.02  # share by which an estimate may exceed a memory: classes differ in bytes

Counts = NDArray[np.int64]  # [stages, choices] units


def transfer(numbers: CaseCosts) -> Assignment | None:
    """Return a good assignment, or None if none fits."""
    kinds = np.array(numbers.classes)
    means = np.array([numbers.harm[kinds == k].mean(axis=0) for k in range(kinds.max() + 1)])
    # The program of a case in which all units of a class have its mean harm is small, and has the same numbers of units
    # by stage and choice if harm is proportional to a factor of the unit.
    careful = solve(replace(numbers, harm=means[kinds]), gap=1e-2, seconds=START_SECONDS, quality=True)
    if careful is None:
        return None
    counts = np.zeros((numbers.stages, len(numbers.choices)), dtype=np.int64)
    np.add.at(counts, (np.array(careful.stage_of), np.array(careful.choice_of)), 1)
    ends = [_descended(numbers, start) for start in (counts, _fastest(numbers))]
    found = [answer for answer in ends if answer is not None]
    return min(found, key=lambda answer: price(numbers, answer.stage_of, answer.choice_of).cost, default=None)


def _fastest(numbers: CaseCosts) -> Counts:
    """Return numbers of units in each stage's fastest choice, in proportion to the stages' speeds."""
    share = np.bincount(numbers.classes, minlength=numbers.prefill.shape[1])
    seconds = np.tensordot(share, np.maximum(numbers.decode, numbers.load), axes=(0, 1))  # [stages, choices]
    speed = 1 / np.maximum(seconds.min(axis=1), 1e-300)
    ends = np.rint(np.cumsum(speed) / speed.sum() * numbers.units).astype(np.int64)
    sizes = np.diff(np.minimum(np.maximum(ends, 1), numbers.units - 1), prepend=0)
    sizes[-1] += numbers.units - sizes.sum()
    counts = np.zeros((numbers.stages, len(numbers.choices)), dtype=np.int64)
    counts[np.arange(numbers.stages), seconds.argmin(axis=1)] = sizes
    return counts


def _descended(numbers: CaseCosts, counts: Counts) -> Assignment | None:
    """Return the assignment at which no change lowers the cost; None if it does not fit."""
    best = _assigned(numbers, counts)
    if best is None:
        return None
    priced = price(numbers, *best)
    for _ in range(MOST_CHANGES):
        step = _first_better(numbers, counts, priced)
        if step is None:
            break
        counts, best, priced = step
    return Assignment(*best, -np.inf) if priced.fits else None


def _first_better(
    numbers: CaseCosts, counts: Counts, priced: Priced
) -> tuple[Counts, tuple[tuple[int, ...], tuple[int, ...]], Priced] | None:
    """Return a change that lowers the cost, with its price: the first of those that look best."""
    changes = np.array(list(_changes(numbers, counts, priced)))
    if not len(changes):
        return None
    guess = _estimates(numbers, changes)
    for k in np.argsort(guess, kind="stable")[:TRIED]:
        placed = _assigned(numbers, changes[k]) if np.isfinite(guess[k]) else None
        if placed is None:
            continue
        found = price(numbers, *placed)
        better = found.cost < priced.cost * (1 - MIN_GAIN) - 1e-300
        if found.fits and (better or not priced.fits):
            return changes[k], placed, found
    return None


def _estimates(numbers: CaseCosts, changes: Counts) -> Array:
    """Return about the cost of each change, infinite if it clearly does not fit.

    Layers count as their mean over classes, and harm of a choice as its mean over units. For units of one class and
    equal harm this is the cost, but for links past empty stages. changes: [M, stages, choices] numbers of units.
    """
    share = np.bincount(numbers.classes, minlength=numbers.prefill.shape[1]) / numbers.units

    def total(table: Array) -> Array:
        mean = np.tensordot(share, np.where(np.isfinite(table), table, 1e30), axes=(0, 1))  # [stages, choices]
        summed: Array = (changes * mean).sum(axis=2)
        return summed

    used = changes.sum(axis=2) > 0
    load = total(numbers.load)
    pre = np.where(used, np.maximum(total(numbers.prefill) + numbers.fixed_prefill, load), 0.0)
    dec = np.where(used, np.maximum(total(numbers.decode) + numbers.fixed_decode, load), 0.0)
    memory = total(numbers.memory) + used * numbers.fixed_memory
    fits = np.all(memory <= numbers.capacity * (1 + FIT), axis=1) & used[:, 0] & used[:, -1]
    fits &= np.all(total(numbers.host) <= numbers.host_capacity * (1 + FIT), axis=1)
    after = np.arange(numbers.stages - 1)
    hops = [float(hop[after, after + 1].max(initial=0.0)) for hop in (numbers.hop_prefill, numbers.hop_decode)]
    passed = used.sum(axis=1) - 1
    slow = [np.maximum(times.max(axis=1), hop * (passed > 0)) for times, hop in ((pre, hops[0]), (dec, hops[1]))]
    through = pre.sum(axis=1) + passed * hops[0], dec.sum(axis=1) + passed * hops[1] + numbers.back * (passed > 0)
    first, step = numbers.passes((slow[0], slow[1]), through)
    harm = changes.sum(axis=1) @ numbers.harm.mean(axis=0)
    seconds = numbers.rounds * (first + numbers.steps * step)
    guess: Array = np.where(fits, seconds + numbers.theta * harm, np.inf)
    return guess


def _changes(numbers: CaseCosts, counts: Counts, priced: Priced) -> Iterator[Counts]:
    """Yield changed numbers of units by stage and choice, those that relieve the slowest stage first."""
    busy = [0.0] * numbers.stages
    for j, pre, dec in zip(priced.used, priced.prefill, priced.decode, strict=True):
        busy[j] = pre * max(1, numbers.prefills - 1) + dec * numbers.steps * numbers.cohorts
    by_load = sorted(range(numbers.stages), key=lambda j: busy[j])
    kinds = range(len(numbers.choices))
    pairs = product(by_load[: -STRAGGLERS - 1 : -1], by_load[:PIONEERS])
    for (slow, pioneer), number, given in product(pairs, MOVED, kinds):
        if pioneer != slow and counts[slow, given] >= number:
            yield from _moves(counts, slow, pioneer, number, given)
    for j in reversed(by_load):
        for number, old, new in product(MOVED, kinds, kinds):
            if old != new and counts[j, old] >= number:
                yield _added(counts, [(j, old, -number), (j, new, number)])


def _moves(counts: Counts, slow: int, pioneer: int, number: int, given: int) -> Iterator[Counts]:
    """Yield the rules by which one stage gives `number` units of a choice to another."""
    gift = [(slow, given, -number), (pioneer, given, number)]
    yield _added(counts, gift)
    for returned in range(counts.shape[1]):
        if returned != given and counts[pioneer, returned]:
            yield _added(counts, [*gift, (pioneer, returned, -1), (slow, returned, 1)])
        if returned != given:  # the pioneer takes the units in another choice
            yield _added(counts, [(slow, given, -number), (pioneer, returned, number)])


def _added(counts: Counts, changes: Sequence[tuple[int, int, int]]) -> Counts:
    made = counts.copy()
    for j, c, number in changes:
        made[j, c] += number
    return made


def _assigned(numbers: CaseCosts, counts: Counts) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return stage and choice of each unit with the least harm; None if the first or the last stage has no unit, or a
    device has no kernel for a choice of a unit."""
    sizes = counts.sum(axis=1)
    if not sizes[0] or not sizes[-1]:
        return None
    stage_of = np.repeat(np.arange(numbers.stages), sizes).tolist()
    choice_of = spread(numbers, stage_of, [0] * numbers.units, counts[:, None, :])
    if not np.all(np.isfinite(numbers.decode[stage_of, numbers.classes, choice_of])):
        return None
    return tuple(stage_of), choice_of
