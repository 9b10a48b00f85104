"""Which policy? An outer search over block shapes and switches around the linear program over placements.

For every block size worth trying, and with KV cache and hidden states allowed off the device or not, the program says
what lies where (`placement`); the answer is rounded to tensors and sequences, laid out to the byte, and priced again
(`tried`). The best few are then tried with other gpu_batches, micro-batches, slots and schedules, and their weights
moved in small steps (`refinement`).
"""

import warnings
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from flexengine.errors import InvalidInput
from flexengine.plan.capacity import Capacity
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.least import capacity_for, smallest, smallest_layout
from flexengine.plan.placement import ON_DEVICE, Choice, Placement
from flexengine.plan.prediction import Prediction
from flexengine.plan.problem import Problem
from flexengine.plan.refinement import Refinement
from flexengine.plan.shapes import GPU_BATCH, SMALLER, TOKENS, Options, Shapes, placed_like
from flexengine.plan.tried import Tried
from flexengine.plan.words import upward
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

WAITING = 10.0  # seconds of loading, from which on a short job may rather stream its weights than keep them


@dataclass(frozen=True)
class Search:
    """best: of all that were laid out and priced, `tried`."""

    best: Prediction
    tried: tuple[Prediction, ...]


def search(model: ModelFacts, hardware: Hardware, workload: Workload, options: Options | None = None) -> Search:
    """The policy with which the job ends first. Raises TooLittle, with the numbers, where nothing fits, and
    InvalidInput where no policy keeps the latency limit, and NoSolver where one is needed and not installed."""
    options = options or Options()
    shapes = Shapes(Cost(model, hardware, workload, options.overlap), options)
    tried = Tried(shapes, capacity_for(model, shapes.smallest(), workload, hardware.capacity))
    if options.placed is not None:
        _reshape(tried, options.placed)
    elif not _resident(tried) or _hurried(tried):
        placement = Placement(tried)
        _stream(placement)
        Refinement(placement).refine()
        if placement.failed is not None:
            warnings.warn(f"the plan may not be the best: {placement.failed}", RuntimeWarning, stacklevel=2)
    return Search(_best(tried), tuple(tried.predictions.values()))


def check(model: ModelFacts, workload: Workload, capacity: Capacity, prefill_tokens: int | None = None) -> Layout:
    """Return a layout in which a job runs, without a search. Raises TooLittle, as `search`, if there is none.

    prefill_tokens: as in `Options`.
    """
    return smallest_layout(model, smallest(prefill_tokens or min(TOKENS), capacity.shared), workload, capacity)


def question(
    model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy, options: Options | None = None
) -> Problem:
    """What the linear program is asked for a policy's block shape: where everything should lie, if what the policy has
    off the device may be off it."""
    shapes = Shapes(Cost(model, hardware, workload), options or Options())
    tried = Tried(shapes, capacity_for(model, shapes.smallest(), workload, hardware.capacity))
    choice = Choice(policy.cache != ON_DEVICE, policy.activations != ON_DEVICE, policy.delegate)
    return Placement(tried).problem(policy, choice)


def frontier(found: Search) -> list[Prediction]:
    """The policies that no other beats both in latency and in throughput, by rising latency."""
    kept: list[Prediction] = []
    for prediction in sorted(found.tried, key=lambda p: (p.latency, p.seconds)):
        if not kept or prediction.seconds < kept[-1].seconds:
            kept.append(prediction)
    return kept


def _best(tried: Tried) -> Prediction:
    """Raises InvalidInput if there is none within the latency limit."""
    if not tried.predictions:
        for policy in tried.shapes.smallest():
            tried.attempt(policy)
    best, limit = tried.leader(), tried.shapes.options.latency_limit
    if limit is not None and best.latency > limit:
        least = upward(best.latency)
        raise InvalidInput(f"latency limit is {limit} s; the least found here is {least} s, set it higher")
    return best


def _reshape(tried: Tried, placed: Policy) -> None:
    """Tries every block shape, with everything where it lies already."""
    for block in tried.shapes.blocks():
        for tokens in tried.shapes.tokens:
            tried.attempt(placed_like(replace(tried.shapes.of(block), prefill_tokens=tokens), placed))


def _resident(tried: Tried) -> bool:
    """Tries everything on the device; whether that holds as many sequences as may be alive, so that no sweep can be
    quicker with anything elsewhere."""
    shapes, whole, largest = tried.shapes, False, tried.shapes.blocks()[0]
    for block in shapes.blocks():
        for tokens in shapes.tokens[:1] if whole else shapes.tokens:  # smaller blocks are for the latency alone
            prediction = tried.attempt(replace(shapes.of(block), prefill_tokens=tokens))
            if prediction is not None and block == largest:
                whole = whole or _holds_all(tried, prediction.layout)
    quickest = sorted(tried.predictions.values(), key=attrgetter("total_seconds"))
    for some in (quickest, [p for p in quickest if p.policy.block_size >= largest]):
        for policy in shapes.batches(some[0].policy) if some else ():
            tried.attempt(policy)
    return whole


def _holds_all(tried: Tried, layout: Layout) -> bool:
    """Whether the pools are as large as a block ever needs."""
    room = sum(layout.room(tier) for tier in layout.pools)
    return bool(room >= 0.98 * tried.cost.peak(layout.policy))


def _hurried(tried: Tried) -> bool:
    """Whether the job is so short that reading the weights beforehand is a large part of it."""
    best = tried.leader()
    return best.load_seconds > max(WAITING, best.seconds / 2)


def _stream(placement: Placement) -> None:
    """Asks the program about every block, with and without cache and hidden states off the device, and with and
    without attention on the host."""
    shapes = placement.tried.shapes
    choices = [Choice(cache, hidden) for cache, hidden in product((False, True), repeat=2)]
    choices += [Choice(True, False, True)] if placement.delegates else []
    for block, choice in product(shapes.blocks(), choices):
        for shape in dict.fromkeys(shapes.of(block, batch) for batch in (GPU_BATCH, *SMALLER)):
            if placement.place(shape, choice, wide=True):
                for diagonal in (shape, shapes.even(block)):
                    placement.place(replace(diagonal, schedule="diagonal"), choice, wide=True)
                break
