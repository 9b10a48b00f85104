"""Assignment of items to tiers: fractions become whole tensors, sequences and gpu_batches."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from flexengine.places import WORKERS, place_of, workers_in_memory
from flexengine.policy import REQUESTS, Policy, Split, places_of


def assign_tiers(sizes: Sequence[int], split: Split) -> list[str]:
    """Return the tier of each item, in order.

    As in FlexGen, the midpoint of an item in the cumulative size decides, and the first items go to the farthest place:
    disk, then host, then device. Rounding to whole items changes the fractions, so check memory on the result.

    Args:
        sizes: bytes (or counts) of the items.
        split: fractions by place, from near to far.
    """
    names = places_of(split)
    return [names[k] for k, start, end in _Items.of(tuple(sizes)).runs(split) for _ in range(start, end)]


class _Items(NamedTuple):
    ends: tuple[int, ...]  # cumulative size before the first item and after each
    middles: tuple[float, ...]  # midpoint of each item in the cumulative size, as a fraction of the total

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(sizes: tuple[int, ...]) -> "_Items":
        """Return the items of these sizes. Cached: a model's layers are alike."""
        ends = tuple(accumulate(sizes, initial=0))
        middles = ((a + b) / 2 / ends[-1] if ends[-1] else 0.5 for a, b in pairwise(ends))
        return _Items(ends, tuple(middles))

    def runs(self, split: Split) -> list[tuple[int, int, int]]:
        """Return runs (index of the place, first item, last item + 1). A place with share 0 gets no items."""
        runs, start, total = list[tuple[int, int, int]](), 0, 0.0
        nearest = next((k for k, share in enumerate(split) if share > 0), len(split) - 1)
        for k in range(len(split) - 1, -1, -1):
            total += split[k]
            end = bisect_left(self.middles, total) if k else len(self.middles)
            if end > start:
                runs.append((k if split[k] > 0 else nearest, start, end))
                start = end
        return runs


@lru_cache(maxsize=1024)
def count_by_tier(count: int, split: Split) -> Mapping[str, int]:
    """Return the number of items per tier if `assign_tiers` assigns `count` items of one size. Tiers without items are
    left out. Cached: the policy search requests the same assignments often."""
    tiers = Counter(assign_tiers([1] * count, split))
    return {tier: tiers[tier] for tier in places_of(split) if tiers[tier]}


def reaches_workers(count: int, split: Split) -> bool:
    """Return whether a split has at least one of `count` sequences on attention workers."""
    return WORKERS in count_by_tier(count, split)


def cache_homes(policy: Policy, places: Iterable[str]) -> dict[str, int]:
    """Return the number of sequences of a block per place of their KV cache. Places without sequences are left out.

    Attention workers get equal parts of the share of all workers. If all workers hold a part of every sequence, the
    first one stands for all. A worker with pages in a file may get any sequence of the share that finds no room at the
    others, so the numbers may sum to more than the block.

    Args:
        places: places of the machine.
    """
    places, by_place = tuple(places), dict(count_by_tier(policy.block_size, policy.cache))
    shared, workers = by_place.pop(WORKERS, 0), workers_in_memory(places)
    late = dict.fromkeys((place for place in places if place_of(place).filed), shared)
    if policy.partition != REQUESTS:
        workers, late = workers[:1], {}
    each = {place: shared // len(workers) + (i < shared % len(workers)) for i, place in enumerate(workers)} | late
    return by_place | {place: n for place, n in each.items() if n}


@lru_cache(maxsize=256)
def place_groups(groups: tuple[tuple[int, ...], ...], split: Split) -> tuple[tuple[str, ...], ...]:
    """Return a tier for every item so that the totals match `split`.

    Each group's rounding error is carried to the next, so the total is off by about half an item. `assign_tiers` alone
    repeats the error in every group: the matrices of an OPT layer are 1/12 or 1/3 of the layer, so 27 % of each layer
    would become 0 or 1/3. Cached: the policy search requests the same assignments often.

    Args:
        groups: item sizes, one tuple per layer, head or embedding.
        split: fractions by place, from near to far.
    """
    names = places_of(split)
    if max(split) == 1.0:
        tier = names[split.index(1.0)]
        return tuple((tier,) * len(sizes) for sizes in groups)
    tiers: list[tuple[str, ...]] = []
    owed = [0.0] * len(split)  # by place: share of the sizes so far less the sizes assigned
    for sizes in groups:
        items = _Items.of(sizes)
        owed = [n + share * items.ends[-1] for n, share in zip(owed, split, strict=True)]
        due = [max(0.0, n) if share else 0.0 for n, share in zip(owed, split, strict=True)]
        whole = sum(due)
        assigned: tuple[str, ...] = ()
        for k, start, end in items.runs(tuple([n / whole for n in due]) if whole else split):
            assigned += (names[k],) * (end - start)
            owed[k] -= items.ends[end] - items.ends[start]
        tiers.append(assigned)
    return tuple(tiers)
