"""Policies with attention workers: which shares of the KV cache, partitions and gpu_batches the search tries.

A worker computes attention of one gpu_batch while the device computes others, so a block has several gpu_batches. Under
partition `requests` a gpu_batch belongs to one worker, so each worker gets one or two. Partition `tokens` is left out:
merged parts may differ in the last bits, and results must not depend on the plan.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from operator import attrgetter

from flexengine.places import WORKERS, workers_in_memory
from flexengine.plan.candidates import Candidates
from flexengine.plan.formatting import clock
from flexengine.plan.placement import Choice, Placement
from flexengine.plan.prediction import Prediction
from flexengine.policy import HEADS, PLACES, REQUESTS, Split

SHARES = (1.0, 0.75, 0.5, 0.25)  # of the KV cache on workers; the rest is on the device
GPU_BATCHES = (2, 4)  # gpu_batches of a block under partition `heads`, and of each pair of workers under `requests`
MOST_SHARE = 0.95  # workers are used if the job takes at most this share of its seconds without them


def partitions(kv_heads: int, workers: int) -> tuple[str, ...]:
    """Return the partitions to try.

    Args:
        kv_heads: KV heads of the model.
        workers: number of attention workers.
    """
    return (REQUESTS, HEADS) if workers > 1 and kv_heads % workers == 0 else (REQUESTS,)


def split_of(share: float) -> Split:
    """Return a split with this share on attention workers, and the rest on the device."""
    split = dict.fromkeys(PLACES, 0.0) | {"device": 1.0 - share, WORKERS: share}
    return tuple(split[place] for place in PLACES)


def try_workers(placement: Placement) -> None:
    """Solve the placement of every block size with attention workers, if the machine has any."""
    tried = placement.tried
    workers = len(workers_in_memory(tried.cost.hardware.places))
    if not workers:
        return
    ways = partitions(tried.cost.model.kv_heads, workers)
    for block, share, partition in product(tried.blocks(), SHARES, ways):
        choice = Choice(False, False, attended=split_of(share), partition=partition)
        factor = max(1, workers / 2) if partition == REQUESTS else 1
        sizes = dict.fromkeys(max(1, round(block / (factor * count))) for count in GPU_BATCHES)
        in_batches = dict.fromkeys(tried.of(block, size) for size in sizes)
        for shape, schedule in product(in_batches, ("continuous", "diagonal")):
            placement.solve_placement(replace(shape, schedule=schedule), choice, wide=True)


def without_workers(tried: Candidates, best: Prediction) -> Prediction:
    """Return the best policy without attention workers if it is about as fast as `best` (MOST_SHARE), else `best`.

    A job without workers cannot lose one.
    """
    limit = tried.options.latency_limit
    others = [p for p in tried.predictions.values() if not p.policy.works and (limit is None or p.latency <= limit)]
    if not best.policy.works or not others:
        return best
    other = min(others, key=attrgetter("total_seconds"))
    return other if best.total_seconds > MOST_SHARE * other.total_seconds else best


def unused(tried: Iterable[Prediction], best: Prediction) -> str:
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
