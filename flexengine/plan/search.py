"""Search the fastest policy: an outer search over block shapes and switches, and a linear program over placements.

For each block size, with KV cache and hidden states allowed off the device or not, the program chooses the fractions on
the tiers (`placement`). They are rounded to whole tensors and sequences, laid out to the byte, and priced again
(`tried`). The best policies are refined with other gpu_batches, prefill_tokens, slots and schedules, with block sizes
one step away, and by moving their weights in small steps (`refinement`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from flexengine.errors import InvalidInput
from flexengine.plan.candidates import (
    PREFILL_TOKENS_GPU,
    Candidates,
    Options,
    placed_like,
)
from flexengine.plan.capacity import Capacity
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import upward
from flexengine.plan.guests import guest
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.min_memory import smallest, smallest_layout
from flexengine.plan.prediction import Prediction
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

MIN_LOAD_SECONDS = 10.0  # shorter loading of resident weights is accepted without trying to stream them


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    best: Prediction  # the best prediction
    tried: tuple[Prediction, ...]  # predictions of all policies that fit


def search(model: ModelFacts, hardware: Hardware, workload: Workload, options: Options | None = None) -> Search:
    """Return the policy with which the job ends first.

    Raises:
        TooLittle: no policy fits; the error says how much memory is enough.
        InvalidInput: no policy keeps the latency limit.
        NoSolver: the search needs a solver, and none is installed.
    """
    options = options or Options()
    tried = Candidates(Cost(model, hardware, workload, options.overlap), options)
    placed = options.placed
    if placed is not None:
        on_device = placed.weights[0] == placed.cache[0] == placed.activations[0] == 1
        _try_blocks(tried, lambda policy: placed_like(policy, placed), on_device)
    else:
        # If the device holds the largest block, no policy with data on other tiers can have faster sweeps.
        holds_all = _try_blocks(tried, lambda policy: policy, on_device=True)
        # Neurons on demand take the memory that is left: beside them, streaming other weights does not pay.
        streams = not tried.predictions if model.blocks else not holds_all or _hurried(tried)
        if streams or hardware.workers:  # workers may be faster than the device, even if it holds the whole block
            from flexengine.plan.refinement import place_off_device  # the solver is imported only if it is needed

            place_off_device(tried, streams)
    return Search(_best(tried), tuple(tried.predictions.values()))


def check(model: ModelFacts, workload: Workload, capacity: Capacity, prefill_tokens: int | None = None) -> Layout:
    """Return a layout in which a job runs, without a search. Raise TooLittle, as `search`, if there is none.

    Args:
        prefill_tokens: as in `Options`.
    """
    policies = smallest(prefill_tokens or min(PREFILL_TOKENS_GPU), capacity)
    return smallest_layout(model, policies, workload, capacity)


def frontier(searched: Search) -> list[Prediction]:
    """Return the policies that no other policy beats both in latency and in throughput, by rising latency."""
    best: list[Prediction] = []
    for prediction in sorted(searched.tried, key=lambda p: (p.latency, p.seconds)):
        if not best or prediction.seconds < best[-1].seconds:
            best.append(prediction)
    return best


def _best(tried: Candidates) -> Prediction:
    """Return the best prediction. Raise InvalidInput if none keeps the latency limit."""
    if not tried.predictions:
        for policy in tried.smallest():
            tried.attempt(policy)
    best, limit = tried.leader(), tried.options.latency_limit
    if best.policy.works:
        best = guest("attended").without_workers(tried, best)
    if limit is not None and best.latency > limit:
        least = upward(best.latency)
        raise InvalidInput(f"latency limit is {limit} s; the least found here is {least} s, set the limit higher")
    return best


def _try_blocks(tried: Candidates, changed: Callable[[Policy], Policy], on_device: bool) -> bool:
    """Try all block sizes, the largest first, with every number of prefill tokens.

    If all data is on the device, also try other gpu_batches. If the device then holds the largest block, smaller ones
    matter for latency only, and are tried with one number of tokens.

    Args:
        changed: returns the policy to try for a policy of one block size.
        on_device: whether these policies keep all data on the device.

    Returns:
        Whether all data of the largest block is on the device.
    """
    holds_all, largest = False, tried.blocks()[0]
    for block in tried.blocks():
        for tokens in tried.tokens[:1] if holds_all else tried.tokens:
            prediction = tried.attempt(changed(replace(tried.of(block), prefill_tokens=tokens)))
            if prediction is not None and block == largest and on_device:
                layout = prediction.layout
                room = sum(layout.room(tier) for tier in layout.pools)  # for the pages of the block at its peak
                holds_all = holds_all or bool(room >= 0.98 * tried.cost.peak(layout.policy))
    quickest = sorted(tried.predictions.values(), key=attrgetter("total_seconds")) if on_device else []
    for some in (quickest, [p for p in quickest if p.policy.block_size >= largest]):
        for policy in tried.batches(some[0].policy) if some else ():
            tried.attempt(policy)
    return holds_all


def _hurried(tried: Candidates) -> bool:
    """Return whether the job is so short that loading resident weights takes a large part of its time."""
    best = tried.leader()
    return best.load_seconds > max(MIN_LOAD_SECONDS, best.seconds / 2)
