"""Page pools of one tier: how many pages each group of layers gets."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flexengine.errors import InvalidInput
from flexengine.places import workers_in_memory
from flexengine.plan.facts import CacheGroup, ModelFacts
from flexengine.plan.page_size import page_tokens
from flexengine.plan.workload import Workload
from flexengine.policy import HEADS, REQUESTS, TOKENS, Policy
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


def check_partition(model: ModelFacts, policy: Policy, places: Iterable[str]) -> None:
    """Raise InvalidInput if attention of the model cannot be divided as the policy says. places: of the machine."""
    workers = len(workers_in_memory(places))
    if policy.partition == HEADS and model.kv_heads % workers:
        raise InvalidInput(f"policy partition is {HEADS}, but the model's {model.kv_heads} KV heads cannot be divided"
                           f" evenly among {workers} attention workers; start a number of workers that divides them, or"
                           f" set partition to {REQUESTS} or {TOKENS}")  # fmt: skip
    if policy.partition == TOKENS and model.topk is not None:
        raise InvalidInput(f"policy partition is {TOKENS}, but with sparse attention a worker cannot know which values"
                           f" of other workers are larger; set partition to {REQUESTS} or {HEADS}")  # fmt: skip


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
