"""The size of a KV page: how many tokens it holds."""

from flexengine.places import is_worker
from flexengine.plan.facts import ModelFacts
from flexengine.plan.sizes import ALIGN, aligned

PAGE_TOKENS = 16  # tokens of a KV page on the device
EXTENT = 256 << 10  # least bytes of a KV page off the device, so that transfers are long


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
    if tier == "device" or is_worker(tier):
        return slices * PAGE_TOKENS
    wanted = min(-(-EXTENT // model.kv_token), longest if window is None else min(longest, -(-window // 2)))
    tokens = aligned(wanted, PAGE_TOKENS)
    while tokens * model.kv_token % ALIGN:
        tokens += PAGE_TOKENS
    return tokens
