"""Page pools of one tier: how many pages each group of layers gets."""

from collections.abc import Sequence
from dataclasses import replace

from flexengine.plan.facts import CacheGroup, ModelFacts
from flexengine.plan.sizes import page_tokens
from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool


def empty_pools(
    model: ModelFacts, groups: Sequence[CacheGroup], tier: str, workload: Workload, batch: int
) -> tuple[Pool, ...]:
    """Return the pools of a tier before they have pages: page sizes, and most pages of a gpu_batch off the device.

    Args:
        batch: most sequences of a gpu_batch.
    """
    pools = [Pool(0, page_tokens(model, tier, workload.longest, group.window), None, group.window) for group in groups]
    if tier == "device":
        return tuple(pools)
    return tuple(replace(pool, batch_pages=workload.pages(batch, pool)) for pool in pools)


def shared_out(needed: Sequence[int], least: Sequence[int], sizes: Sequence[int], room: int | None) -> list[int]:
    """Return the pages that each pool gets: all that are needed, or as many as there is room for. Then every pool gets
    the same share of what it needs beyond its least. [0, ...] if there is no room for the least.

    Args:
        needed: most pages that are used, by pool.
        least: pages of the longest sequence, by pool.
        sizes: bytes of one page in all layers, by pool.
        room: bytes, None for no limit.
    """
    if room is None or sum(n * size for n, size in zip(needed, sizes, strict=True)) <= room:
        return list(needed)
    left = room - sum(n * size for n, size in zip(least, sizes, strict=True))
    if left < 0:
        return [0] * len(needed)
    more = sum((n - few) * size for n, few, size in zip(needed, least, sizes, strict=True))
    pages = [few + (n - few) * left // more for n, few in zip(needed, least, strict=True)]
    left = room - sum(n * size for n, size in zip(pages, sizes, strict=True))
    for i, size in enumerate(sizes):  # what rounding down left
        extra = min(needed[i] - pages[i], left // size)
        pages[i], left = pages[i] + extra, left - extra * size
    return pages
