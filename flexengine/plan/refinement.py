"""Try policies with data off the device, and refine the best: similar block shapes, and weights moved in small steps.

A worker computes attention of one gpu_batch while the device computes others, so with attention workers a block has
several gpu_batches. Under partition `requests` a gpu_batch belongs to one worker, so each worker gets one or two.
Partition `tokens` is left out: merged parts may differ in the last bits, and results must not depend on the plan.
"""

import logging
import math
from dataclasses import replace
from itertools import chain, permutations, product
from operator import attrgetter

from flexengine.activity import message
from flexengine.places import TIERS, WORKERS, workers_in_memory
from flexengine.plan.candidates import FALLBACK_GPU_BATCHES, FIRST_GPU_BATCH, Candidates
from flexengine.plan.cost import Prediction
from flexengine.plan.placement import Choice, Placement
from flexengine.policy import (
    FIXED,
    HEADS,
    NO_CACHE,
    ORDERS,
    PLACES,
    REQUESTS,
    TOKENS,
    Policy,
    Split,
    delegate_of,
    thousandths,
)

MAX_REFINED, MAX_ROUNDS = 8, 3  # policies refined per round, as many with layers in halves, and rounds
WEIGHT_STEPS = (0.2, 0.1, 0.05, 0.025)  # shares of the weights moved in one step
# A step may gain nothing: whole tensors move, and the first tensor of a size enlarges the slot.
MAX_STEPS_WITHOUT_GAIN = 2
FINE_STEPS = tuple(k / 500 for k in range(1, 16))  # shares of the weights moved at the end
MAX_FINE_RATIO = 1.01  # FINE_STEPS are tried in the best policies whose seconds are at most this times the leader's
HOST = TIERS.index("host")
STREAMED: Split = (0.0, 1.0, 0.0)  # all weights on the host
MOVES = ((2, 0), (2, 1), (1, 0), (0, 1), (0, 2))  # (from, to), by number of the place
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the KV cache on workers; the rest is on the device
# gpu_batches of a block under partition `heads`, and of each pair of workers under `requests`
WORKER_GPU_BATCHES = (2, 4)


def place_off_device(tried: Candidates, streams: bool) -> None:
    """Try policies with data off the device, and refine the best ones.

    Args:
        tried: receives the policies.
        streams: whether any data may leave the device; else only KV cache, to attention workers.
    """
    placement = Placement(tried, spills=not tried.cost.hardware.assumed)
    if streams:
        _stream(placement)
        if not tried.predictions and not placement.spills:
            placement = Placement(tried)  # memory holds no KV cache
            _stream(placement)
    if tried.cost.hardware.workers:
        _try_workers(placement)
    refine(placement)
    if streams and placement.weights_on_host:  # no plan is worse than streaming all weights from RAM in equal blocks
        for block in tried.blocks():
            tried.attempt(replace(tried.of(block), weights=STREAMED))
    if placement.failed is not None:
        message(f"the plan may not be the best: {placement.failed}", logging.WARNING)


def _stream(placement: Placement) -> None:
    """Solve the placement of every block size, with and without cache, hidden states and attention off the device."""
    tried = placement.tried
    choices = [Choice(cache, hidden) for cache, hidden in product((False, True), repeat=2)]
    choices += [Choice(True, False, delegate) for delegate in placement.delegates]
    for block, choice in product(tried.blocks(), choices):
        for shape in dict.fromkeys(tried.of(block, batch) for batch in (FIRST_GPU_BATCH, *FALLBACK_GPU_BATCHES)):
            if placement.solve_placement(shape, choice, wide=True):
                for diagonal in (shape, tried.even(block)):
                    placement.solve_placement(replace(diagonal, schedule="diagonal"), choice, wide=True)
                break


def refine(placement: Placement) -> None:
    """Try the neighbours of the best policies."""
    tried, explored = placement.tried, set[Policy]()
    if not tried.predictions:  # at most the smallest policies fit
        for policy, slots in product(tried.smallest(), (2, 1)):
            for block in reversed(tried.blocks()):  # a device with room for one layer may have many sequences in RAM
                if tried.attempt(replace(policy, slots=slots, gpu_batch_size=block)) is None:
                    break
        for slots in (2, 1):
            placement.solve_placement(replace(tried.smallest()[0], slots=slots), Choice(False, False))
    for _ in range(MAX_ROUNDS):
        before = tried.leader()
        for prediction in _best(tried):
            if prediction.policy not in explored:
                explored.add(prediction.policy)
                _try_neighbours(placement, prediction)
        if tried.leader() is before:
            break
    for policy in tried.batches(tried.leader().policy):
        tried.attempt(policy)
    leader = None
    while tried.leader() is not leader:  # block sizes one step below and above, while the job gets faster
        leader = tried.leader()
        for shape, tokens in product(tried.steps(leader.policy), tried.tokens):
            placement.solve_placement(replace(shape, prefill_tokens=tokens), Choice.of(leader.policy))
    leader = tried.leader()
    second = [p for p in _best(tried)[:2] if p.total_seconds <= MAX_FINE_RATIO * leader.total_seconds]
    policies = dict.fromkeys(p.policy for p in (leader, *second))
    for policy, (source, target), step in product(policies, _moves(placement), FINE_STEPS):
        if (moved := _moved(policy, source, target, step)) is not None:
            tried.attempt(moved)


def _moves(placement: Placement) -> tuple[tuple[int, int], ...]:
    """Return the MOVES and, with further disks, moves between each of them and every other place; without those of a
    host that is the device."""
    further = (move for move in permutations(range(len(placement.places)), 2) if max(move) >= len(TIERS))
    return tuple(move for move in (*MOVES, *further) if placement.weights_on_host or HOST not in move)


def _best(tried: Candidates) -> list[Prediction]:
    kinds: dict[tuple[str, int, bool], Prediction] = {}
    limit = tried.options.latency_limit

    def rank(p: Prediction) -> tuple[float, float]:
        return 0.0 if limit is None else max(limit, p.latency), p.total_seconds

    for prediction in sorted(tried.predictions.values(), key=rank):
        policy = prediction.policy
        kinds.setdefault((policy.schedule, policy.block_size, policy.half_layers), prediction)
    some = [[p for p in kinds.values() if p.policy.half_layers == half][:MAX_REFINED] for half in (False, True)]
    return sorted(chain.from_iterable(some), key=rank)


def _try_neighbours(placement: Placement, prediction: Prediction) -> None:
    tried, policy, cost = placement.tried, prediction.policy, placement.tried.cost
    choice = Choice.of(policy)
    # The second choice needs no buffers. The program counts buffers as soon as a kind of data may leave the device.
    for other, allowed in product(tried.neighbours(policy), dict.fromkeys((choice, Choice(False, False)))):
        placement.solve_placement(other, allowed)
    if policy.works:
        workers = len(workers_in_memory(cost.hardware.places))
        for partition in partitions(cost.model.kv_heads, workers, _by_tokens(tried)):
            tried.attempt(replace(policy, partition=partition))
        for order in ORDERS if cost.hardware.engines > 1 else ():
            tried.attempt(replace(policy, order=order))
    elif not choice.hidden:
        for delegate in dict.fromkeys(delegate_of(each, policy.cache) for each in (NO_CACHE, *placement.delegates)):
            tried.attempt(replace(policy, delegate=delegate))
    same = [tried.attempt(replace(policy, prefill_tokens=tokens)) for tokens in tried.tokens]
    _move_weights(placement, min((p for p in (prediction, *same) if p is not None), key=attrgetter("total_seconds")))


def _move_weights(placement: Placement, best: Prediction) -> None:
    """Move shares of the weights of a policy between tiers while the job gets faster."""
    for step, (source, target) in product(WEIGHT_STEPS, _moves(placement)):
        moved, idle = _moved(best.policy, source, target, step), 0  # idle: steps without gain
        while moved is not None and idle < MAX_STEPS_WITHOUT_GAIN:
            if (tried := placement.tried.attempt(moved)) is None:
                break
            best, idle = (tried, 0) if tried.total_seconds < best.total_seconds else (best, idle + 1)
            moved = _moved(moved, source, target, step)


def _moved(policy: Policy, source: int, target: int, step: float) -> Policy | None:
    """Return the policy with a share `step` of the weights moved; None if the source place has no weights."""
    weights = list(policy.weights) + [0.0] * (max(source, target) + 1 - len(policy.weights))
    if weights[source] <= 1e-9:
        return None
    step = min(step, weights[source])
    weights[source], weights[target] = weights[source] - step, weights[target] + step
    return replace(policy, weights=thousandths(weights))


def _by_tokens(tried: Candidates) -> bool:
    """Return whether workers may divide tokens. With sparse attention no worker knows the values of another."""
    return tried.options.by_tokens and tried.cost.model.topk is None


def partitions(kv_heads: int, workers: int, by_tokens: bool = False) -> tuple[str, ...]:
    """Return the partitions to try.

    Args:
        kv_heads: KV heads of the model.
        workers: number of attention workers.
        by_tokens: whether they may divide the tokens of each sequence.
    """
    ways = {REQUESTS: True, HEADS: workers > 1 and kv_heads % workers == 0, TOKENS: workers > 1 and by_tokens}
    return tuple(name for name, fits in ways.items() if fits)


def split_of(share: float) -> Split:
    """Return a split with this share on attention workers, and the rest on the device."""
    split = dict.fromkeys(PLACES, 0.0) | {"device": 1.0 - share, WORKERS: share}
    return tuple(split[place] for place in PLACES)


def _try_workers(placement: Placement) -> None:
    """Solve the placement of every block size with attention workers, if the machine has any."""
    tried = placement.tried
    workers = len(workers_in_memory(tried.cost.hardware.places))
    if not workers:
        return
    ways = partitions(tried.cost.model.kv_heads, workers, _by_tokens(tried))
    for block, share, partition in product(tried.blocks(), SHARES, ways):
        choice = Choice(False, False, attended=split_of(share), partition=partition)
        factor = max(1, workers / 2) if partition == REQUESTS else 1
        counts: tuple[int, ...] = WORKER_GPU_BATCHES
        orders: tuple[str, ...] = (FIXED,)
        if (engines := tried.cost.hardware.engines) > 1:  # one gpu_batch for each; one more, which rotate; two for each
            counts, orders, factor = (engines, engines + 1, 2 * engines), ORDERS, 1
        sizes = dict.fromkeys(max(1, math.ceil(block / (factor * count))) for count in counts)
        in_batches = dict.fromkeys(replace(tried.of(block, size), order=o) for size, o in product(sizes, orders))
        for shape, schedule in product(in_batches, ("continuous", "diagonal")):
            placement.solve_placement(replace(shape, schedule=schedule), choice, wide=True)
