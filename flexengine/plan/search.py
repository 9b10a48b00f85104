"""Search the fastest policy: an outer search over block shapes and switches, and a linear program over placements.

For each block size, with KV cache and hidden states allowed off the device or not, the program chooses the fractions on
the tiers (`placement`). They are rounded to whole tensors and sequences, laid out to the byte, and priced again
(`tried`). The best policies are refined with other gpu_batches, prefill_tokens, slots and schedules, with block sizes
one step away, and by moving their weights in small steps (`refinement`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from flexengine.activity import minutes
from flexengine.errors import InvalidInput
from flexengine.places import lane_of
from flexengine.plan.candidates import PREFILL_TOKENS_GPU, Candidates, Options, placed_like
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import clock, count, digits, percent, place_name, size, worker_lane
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.min_memory import capacity_for, laid_out, smallest
from flexengine.plan.rates import timed
from flexengine.plan.terms import CACHE, HIDDEN, WEIGHTS
from flexengine.plan.workload import Workload

KINDS = {"weights": WEIGHTS, "KV cache": CACHE, "hidden states": HIDDEN}  # name in the report -> kind of data
MOST_SHARE = 0.95  # workers are used if the job takes at most this share of its seconds without them
# Of a long job (`Options.stores_from`), at most the share MAX_AT_STAKE passes without a result, if that takes at most
# MAX_LONGER times the shortest predicted seconds.
MAX_AT_STAKE, MAX_LONGER = 0.1, 1.03
MIN_FIRST_SECONDS = 30.0  # a job whose first row ends later says when
MIN_LOAD_SECONDS = 10.0  # shorter loading of resident weights is accepted without trying to stream them


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    best: Prediction  # the best prediction
    tried: tuple[Prediction, ...]  # predictions of all policies that fit


def search(model: ModelFacts, hardware: Hardware, workload: Workload, options: Options | None = None) -> Search:
    """Return the policy with which the job ends first, or hardly later if results then come often (`storing`).

    Raises:
        TooLittle: no policy fits; the error says how much memory is enough.
        InvalidInput: no policy keeps the latency limit.
        NoSolver: the search needs a solver, and none is installed.
    """
    options = options or Options()
    tried = Candidates(Cost(model, hardware, workload, options.overlap, options.cohorts), options)
    placed = options.placed
    if placed is not None:
        on_device = placed.weights[0] == placed.cache[0] == placed.activations[0] == 1
        _try_blocks(tried, on_device)
    else:
        # If the device holds the largest block, no policy with data on other tiers can have faster sweeps.
        holds_all = _try_blocks(tried, on_device=True)
        # Neurons on demand take the memory that is left: beside them, streaming other weights does not pay.
        streams = not tried.predictions if model.blocks else not holds_all
        if not model.blocks and holds_all:  # or the job is short, and loading resident weights takes much of its time
            best = tried.leader()
            streams = best.load_seconds > max(MIN_LOAD_SECONDS, best.seconds / 2)
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
    room = capacity_for(model, policies, workload, capacity)
    return next(filter(None, (laid_out(model, policy, workload, room) for policy in policies)))


def frontier(searched: Search) -> list[Prediction]:
    """Return the policies that no other policy beats both in latency and in throughput, by rising latency."""
    best: list[Prediction] = []
    for prediction in sorted(searched.tried, key=lambda p: (p.latency, p.seconds)):
        if not best or prediction.seconds < best[-1].seconds:
            best.append(prediction)
    return best


def _best(tried: Candidates) -> Prediction:
    if not tried.predictions:
        for policy in tried.smallest():
            tried.attempt(policy)
    best, limit = tried.leader(), tried.options.latency_limit
    if best.policy.works:
        best = _without_workers(tried, best)
    if limit is not None and best.latency > limit:
        unit = 10.0 ** (math.floor(math.log10(best.latency)) - 3)
        least = f"{math.ceil(best.latency / unit - 1e-9) * unit:.4g}"  # rounded up
        raise InvalidInput(f"latency limit is {limit} s; the least found here is {least} s, set the limit higher")
    return storing(tried.predictions.values(), best, tried.options)


def _try_blocks(tried: Candidates, on_device: bool) -> bool:
    """Try all block sizes, the largest first, with every number of prefill tokens.

    If all data is on the device, also try other gpu_batches. If the device then holds the largest block, smaller ones
    matter for latency only, and are tried with one number of tokens. on_device: whether these policies keep all data on
    the device.

    Returns:
        Whether all data of the largest block is on the device.
    """
    holds_all, largest = False, tried.blocks()[0]
    for block in tried.blocks():
        for tokens in tried.tokens[:1] if holds_all else tried.tokens:
            shape, placed = replace(tried.of(block), prefill_tokens=tokens), tried.options.placed
            prediction = tried.attempt(placed_like(shape, placed) if placed else shape)
            if prediction is not None and block == largest and on_device:
                layout = prediction.layout
                room = sum(layout.room(tier) for tier in layout.pools)  # for the pages of the block at its peak
                holds_all = holds_all or bool(room >= 0.98 * tried.cost.peak(layout.policy))
    quickest = sorted(tried.predictions.values(), key=attrgetter("total_seconds")) if on_device else []
    for some in (quickest, [p for p in quickest if p.policy.block_size >= largest]):
        for policy in tried.batches(some[0].policy) if some else ():
            tried.attempt(policy)
    return holds_all


def plan_line(cost: Cost, prediction: Prediction) -> str:
    """Return where weights and KV cache lie, the block, the bottleneck and, if rates are measured, the time."""
    policy, shared = prediction.policy, cost.hardware.shared
    sizes = kind_bytes(cost.model, cost.workload, prediction)
    batches = 1 if policy.schedule == "row" else policy.num_gpu_batches
    parts = [
        f"{kind} {size(sizes[kind])} ({_places(prediction, KINDS[kind], shared)})" for kind in ("weights", "KV cache")
    ]
    block = count(batches * policy.gpu_batch_size, "sequence", "sequences")
    parts += [
        f"block of {block} ({count(batches, 'gpu_batch', 'gpu_batches')})",
        f"bottleneck: {waits_for(prediction.bottleneck, shared)}",
    ]
    if _timed(cost):
        rate = prediction.tokens / prediction.total_seconds
        parts.append(f"predicted: about {clock(prediction.total_seconds)} if no row ends early, {digits(rate)} tok/s")
    return f"plan: {'; '.join(parts)}"


def first_line(cost: Cost, prediction: Prediction) -> str:
    """Return the line that says when the first row ends; "" if that is soon, or if rates are not measured."""
    if prediction.first < MIN_FIRST_SECONDS or not _timed(cost):
        return ""
    return f"first results in about {minutes(prediction.first)} (predicted)"


def _timed(cost: Cost) -> bool:
    return cost.hardware.measured or timed(cost.hardware, cost.model)


def _places(prediction: Prediction, kind: str, shared: bool) -> str:
    used = {holder(prediction, place, shared): x for place, x in prediction.shares(kind).items() if x > 0}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{place} {percent(x)}" for place, x in used.items())


def holder(prediction: Prediction, place: str, shared: bool) -> str:
    """Return the name of a place; of an attention worker that stands for all that share its sequences, all names."""
    team = prediction.policy.team(place, prediction.layout.places)
    return f"{team[0]} to {team[-1]}" if len(team) > 1 else place_name(place, shared)


def kind_bytes(model: ModelFacts, workload: Workload, prediction: Prediction) -> dict[str, int]:
    """Return the bytes of each kind: weights as stored, all pages of the KV cache, most hidden states of a sweep."""
    account, block = prediction.layout.account, prediction.policy.block_size
    tokens = workload.prompt_tokens(block) + min(block, workload.count)
    return {
        "weights": sum(t.stored_bytes for t in model.tensors),
        "KV cache": sum(booked.get("KV cache", 0) for booked in account.values()),
        "hidden states": tokens * model.hidden_bytes,
    }


def waits_for(lane: str, shared: bool) -> str:
    """Return the work of a lane in words, as an object of "waits for"."""
    if shared and lane == "h2d":
        return "copies of weights from RAM to a slot"
    known = lane_of(lane)
    if known.of_disk:
        return f"reads from {known.place}" if known.way == "read" else f"writes to {known.place}"
    if known.of_worker:
        return worker_lane(known)
    if lane.startswith("replica"):
        return f"computing on engine {lane.removeprefix('replica')}"
    return {"h2d": "the link from host to device", "d2h": "the link from device to host", "device": "computing",
            "cpu": "computing on the host"}[known.link]  # fmt: skip


def _without_workers(tried: Candidates, best: Prediction) -> Prediction:
    """Return the best policy without attention workers if it is about as fast as `best` (MOST_SHARE), else `best`.

    A job without workers cannot lose one.
    """
    limit = tried.options.latency_limit
    others = [p for p in tried.predictions.values() if not p.policy.works and (limit is None or p.latency <= limit)]
    if not best.policy.works or not others:
        return best
    other = min(others, key=attrgetter("total_seconds"))
    return other if best.total_seconds > MOST_SHARE * other.total_seconds else best


def storing(among: Iterable[Prediction], best: Prediction, options: Options) -> Prediction:
    """Return the fastest policy that stores results of a long job often (MAX_AT_STAKE) and costs little, or `best`.

    A job that is killed loses the work on rows that have not ended.
    """
    if best.total_seconds < options.stores_from or best.at_stake <= MAX_AT_STAKE:
        return best
    latency, seconds = options.latency_limit or math.inf, MAX_LONGER * best.total_seconds
    often = [
        p
        for p in among
        if p.at_stake <= MAX_AT_STAKE
        and p.total_seconds <= seconds
        and p.latency <= latency
        and bool(p.policy.works) == bool(best.policy.works)
    ]
    return min(often, key=attrgetter("total_seconds"), default=best)


def unused_workers(tried: Iterable[Prediction], best: Prediction) -> str:
    """Return the message for a job that does not use its attention workers.

    Args:
        tried: policies of the search.
        best: the chosen policy.
    """
    seconds = min((p.total_seconds for p in tried if p.policy.works), default=None)
    with_them = "and no less with them" if seconds is None else f"and {clock(seconds)} with them"
    return (
        f"attention workers are not used: the job is predicted to take {clock(best.total_seconds)} without them,"
        f" {with_them}"
    )
