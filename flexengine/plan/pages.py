"""KV pages: how many tokens a page holds, how many pages each pool gets, and how many pages prefill moves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexengine.places import place_of
from flexengine.plan.facts import CacheGroup, ModelFacts
from flexengine.plan.sizes import ALIGN, aligned
from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool

PAGE_TOKENS = 16  # tokens of a KV page on the device
EXTENT = 256 << 10  # least bytes of a KV page off the device, so that transfers are long
Array = NDArray[np.float64]


def page_tokens(model: ModelFacts, tier: str, longest: int, window: int | None = None, slices: int = 1) -> int:
    """Return the tokens of one KV page.

    Pages of attention workers do not move to the device, so they are as small as there. Elsewhere off the device, a
    page has at least EXTENT bytes, or holds the longest sequence, and is a multiple of ALIGN bytes. A window has at
    least two pages, because attention reads only a part of its oldest page.

    Args:
        longest: tokens of the longest sequence.
        window: tokens that the layers' queries see, None for all.
        slices: number of attention workers among which the tokens of a page are divided.
    """
    if tier == "device" or place_of(tier).worker:
        return slices * PAGE_TOKENS
    wanted = min(-(-EXTENT // model.kv_token), longest if window is None else min(longest, -(-window // 2)))
    tokens = aligned(wanted, PAGE_TOKENS)
    while tokens * model.kv_token % ALIGN:
        tokens += PAGE_TOKENS
    return tokens


def empty_pools(
    model: ModelFacts, groups: Sequence[CacheGroup], tier: str, workload: Workload, batch: int, slices: int = 1
) -> tuple[Pool, ...]:
    """Return the pools of a tier, one per group of layers, before they get pages.

    Args:
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

    If not all needed pages fit, each pool gets its least, and an equal share of its other needed pages. If even the
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


class LayerPages(NamedTuple):
    """Pages of the layers that see equally many tokens."""

    layers: float  # share of all layers
    # device, away: pools on the device and off it; only their page sizes and windows count
    device: Pool
    away: Pool


def layer_pages(model: ModelFacts, longest: int) -> tuple[LayerPages, ...]:
    """Return the pages of a model's layers. longest: tokens of the longest sequence."""

    def pool(tier: str, window: int | None) -> Pool:
        return Pool(0, page_tokens(model, tier, longest, window), None, window)

    return tuple(
        LayerPages(len(group.layers) / len(model.layers), pool("device", group.window), pool("host", group.window))
        for group in model.cache_groups(longest)
    )


def moved_pages(pool: Pool, prompts: Array, prefill_tokens: int) -> tuple[Array, Array]:
    """Return the numbers of pages that prefill in pieces of `prefill_tokens` loads and stores, in one layer, by prompt.
    prompts: tokens of each prompt."""
    before = np.ceil(prompts / prefill_tokens) - 1  # whole pieces before the last
    starts = np.arange(0, before.max() + 1) * prefill_tokens
    read, written = pool.num_read(starts), pool.num_written(starts, starts + prefill_tokens)
    last, index = pool.num_written(before * prefill_tokens, prompts), before.astype(int)
    return np.cumsum(read)[index], (np.cumsum(written) - written)[index] + last
