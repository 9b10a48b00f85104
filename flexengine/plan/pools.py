"""Page pools of one tier: how many pages each group of layers gets."""

from collections.abc import Sequence
from dataclasses import replace

from flexengine.plan.facts import CacheGroup, ModelFacts
from flexengine.plan.page_size import page_tokens
from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool


def empty_pools(
    model: ModelFacts, groups: Sequence[CacheGroup], tier: str, workload: Workload, batch: int, slices: int = 1
) -> tuple[Pool, ...]:
    """Return the pools of a tier, one per group of layers, before they get pages.

    Args:
        groups: KV groups of the layers.
        tier: tier of the pools.
        workload: workload of the job; its longest sequence limits the page size.
        batch: most sequences of a gpu_batch.
        slices: as in `page_tokens`.
    """
    sizes = [page_tokens(model, tier, workload.longest, group.window, slices) for group in groups]
    pools = [Pool(0, size, None, group.window) for size, group in zip(sizes, groups, strict=True)]
    if tier == "device":
        return tuple(pools)
    return tuple(replace(pool, batch_pages=workload.pages(batch, pool)) for pool in pools)


def shared_out(needed: Sequence[int], least: Sequence[int], sizes: Sequence[int], room: int | None) -> list[int]:
    """Return the number of pages of each pool.

    If all needed pages do not fit, each pool gets its least, and an equal share of its other needed pages. If even the
    least does not fit, all pools get 0 pages.

    Args:
        needed: most pages that are used, by pool.
        least: pages of the longest sequence, by pool.
        sizes: bytes of one page in all layers, by pool.
        room: bytes for all pools, None for no limit.
    """
    if room is None or sum(n * size for n, size in zip(needed, sizes, strict=True)) <= room:
        return list(needed)
    left = room - sum(n * size for n, size in zip(least, sizes, strict=True))
    if left < 0:
        return [0] * len(needed)
    more = sum((n - low) * size for n, low, size in zip(needed, least, sizes, strict=True))
    pages = [low + (n - low) * left // more for n, low in zip(needed, least, strict=True)]
    left = room - sum(n * size for n, size in zip(pages, sizes, strict=True))
    for i, size in enumerate(sizes):  # bytes left by rounding down
        extra = min(needed[i] - pages[i], left // size)
        pages[i], left = pages[i] + extra, left - extra * size
    return pages
